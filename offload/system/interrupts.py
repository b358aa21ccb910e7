"""Signals while the engine changes its state: their handlers run when the change is complete.

[Note: where an interrupt may end something] Python runs a signal's handler between any two bytecodes of the main
thread, and Ctrl-C raises there. This would leave half of a change: a unit that is bound but not listed, a block that is
never freed. So code that changes state runs inside `deferring_interrupts`, which defers signals until it ends. A wait
for a disk or for other ranks may take for ever. Only there `deliver_overdue` runs the handlers: code that waits can
handle an error at that point.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps it and makes enums: ten times slower
import functools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
DEFER_SECONDS_MAX = 0.2  # A signal that is deferred for so long may end a wait.
_MAIN = threading.main_thread().ident


class _DeferringInterrupts:
    """The context manager. The process has one; it acts in the main thread only, in others it does nothing."""

    def __init__(self) -> None:
        self._depth = 0
        self._replaced_handlers: dict[int, Any] = {}  # Signal -> the handler that ours has replaced.
        self._deferred: list[tuple[int, FrameType | None]] = []
        self._since = 0.0
        self._handler = self._defer

    def __enter__(self) -> None:
        if threading.get_ident() != _MAIN:
            return
        if self._depth == 0:
            for number in SIGNALS:
                before = _signal.getsignal(number)
                if callable(before) and before is not self._handler:  # else no other Python handler can raise
                    self._replaced_handlers[number] = before
                    _signal.signal(number, self._handler)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.get_ident() != _MAIN:
            return
        # At depth 0 our handler passes signals on. If a handler raises here, ours stays installed, which does no harm.
        self._depth -= 1
        if self._depth == 0:
            for number, before in self._replaced_handlers.items():
                if _signal.getsignal(number) is self._handler:  # code inside may have set another one
                    _signal.signal(number, before)
            self._deliver()

    def _deliver(self) -> None:
        """Run the handlers of the deferred signals; stops at the first that raises."""
        while self._deferred:
            number, frame = self._deferred.pop(0)
            self._replaced_handlers[number](number, frame)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._depth == 0:  # during `__enter__` or `__exit__`
            self._replaced_handlers[number](number, frame)
            return
        if not self._deferred:
            self._since = time.monotonic()
        self._deferred.append((number, frame))

    def deliver_overdue(self) -> None:
        """In the main thread: run the handlers of deferred signals once the first has waited for DEFER_SECONDS_MAX."""
        if self._deferred and threading.get_ident() == _MAIN and time.monotonic() - self._since >= DEFER_SECONDS_MAX:
            self._deliver()


deferring_interrupts = _DeferringInterrupts()


def atomic(function: Function) -> Function:
    """Decorator: runs `function` inside `deferring_interrupts`, so that signal handlers run after it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with deferring_interrupts:
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]
