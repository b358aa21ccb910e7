"""A recording as Trace Event JSON, which Perfetto and chrome://tracing open.

[Note: rows] In this format, spans of one thread must be nested or must not overlap. Requests overlap freely. So a
track has as many rows ("reads 1", "reads 2", ...) as it needs; each row is a thread in the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.system.regular_files import open_regular
from offload.timeline import COMPUTE, READS, STALLS, TRACKS, WRITES, Recording, Span, Track

ROWS_MAX = 1000  # Thread numbers reserved per track.
BIN_NS_MIN = 1_000_000
BINS_MAX = 1000  # The most points of a throughput curve.
COUNTERS: Mapping[str, Track] = {"NVMe read GB/s": READS, "NVMe write GB/s": WRITES}


def trace_document(recording: Recording, facts: Mapping[str, Any], rank: int = 0) -> dict[str, Any]:
    """The file as a dict: `traceEvents`, and `facts` with the counts of spans under `otherData`."""
    process = rank + 1  # Perfetto keeps process and thread 0 for the idle task
    events = [_metadata("process_name", process, 0, name=f"rank {rank}")]
    for number, track in enumerate(TRACKS):
        spans = sorted((s for s in recording.spans if s.track == track), key=lambda s: (s.begin_ns, -s.end_ns))
        rows = assign_rows(spans, nested=track == COMPUTE)
        first = number * ROWS_MAX + 1
        for row in range(max(rows, default=0) + 1):
            thread = first + row
            events.append(_metadata("thread_name", process, thread, name=track if row == 0 else f"{track} {row + 1}"))
            events.append(_metadata("thread_sort_index", process, thread, sort_index=thread))
        for span, row in zip(spans, rows, strict=True):
            events.append(_complete(span, recording.begin_ns, process, first + row))
    for name, track in COUNTERS.items():
        events.extend(_counter(name, track, recording, process))
    counts = {"seconds": (recording.end_ns - recording.begin_ns) / 1e9, "spans": len(recording.spans)}
    other_data = {**facts, **counts, "spans_dropped": recording.dropped}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other_data}


def check_target(path: str | os.PathLike[str]) -> Path:
    """The path, if a file can be written there: an error is better before the steps than after them.

    Raises ConfigError: its folder does not exist or is not writable.
    """
    target = Path(path)
    if target.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {target}: expected a file in an existing, writable folder")
    return target


def write_trace(path: Path, document: Mapping[str, Any]) -> None:
    """Write the file. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW  # others may write to the folder, too
    with os.fdopen(open_regular(path, flags, 0o666), "w", encoding="utf-8") as file:
        file.write(json.dumps(document, ensure_ascii=False) + "\n")


def assign_rows(spans: Sequence[Span], *, nested: bool) -> list[int]:
    """A row for each span, so that spans of one row do not overlap.

    `spans`: sorted by begin, longer first; `nested`: a span may lie inside another one of its row.
    """
    open_ends: list[list[int]] = []
    rows = []
    for span in spans:
        row = next((r for r, ends in enumerate(open_ends) if _fits(span, ends, nested)), len(open_ends))
        if row == len(open_ends):
            open_ends.append([])
        open_ends[row].append(span.end_ns)
        rows.append(row)
    return rows


def _fits(span: Span, ends: list[int], nested: bool) -> bool:
    """True if the row whose open spans end at `ends` (outermost first) can take `span`; removes spans that are over."""
    while ends and ends[-1] <= span.begin_ns:
        ends.pop()
    return not ends or (nested and span.end_ns <= ends[-1])


def _metadata(kind: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}


def _complete(span: Span, origin_ns: int, process: int, thread: int) -> dict[str, Any]:
    event = {
        "ph": "X",
        "name": span.name,
        "cat": span.track,
        "ts": _microseconds(span.begin_ns - origin_ns),
        "dur": _microseconds(span.end_ns - span.begin_ns),
        "pid": process,
        "tid": thread,
        "args": {"bytes": span.nbytes} if span.nbytes else {},
    }
    if span.track == STALLS:
        event["cname"] = "terrible"  # chrome://tracing's name of its red
    return event


def _microseconds(ns: int) -> float:
    """Some readers round to whole nanoseconds, some truncate: a quarter added gives the same number in both.

    If a nanosecond were lost, adjacent spans could overlap, and readers drop such spans.
    """
    return (ns + 0.25) / 1000


def _counter(name: str, track: Track, recording: Recording, process: int) -> list[dict[str, Any]]:
    """The track's throughput over time; the bytes of each span are spread evenly over its duration."""
    duration_ns = recording.end_ns - recording.begin_ns
    width_ns = max(BIN_NS_MIN, -(-duration_ns // BINS_MAX))
    bins = [0.0] * (duration_ns // width_ns + 1)
    for span in recording.spans:
        if span.track != track or not span.nbytes:
            continue
        begin_ns, end_ns = span.begin_ns - recording.begin_ns, max(span.end_ns, span.begin_ns + 1) - recording.begin_ns
        for index in range(begin_ns // width_ns, min((end_ns - 1) // width_ns + 1, len(bins))):
            inside_ns = min(end_ns, (index + 1) * width_ns) - max(begin_ns, index * width_ns)
            bins[index] += span.nbytes * inside_ns / (end_ns - begin_ns)
    if not any(bins):
        return []
    rates = [nbytes / width_ns for nbytes in bins] + [0.0]  # bytes per nanosecond are GB/s
    return [
        {"ph": "C", "name": name, "pid": process, "ts": index * width_ns / 1000, "args": {"GB/s": rate}}
        for index, rate in enumerate(rates)
    ]
