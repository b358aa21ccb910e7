"""What happened when: spans of computation, transfers and waits, kept while somebody asks for them.

One `Timeline` per engine. While it is off, recording costs one attribute test. While it is on, a span
is noted once, when it ends: appends to the buffer are atomic, so lanes need no lock. The
buffer is bounded: once it is full the oldest spans go, and their number is told.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from offload.errors import StateError

Lane = Literal["compute", "stalls", "updates", "reads", "writes", "copies", "collectives"]
LANES: tuple[Lane, ...] = get_args(Lane)
"""In the order of the picture. Collectives stay empty with one rank."""
COMPUTE: Lane = "compute"
STALLS: Lane = "stalls"
UPDATES: Lane = "updates"
READS: Lane = "reads"
WRITES: Lane = "writes"
COPIES: Lane = "copies"
SPANS_MAX = 1 << 17
"""Spans kept at most; about 250 bytes each."""


class Span(NamedTuple):
    """Something that took time. Times are `time.perf_counter_ns`."""

    lane: Lane
    name: str
    begin_ns: int
    end_ns: int
    nbytes: int
    """Bytes moved; of an update, those of its weights; 0 where that says nothing."""
    serial: int
    """Spans recorded before it since the recording began."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What a timeline held when it was turned off."""

    spans: tuple[Span, ...]
    """In the order in which they ended, none beginning before `begin_ns`."""
    begin_ns: int
    end_ns: int
    dropped: int
    """Spans that were older than the buffer is long."""


class Timeline:
    """A recorder of spans.

    Attributes:
        on: True while spans are recorded. `start` and `stop` alone write it.
    """

    def __init__(self, spans_max: int = SPANS_MAX) -> None:
        self.on = False
        self._spans: deque[Span] = deque(maxlen=spans_max)
        self._serials = itertools.count()
        self._begin_ns = 0

    def start(self) -> None:
        """Forget what was recorded and begin anew.

        Raises:
            StateError: it is on.
        """
        if self.on:
            raise StateError("timeline: a recording is under way; end it before another one begins")
        self._spans.clear()
        self._serials = itertools.count()
        self._begin_ns = time.perf_counter_ns()
        self.on = True

    def stop(self) -> Recording:
        """End the recording and hand it over. What is still under way is not in it.

        Raises:
            StateError: it is off.
        """
        if not self.on:
            raise StateError("timeline: nothing is being recorded")
        self.on = False
        end_ns = time.perf_counter_ns()
        spans = tuple(span._replace(begin_ns=max(span.begin_ns, self._begin_ns)) for span in self._spans)
        self._spans.clear()
        dropped = max((span.serial + 1 for span in spans), default=0) - len(spans)
        return Recording(spans, self._begin_ns, end_ns, dropped)

    def span(self, lane: Lane, name: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """A context to be timed. Recorded if the timeline is on at both its ends, whether it raises or not."""
        return _Running(self, lane, name, nbytes) if self.on else _OFF

    def add(self, lane: Lane, name: str, begin_ns: int, nbytes: int = 0) -> None:
        """Record what began at `begin_ns` (time.perf_counter_ns) and ends now; nothing while off."""
        if self.on:
            span = Span(lane, name, begin_ns, time.perf_counter_ns(), nbytes, next(self._serials))
            self._spans.append(span)


_OFF: AbstractContextManager[None] = nullcontext()


class _Running:
    """A span that has begun."""

    __slots__ = ("_begin_ns", "_lane", "_name", "_nbytes", "_timeline")

    def __init__(self, timeline: Timeline, lane: Lane, name: str, nbytes: int) -> None:
        self._timeline, self._lane, self._name, self._nbytes = timeline, lane, name, nbytes

    def __enter__(self) -> None:
        self._begin_ns = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        self._timeline.add(self._lane, self._name, self._begin_ns, self._nbytes)
