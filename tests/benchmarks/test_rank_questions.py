"""The multi-rank questions run to their end on a tiny model, on one rank in this process; nothing is timed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import rank_loop, rank_memory, rank_memory_worker, ranks, ranks_worker
from benchmarks.common import RivalMissing, run_child
from benchmarks.rank_contestants import CELLS, RankBench, ranks_config, rival_rank_settings, rival_ranks_config
from benchmarks.rivals import deepspeed_setup
from benchmarks.shapes import SHAPES, Shape

TINY = ["--shape", "tiny", "--tokens", "16", "--steps", "2"]


@pytest.fixture
def one_rank() -> Iterator[None]:
    threads = torch.get_num_threads()
    if dist.is_initialized():  # an engine that was made before has joined a group of one
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def in_this_process(bench: RankBench, module: str, *, ranks: int | None = None, **spec: Any) -> dict[str, Any]:
    shape = {name: getattr(bench.shape, name) for name in Shape.__dataclass_fields__}
    given = {**spec, **bench.counts, "path": str(bench.path), "shape": shape}
    if module == rank_memory.WORKER:
        return rank_memory_worker.measure(given)
    return ranks_worker.CONTESTANTS[spec["contestant"]](given)


def answer(monkeypatch: pytest.MonkeyPatch, folder: Path, question: str, *arguments: str) -> dict[str, Any]:
    """The JSON of a question on a machine without DeepSpeed, its contestants in this process."""
    file = folder / "answer.json"
    monkeypatch.setattr(deepspeed_setup, "why_missing", lambda: "left out by the test")
    monkeypatch.setattr(RankBench, "run", in_this_process)
    monkeypatch.setattr("sys.argv", [question, "--json", str(file), "--path", str(folder), *arguments])
    importlib.import_module(f"benchmarks.{question}").main()
    return dict(json.loads(file.read_text()))


# ---- configurations -------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS.values(), ids=str)
def test_rival_and_we_train_the_same_model_in_the_same_way_on_all_ranks(cell: Any) -> None:
    shape = SHAPES["110M"]
    ours = ranks_config(cell, "disk", shape)
    for settings in [*rival_rank_settings(cell).values(), deepspeed_setup.BEST_RANK_SETTINGS[str(cell)]]:
        theirs = rival_ranks_config(cell, "disk", shape, settings)
        blocks = ours.keys() - {"zero_optimization", "optimizer"}
        assert {name: theirs[name] for name in blocks} == {name: ours[name] for name in blocks}
        assert ours["optimizer"]["params"].items() <= theirs["optimizer"]["params"].items()
        for name, value in ours["zero_optimization"].items():
            found = theirs["zero_optimization"][name]
            assert value.items() <= found.items() if isinstance(value, dict) else value == found


def test_every_cell_has_a_bound_and_a_best_setting_that_was_tried() -> None:
    assert CELLS.keys() == ranks.MARKS.keys() == deepspeed_setup.BEST_RANK_SETTINGS.keys()
    for name, cell in CELLS.items():
        assert deepspeed_setup.BEST_RANK_SETTINGS[name] in rival_rank_settings(cell).values()


# ---- what ranks count -------------------------------------------------------------------------


def test_figures_of_all_ranks_are_those_of_the_slowest_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = {"seconds": 1.0, "peak_rss_bytes": 7, "cpu_seconds_per_step": 1.0, "losses": [4.0, 2.0], "step_seconds": [1]}
    slow = {"seconds": 2.0, "peak_rss_bytes": 5, "cpu_seconds_per_step": 0.5, "losses": [2.0, 1.0], "step_seconds": [2]}

    def gather(into: list[Any], own: Any) -> None:
        into[:] = [fast, own]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    merged = rank_loop.together(slow)
    assert merged["seconds"] == 2.0 and merged["step_seconds"] == [2] and merged["losses"] == [3.0, 1.5]
    assert merged["peak_rss_bytes"] == 12 and merged["cpu_seconds_per_step"] == 1.5
    assert [rank["seconds"] for rank in merged["by_rank"]] == [1.0, 2.0]


def test_a_failed_rank_is_quoted_and_its_launcher_is_not(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    launcher = "E1121 20:18:01.608000 2504 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"
    script.write_text(
        f"import sys\nsys.stderr.write('rank 1: no such weight\\n{launcher}\\nChildFailedError\\n')\nexit(1)"
    )
    with pytest.raises(RivalMissing, match=r"status 1: rank 1: no such weight$"):
        run_child([str(script)])


# ---- the questions ----------------------------------------------------------------------------


def test_ranks_holds_our_losses_against_those_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_rank: None
) -> None:
    cells = ["stage 3, none", "stage 3, nvme"]
    content = answer(monkeypatch, tmp_path, "ranks", *TINY, "--rounds", "1", "--warmup", "2", "--cells", *cells)
    assert content["missing"] == {"deepspeed": "left out by the test"}
    found = {mark["what"]: mark for mark in content["marks"]}
    assert found.keys() == {f"{cell}: ours, losses off plain torch's by" for cell in cells}
    assert all(mark["verdict"] == "met" for mark in found.values())
    losses = content["figures"]["reference: losses"]
    assert len(losses) == 4 and losses[2] < losses[0] and losses[3] < losses[1]
    assert [series["name"] for series in content["series"]] == ["floors", *cells]


def test_losses_that_differ_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_rank: None) -> None:
    real = ranks_worker.ours

    def does_not_train(spec: dict[str, Any]) -> dict[str, Any]:
        spec["config"]["optimizer"]["params"]["lr"] = 0.0
        return real(spec)

    monkeypatch.setitem(ranks_worker.CONTESTANTS, "ours", does_not_train)
    rest = ["--rounds", "1", "--warmup", "2", "--cells", "stage 3, none"]
    content = answer(monkeypatch, tmp_path, "ranks", *TINY, *rest)
    assert content["marks"][0]["verdict"] == "MISSED"


def test_rank_memory_finds_every_byte_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_rank: None
) -> None:
    content = answer(monkeypatch, tmp_path, "rank_memory", *TINY, "--stages", "3", "--worlds", "1")
    (rank,) = content["figures"]["stage 3, 1 rank"]["ranks"]
    assert rank["allocated"] == rank["planned"]
    assert set(rank_memory.STATES) < set(rank["planned"])
    assert "| 3, 1 rank | 16.00 | 14.00 |" in rank_memory.table(content)


@pytest.mark.parametrize(
    ("stage", "ranks", "by_paper", "with_our_master"),
    [(0, 4, 16, 14), (1, 1, 16, 14), (1, 4, 7, 6.5), (2, 4, 5.5, 5), (3, 4, 4, 3.5), (3, 2, 8, 7)],
)
def test_formulas_are_those_of_the_zero_paper(stage: int, ranks: int, by_paper: float, with_our_master: float) -> None:
    assert rank_memory.paper(stage, ranks) == by_paper
    assert sum(rank_memory.formula(stage, ranks).values()) == with_our_master


def test_the_table_takes_medians_and_names_each_goal() -> None:
    def run(seconds: float) -> dict[str, Any]:
        return {"seconds": seconds, "figures": {}}

    tried = [{"ours": run(ours), "deepspeed": run(theirs)} for ours, theirs in ((1.0, 2.0), (2.0, 2.0), (3.0, 4.0))]
    series = [
        {"name": name, "tried": tried, "complaints": [None] * 3, "is_contended": False}
        for name in ("floors", "stage 1, none", "stage 3, nvme")
    ]
    lines = ranks.table({"series": series}).splitlines()
    assert lines[2:] == [
        "| 1, nothing | 2.00 | 2.00 | 0.75 [0.50, 1.00] | <= 1 |",
        "| 3, NVMe | 2.00 | 2.00 | 0.75 [0.50, 1.00] | <= 0.6 |",
    ]


@pytest.mark.slow
def test_two_ranks_are_started_and_both_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    monkeypatch.setattr(deepspeed_setup, "why_missing", lambda: "left out by the test")
    rest = ["--rounds", "1", "--warmup", "2", "--cells", "stage 3, none", "--path", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["ranks", "--json", str(file), *TINY, *rest])
    ranks.main()
    content = json.loads(file.read_text())
    (mark,) = content["marks"]
    assert mark["verdict"] == "met"
    assert len(content["series"][-1]["tried"][0]["ours"]["figures"]["by_rank"]) == 2
