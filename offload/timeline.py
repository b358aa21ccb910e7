"""A record of spans: when computation, transfers and waits began and ended. Kept only while recording is on.

One `Timeline` per engine. While it is off, recording costs one attribute test. While it is on, a span is
added once, when it ends: appends to the buffer are atomic, so threads need no lock. The buffer is bounded:
once it is full, the oldest spans are dropped, and their number is reported.

Seconds are counted at all times, by stopwatches: plain numbers with one writer each.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from offload.errors import StateError

Track = Literal["compute", "stalls", "updates", "reads", "writes", "copies", "collectives"]
TRACKS: tuple[Track, ...] = get_args(Track)
"""In the order of the picture. With one rank there are no spans of collectives."""
COMPUTE: Track = "compute"
STALLS: Track = "stalls"
UPDATES: Track = "updates"
READS: Track = "reads"
WRITES: Track = "writes"
COPIES: Track = "copies"
SPANS_MAX = 1 << 17
"""The most spans that are kept; about 250 bytes each."""


class Span(NamedTuple):
    """One activity with its begin and end, from `time.perf_counter_ns`."""

    track: Track
    name: str
    begin_ns: int
    end_ns: int
    nbytes: int
    """Bytes moved; for an update, the bytes of its weights; 0 if the number has no meaning."""
    serial: int
    """Number of spans recorded earlier in this recording."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The content of a timeline when it was turned off."""

    spans: tuple[Span, ...]
    """In the order in which they ended, none beginning before `begin_ns`."""
    begin_ns: int
    end_ns: int
    dropped: int
    """Number of old spans that the full buffer has dropped."""


class Timeline:
    """A recorder of spans.

    Attributes:
        is_on: True while spans are recorded. `start` and `stop` alone write it.
    """

    def __init__(self, spans_max: int = SPANS_MAX) -> None:
        self.is_on = False
        self._spans: deque[Span] = deque(maxlen=spans_max)
        self._serials = itertools.count()
        self._begin_ns = 0

    def start(self) -> None:
        """Drop all recorded spans and begin a new recording. Raises StateError: it is on."""
        if self.is_on:
            raise StateError("timeline: a recording is already running; end it before starting another")
        self._spans.clear()
        self._serials = itertools.count()
        self._begin_ns = time.perf_counter_ns()
        self.is_on = True

    def stop(self) -> Recording:
        """End the recording and return it. Spans that have not ended are not in it. Raises StateError: it is off."""
        if not self.is_on:
            raise StateError("timeline: nothing is being recorded")
        self.is_on = False
        end_ns = time.perf_counter_ns()
        spans = tuple(span._replace(begin_ns=max(span.begin_ns, self._begin_ns)) for span in self._spans)
        self._spans.clear()
        dropped = max((span.serial + 1 for span in spans), default=0) - len(spans)
        return Recording(spans, self._begin_ns, end_ns, dropped)

    def span(self, track: Track, name: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """A context that is timed. It is recorded if the timeline is on at both its ends, also if it raises."""
        return self._record(track, name, nbytes) if self.is_on else _OFF

    @contextmanager
    def _record(self, track: Track, name: str, nbytes: int) -> Iterator[None]:
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(track, name, begin_ns, nbytes)

    def add(self, track: Track, name: str, begin_ns: int, nbytes: int = 0) -> None:
        """Record a span that began at `begin_ns` (time.perf_counter_ns) and ends now; does nothing while off."""
        if self.is_on:
            span = Span(track, name, begin_ns, time.perf_counter_ns(), nbytes, next(self._serials))
            self._spans.append(span)


_OFF: AbstractContextManager[None] = nullcontext()


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


_EXTERNAL_WAITS: set[object] = set()


@contextmanager
def external_wait() -> Iterator[None]:
    """Use it around a wait for another rank or a device: it may take any time, and another watchdog watches it."""
    token = object()
    _EXTERNAL_WAITS.add(token)
    try:
        yield
    finally:
        _EXTERNAL_WAITS.discard(token)


def has_external_wait() -> bool:
    """True while any thread is inside `external_wait`."""
    return bool(_EXTERNAL_WAITS)
