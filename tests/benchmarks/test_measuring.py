"""What the benchmarks' harness promises; nothing here is timed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import machine
from benchmarks.common import (
    Candidate,
    Report,
    RivalMissing,
    Run,
    Series,
    compute_contended,
    floor_deviates,
    measure,
    parser,
    run_child,
    run_once,
    summarize,
    verdict_of,
)


def takes(*seconds: float) -> Candidate:
    """A candidate that says it took these times, one after the other, then the last for ever."""
    rest: Iterator[float] = iter(seconds)
    last = seconds[-1]

    def run() -> Mapping[str, Any]:
        return {"seconds": next(rest, last), "bytes": 7}

    return run


def one(seconds: float, cpu_seconds: float = 0.0) -> Run:
    return Run(seconds, seconds, cpu_seconds, None, {})


def test_candidates_take_turns_backwards_every_other_round_and_warm_ups_are_discarded() -> None:
    order: list[str] = []
    series = measure("s", {name: lambda name=name: order.append(name) for name in "ab"}, rounds=3, warmups=2)
    assert "".join(order) == "aabb" + "ab" + "ba" + "ab"
    assert len(series.rounds) == 3 and all(list(r) == ["a", "b"] for r in series.rounds)


def test_ratios_are_taken_within_a_round() -> None:
    series = measure("s", {"ours": takes(0, 1, 2, 4), "theirs": takes(0, 2, 2, 2)}, rounds=3)
    assert series.ratios(lambda r: r["theirs"].seconds / r["ours"].seconds) == [2.0, 1.0, 0.5]
    assert series.median("ours") == 2 and series.median("ours", "bytes") == 7


def test_a_candidate_may_say_which_part_of_its_run_counts() -> None:
    moved = machine.DiskCounters(1, 2, 3, 4)
    run = run_once(lambda: {"seconds": 0.5, "disk": moved, "bytes": 7})
    assert (run.seconds, run.disk, run.figures) == (0.5, moved, {"bytes": 7})


def test_a_rival_that_is_missing_is_named_and_the_others_go_on() -> None:
    def absent() -> None:
        raise RivalMissing("not installed")

    series = measure("s", {"ours": takes(1), "rival": absent}, rounds=2, rules=[floor_deviates("rival")])
    assert series.missing == {"rival": "not installed"}
    assert series.has("ours") and not series.has("ours", "rival")
    assert [set(r) for r in series.rounds] == [{"ours"}, {"ours"}]


def test_a_failure_of_ours_is_a_failure() -> None:
    def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        measure("s", {"ours": broken})


def test_a_round_with_a_slow_floor_is_repeated_and_kept() -> None:
    series = measure("s", {"floor": takes(0, 5, 1, 1.2, 1.31, 1)}, rounds=3, rules=[floor_deviates("floor", 1.3)])
    assert [r["floor"].seconds for r in series.tried] == [5, 1, 1.2, 1.31, 1]
    assert [r["floor"].seconds for r in series.rounds] == [1, 1.2, 1]
    assert not series.is_contended


def test_a_machine_that_never_calms_down_uses_all_rounds_and_says_so() -> None:
    always = measure("s", {"a": takes(1)}, rounds=2, rules=[lambda this, tried: "busy"])
    assert always.is_contended and len(always.rounds) == len(always.tried) == 6


@pytest.mark.parametrize(
    ("threads", "wall", "is_disturbed"),
    [(2, 0.5, False), (2, 0.7, False), (2, 0.71, True), (1, 1.0, False), (1, 1.41, True)],
)
def test_threads_with_less_than_their_share_of_the_cores_are_disturbed(
    threads: int, wall: float, is_disturbed: bool
) -> None:
    rule = compute_contended("floor", threads)
    assert (rule({"floor": one(wall, 1.0)}, []) is not None) == is_disturbed
    assert rule({"ours": one(1.0)}, []) is None


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_the_interval_holds_the_median_and_lies_within_the_values(values: list[float]) -> None:
    summary = summarize(values)
    assert min(values) <= summary.low <= summary.median <= summary.high <= max(values)
    assert summary.values == values


def test_the_interval_is_the_same_each_time_and_narrows_with_more_values() -> None:
    few, many = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0] * 20
    assert summarize(few) == summarize(few)
    assert summarize(many).high - summarize(many).low < summarize(few).high - summarize(few).low


def test_no_values_are_no_summary() -> None:
    with pytest.raises(ValueError, match="no values"):
        summarize([])


@pytest.mark.parametrize(
    ("value", "at_least", "at_most", "verdict"),
    [
        (0.9, 0.9, None, "met"),
        (0.89, 0.9, None, "MISSED"),
        (1.15, None, 1.15, "met"),
        (1.16, None, 1.15, "MISSED"),
        (1.0, None, None, ""),
    ],
)
def test_a_bound_is_met_up_to_its_value(
    value: float, at_least: float | None, at_most: float | None, verdict: str
) -> None:
    assert verdict_of(value, at_least, at_most) == verdict


def test_the_json_has_every_run_the_machine_and_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = parser("A question?", disk=True).parse_args(["--json", str(file), "--path", str(tmp_path)])
    options.rates = [str(tmp_path / "rates.json")]
    report = Report("adam", "A question?", options, folders=[tmp_path])
    report.keep(measure("s", {"ours": takes(0, 5, 1, 1)}, rounds=2, rules=[floor_deviates("ours")], disk=tmp_path))
    report.mark("ours / bound", [0.5, 0.8, 0.7], at_least=0.9)
    report.lack("deepspeed", "not installed")
    report.figure("plan", 12)
    report.finish()
    content = json.loads(file.read_text())
    assert content["question"] == "adam" and content["missing"] == {"deepspeed": "not installed"}
    assert len(content["series"][0]["tried"]) == 3 and content["series"][0]["complaints"][1:] == [None, None]
    assert content["marks"][0]["verdict"] == "MISSED" and content["marks"][0]["values"] == [0.5, 0.8, 0.7]
    assert content["figures"] == {"plan": 12}
    assert {"cpu", "cores", "memory_bytes", "kernel", "disks", "versions", "commit"} <= set(content["machine"])
    assert str(tmp_path) not in file.read_text(), "the folder's name is nobody's business"
    assert str(tmp_path) not in file.read_text(), "where files were says nothing to others"


def test_a_missed_mark_fails_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("adam", None, argparse.Namespace(json=None))
    report.mark("ours / bound", [0.1], at_least=0.9)
    report.finish()
    assert "MISSED" in capsys.readouterr().out


def test_a_series_says_how_many_rounds_were_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    run = {"a": one(1.0)}
    Report("q", None, argparse.Namespace(json=None)).keep(Series("s", [run, run, run], ["busy", None, None], {}, 2))
    assert "1 disturbed rounds were repeated" in capsys.readouterr().out


def test_a_child_gives_the_object_on_its_last_line() -> None:
    assert run_child(["-c", "print('noise'); print('{\"seconds\": 2}')"]) == {"seconds": 2}


@pytest.mark.parametrize("body", ["import sys; sys.exit('it broke')", "print('no object, it broke')"])
def test_a_child_that_fails_says_why(body: str) -> None:
    with pytest.raises(RivalMissing, match="it broke"):
        run_child(["-c", body])


def test_a_child_that_fails_is_told_without_the_folders_of_this_machine() -> None:
    body = "import sys; sys.exit('/home/me/lib/module.py:3: 1/2 of a/b failed')"
    with pytest.raises(RivalMissing) as missing:
        run_child(["-c", body])
    assert str(missing.value).endswith("ended with status 1: module.py:3: 1/2 of a/b failed")


def test_a_child_sees_the_variables_it_is_given() -> None:
    body = "import json, os; print(json.dumps({'seen': os.environ['SEEN']}))"
    assert run_child(["-c", body], env={"SEEN": "yes"}) == {"seen": "yes"}


def test_the_kernels_counters_are_read_in_bytes() -> None:
    text = "  100  5  800  7  200  6  1600  8  0  9  10 0 0 0 0 0 0\n"
    counters = machine.parse_disk_counters(text)
    assert counters == machine.DiskCounters(800 * 512, 1600 * 512, 100, 200)
    assert counters.since(machine.DiskCounters(512, 1024, 1, 2)) == machine.DiskCounters(799 * 512, 1598 * 512, 99, 198)


def test_a_file_system_without_a_device_has_no_counters() -> None:
    assert machine.read_disk("/proc") is None
    assert machine.read_disk(None) is None


def test_the_machine_is_described_in_plain_values(tmp_path: Path) -> None:
    described = machine.describe([tmp_path, "/proc"])
    assert json.loads(json.dumps(described)) == described
    assert described["disks"][1]["file_system"] == "proc" and described["disks"][1]["device"] is None
