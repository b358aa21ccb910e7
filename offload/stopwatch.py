"""Counters of what moved and what it cost. Plain numbers; one writer each."""

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
