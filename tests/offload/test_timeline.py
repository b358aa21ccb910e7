"""The recorder: nothing while off, everything while on, bounded, safe for one writer a lane."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import StateError
from offload.io.io_loop import IoLoop
from offload.timeline import COMPUTE, READS, STALLS, TRACKS, Timeline


def test_off_means_nothing_is_kept() -> None:
    timeline = Timeline()
    timeline.add(READS, "early", 0)
    with timeline.span(COMPUTE, "early"):
        pass
    timeline.start()
    assert timeline.stop().spans == ()
    timeline.add(READS, "late", 0)
    timeline.start()
    assert timeline.stop().spans == ()


def test_a_span_is_kept_only_if_the_timeline_is_on_at_both_its_ends() -> None:
    timeline = Timeline()
    with timeline.span(COMPUTE, "begun before"):
        timeline.start()
    with timeline.span(COMPUTE, "whole"):
        pass
    with timeline.span(COMPUTE, "ended after"):
        recording = timeline.stop()
    assert [span.name for span in recording.spans] == ["whole"]
    timeline.start()
    assert timeline.stop().spans == ()


def test_a_span_that_raises_is_kept_and_the_error_passes() -> None:
    timeline = Timeline()
    timeline.start()
    with pytest.raises(KeyError), timeline.span(COMPUTE, "failing", 7):
        raise KeyError
    (span,) = timeline.stop().spans
    assert (span.track, span.name, span.nbytes) == (COMPUTE, "failing", 7)


def test_what_began_before_the_recording_begins_with_it() -> None:
    timeline = Timeline()
    early_ns = time.perf_counter_ns()
    timeline.start()
    timeline.add(READS, "under way", early_ns, 4096)
    recording = timeline.stop()
    (span,) = recording.spans
    assert span.begin_ns == recording.begin_ns <= span.end_ns <= recording.end_ns and span.nbytes == 4096


@given(st.integers(1, 20), st.integers(0, 60))
def test_a_full_buffer_drops_the_oldest_and_counts_them(spans_max: int, count: int) -> None:
    timeline = Timeline(spans_max)
    for round_number in range(2):  # the count begins anew with each recording
        timeline.start()
        for number in range(count):
            timeline.add(READS, f"{round_number}.{number}", 0)
        recording = timeline.stop()
        kept = min(count, spans_max)
        assert [span.name for span in recording.spans] == [f"{round_number}.{n}" for n in range(count - kept, count)]
        assert recording.dropped == count - kept


def test_lanes_written_by_threads_of_their_own_lose_nothing() -> None:
    timeline, each = Timeline(), 2000
    timeline.start()

    def write(lane: str) -> None:
        for number in range(each):
            with timeline.span(lane, str(number)):  # type: ignore[arg-type]
                pass

    threads = [threading.Thread(target=write, args=(lane,)) for lane in TRACKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording = timeline.stop()
    for lane in TRACKS:
        assert [span.name for span in recording.spans if span.track == lane] == [str(n) for n in range(each)]
    assert sorted(span.serial for span in recording.spans) == list(range(each * len(TRACKS)))
    assert recording.dropped == 0


def test_one_recording_at_a_time() -> None:
    timeline = Timeline()
    with pytest.raises(StateError, match="nothing is being recorded"):
        timeline.stop()
    timeline.start()
    with pytest.raises(StateError, match="already running"):
        timeline.start()
    timeline.stop()


def test_waits_for_the_mover_are_stalls_named_after_the_job() -> None:
    timeline = Timeline()
    mover = IoLoop(timeline=timeline)
    release = threading.Event()

    async def wait() -> None:
        await mover._loop.run_in_executor(None, release.wait)

    transfer = mover.submit("fetching unit blocks.0", wait())
    timeline.start()
    threading.Timer(0.05, release.set).start()
    transfer.result()
    transfer.result()  # settled: nobody waits
    (span,) = timeline.stop().spans
    mover.close()
    assert (span.track, span.name) == (STALLS, "fetching unit blocks.0") and span.end_ns > span.begin_ns
