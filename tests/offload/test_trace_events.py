"""Trace Event JSON: valid by the rules of the format, and nothing of the recording is lost on the way."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.files.trace_events import BINS_MAX, assign_rows, check_target, trace_document, write_trace
from offload.timeline import COMPUTE, READS, TRACKS, WRITES, Recording, Span

ORIGIN_NS, LENGTH_NS = 10**15, 50_000_000
"""Recordings start at a large clock value, where floats of microseconds would lose nanoseconds."""

moments = st.integers(0, LENGTH_NS) | st.integers(0, 40)
intervals = st.tuples(moments, moments).map(sorted)
spans = st.lists(
    st.builds(
        lambda lane, name, interval, nbytes: Span(
            lane, name, ORIGIN_NS + interval[0], ORIGIN_NS + interval[1], nbytes, 0
        ),
        st.sampled_from(TRACKS),
        st.text(max_size=5),
        intervals,
        st.integers(0, 10**9),
    ),
    max_size=40,
)


def recording_of(made: list[Span], dropped: int = 0) -> Recording:
    return Recording(tuple(made), ORIGIN_NS, ORIGIN_NS + LENGTH_NS, dropped)


def overlaps(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return first[0] < second[1] and second[0] < first[1]


def inside(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return second[0] <= first[0] and first[1] <= second[1]


def complete_events(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def interval_of(event: dict[str, Any]) -> tuple[int, int]:
    """In nanoseconds; readers that round and readers that truncate see the same."""
    begin, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
    assert (begin, duration) == (int(event["ts"] * 1000), int(event["dur"] * 1000))
    return begin, begin + duration


@given(st.lists(intervals, max_size=30), st.booleans())
def test_spans_of_one_row_never_overlap_in_part(given_intervals: list[list[int]], nested: bool) -> None:
    made = sorted((Span(READS, "", a, b, 0, 0) for a, b in given_intervals), key=lambda s: (s.begin_ns, -s.end_ns))
    rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for span, row in zip(made, assign_rows(made, nested=nested), strict=True):
        here = span.begin_ns, span.end_ns
        for other in rows[row]:
            assert not overlaps(here, other) or (nested and (inside(here, other) or inside(other, here)))
        rows[row].append(here)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=30))
def test_there_are_as_many_rows_as_spans_at_once(given_spans: list[tuple[int, int]]) -> None:
    made = sorted(Span(READS, "", begin, begin + width, 0, 0) for begin, width in given_spans)
    at_once = max((sum(s.begin_ns <= t < s.end_ns for s in made) for t in range(91)), default=0)
    assert len(set(assign_rows(made, nested=False))) == at_once


@given(spans, st.integers(0, 5))
def test_a_document_is_valid_and_holds_every_span_to_the_nanosecond(made: list[Span], dropped: int) -> None:
    document = json.loads(json.dumps(trace_document(recording_of(made, dropped), {"steps": 3}, rank=2)))
    events = complete_events(document)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    assert all(event["pid"] == 3 and event["tid"] > 0 for event in document["traceEvents"] if event["ph"] == "X")
    threads: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    for on_thread in threads.values():
        assert len({event["cat"] for event in on_thread}) == 1
        for number, event in enumerate(on_thread):
            for other in on_thread[:number]:
                here, there = interval_of(event), interval_of(other)
                may_nest = event["cat"] == COMPUTE and (inside(here, there) or inside(there, here))
                assert not overlaps(here, there) or may_nest
    found = Counter((e["cat"], e["name"], *interval_of(e), e["args"].get("bytes", 0)) for e in events)
    assert found == Counter((s.track, s.name, s.begin_ns - ORIGIN_NS, s.end_ns - ORIGIN_NS, s.nbytes) for s in made)
    assert document["otherData"] == {
        "steps": 3,
        "seconds": LENGTH_NS / 1e9,
        "spans": len(made),
        "spans_dropped": dropped,
    }


@given(spans)
def test_every_thread_and_lane_has_a_name_and_the_process_its_rank(made: list[Span]) -> None:
    events = trace_document(recording_of(made), {}, rank=1)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["ph"] == "M"}
    assert {event["tid"] for event in events if event["ph"] == "X"} <= set(names)
    assert set(TRACKS) <= set(names.values()) and len(set(names.values())) == len(names)
    for event in events:
        if event["ph"] == "X":
            assert names[event["tid"]].split(" ")[0] == event["cat"]
    (process,) = [e for e in events if e["name"] == "process_name" and e["ph"] == "M"]
    assert process["args"] == {"name": "rank 1"}


@given(spans)
def test_a_throughput_curve_adds_up_to_the_bytes_of_its_lane(made: list[Span]) -> None:
    events = trace_document(recording_of(made), {})["traceEvents"]
    for name, lane in (("NVMe read GB/s", READS), ("NVMe write GB/s", WRITES)):
        points = [(e["ts"], e["args"]["GB/s"]) for e in events if e["ph"] == "C" and e["name"] == name]
        nbytes = sum(span.nbytes for span in made if span.track == lane)
        area = sum(rate * (after - before) * 1000 for (before, rate), (after, _) in pairwise(points))
        assert math.isclose(area, nbytes, rel_tol=1e-9)
        assert len(points) <= BINS_MAX + 2 and all(rate >= 0 for _, rate in points)
        assert not points or points[-1][1] == 0


def test_a_file_holds_the_document(tmp_path: Path) -> None:
    document = trace_document(recording_of([Span(READS, "weights", ORIGIN_NS, ORIGIN_NS + 5, 1, 0)]), {"steps": 1})
    target = check_target(str(tmp_path / "trace.json"))
    write_trace(target, document)
    assert json.loads(target.read_text()) == document


@pytest.mark.parametrize("name", ["missing/trace.json", "."])
def test_a_path_that_cannot_be_written_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="existing, writable folder") as caught:
        check_target(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
