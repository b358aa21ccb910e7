"""Counters of seconds, plain numbers with one writer each; and a mark for waits for other ranks or a device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent inside `with watch.running():`, nested uses counted once."""

    seconds: float = 0.0
    _depth: int = 0
    _begin: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside the block."""
        if self._depth == 0:
            self._begin = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.seconds += time.perf_counter() - self._begin


_ELSEWHERE: set[object] = set()


@contextmanager
def awaiting_others() -> Iterator[None]:
    """Use it around a wait for another rank or a device: it may take any time, and another watchdog watches it."""
    token = object()
    _ELSEWHERE.add(token)
    try:
        yield
    finally:
        _ELSEWHERE.discard(token)


def others_are_awaited() -> bool:
    """True while any thread is inside `awaiting_others`."""
    return bool(_ELSEWHERE)
