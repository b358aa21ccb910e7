"""Whether the ranks still work together: the first error that shows they do not ends it permanently."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from offload.errors import PeerError, RankDivergenceError, StateError


class FailureListener(Protocol):
    """Depends on the ranks' working together."""

    def on_failure(self, error: BaseException) -> None: ...


class FailureState:
    """The state of one engine's collectives on this rank: working, failed or closed. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[weakref.ref[FailureListener]] = []
        self.failure: BaseException | None = None  # The error that ended it.
        self.is_closed = False

    def add_listener(self, listener: FailureListener) -> None:
        """Register an object to call at the end, on the thread that ends it. It is not kept alive."""
        self._listeners.append(weakref.ref(listener))

    def on_failure(self, error: BaseException) -> None:
        """What this depends on has ended: this ends too."""
        self.fail(copy_error(error))

    def raise_if_failed(self) -> None:
        """Raise if it has failed, or is closed."""
        if self.failure is not None:
            raise copy_error(self.failure)
        if self.is_closed:
            raise StateError("collectives: the engine is closed")

    def fail(self, error: BaseException) -> BaseException:
        """End it with `error`, unless it has ended before; returns the error that has ended it."""
        with self._lock:
            first = self.failure is None
            if first:
                self.failure = error
        if first:
            for reference in self._listeners:
                if (listener := reference()) is not None:
                    listener.on_failure(error)
        return self.failure or error


def copy_error(error: BaseException) -> BaseException:
    """A copy of the error for another caller, since an exception object has only one traceback."""
    if isinstance(error, RankDivergenceError):
        return type(error)(*error.args)
    return RankDivergenceError(
        f"the ranks stopped working together because of an earlier error: {type(error).__name__}: {error}"
    )


@contextmanager
def naming_ranks(what: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Inside, an error that names peers is raised again with their ranks.

    `what`: the common operation; `ranks`: peer -> its rank; None: the numbers of peers are ranks.
    """
    try:
        yield
    except PeerError as error:
        lost = [peer if ranks is None else ranks[peer] for peer in error.peers]
        raise PeerError(f"{what} with {', '.join(f'rank {rank}' for rank in lost)}: {error}", lost) from error
