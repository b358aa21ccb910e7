"""The training questions run to their end on a tiny model, and what they rest on counts right; nothing is timed."""

from __future__ import annotations

import importlib
import json
import math
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contestants, precision_loss
from benchmarks.cgroup import MemoryCgroup
from benchmarks.contestants import our_config, rival_config, rival_settings
from benchmarks.loop import peak_rss_bytes, timed_steps
from benchmarks.models import GPT, Samples
from benchmarks.rivals import deepspeed_setup
from benchmarks.shapes import SHAPES
from zero.config import load_config

TINY = ["--shape", "tiny", "--rounds", "1", "--warmup", "1", "--steps", "1"]
PAGES = 300


def answer(monkeypatch: pytest.MonkeyPatch, folder: Path, question: str, *arguments: str) -> dict[str, Any]:
    """The JSON of a question on a machine without DeepSpeed, however busy it is."""
    file = folder / "answer.json"
    monkeypatch.setattr(deepspeed_setup, "why_missing", lambda: "left out by the test")
    monkeypatch.setattr(contestants, "COMPUTE_WALL_MAX", math.inf)
    monkeypatch.setattr("sys.argv", [question, "--json", str(file), "--path", str(folder), *arguments])
    importlib.import_module(f"benchmarks.{question}").main()
    return dict(json.loads(file.read_text()))


def marks(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mark["what"]: mark for mark in content["marks"]}


# ---- models and configurations ----------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_knows_how_many_parameters_its_model_has(name: str) -> None:
    with torch.device("meta"):
        model = GPT(SHAPES[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPES[name].numel


def test_every_contestant_sees_the_same_tokens() -> None:
    shape = SHAPES["tiny"]
    first, second = Samples(shape), Samples(shape)
    for _ in range(3):
        tokens = first.next()
        assert torch.equal(tokens, second.next()) and tokens.shape == (shape.batch, shape.sequence)


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_rival_and_we_train_the_same_model_in_the_same_way(tier: str) -> None:
    ours = our_config(tier, "/disk", SHAPES["336M"])
    load_config(ours)
    for settings in rival_settings(tier).values():
        theirs = rival_config(tier, "/disk", SHAPES["336M"], settings)
        blocks = ours.keys() - {"zero_optimization"}
        assert {name: theirs[name] for name in blocks} == {name: ours[name] for name in blocks}
        zero, own = theirs["zero_optimization"], ours["zero_optimization"]
        for block in ("offload_param", "offload_optimizer"):
            assert own[block].items() <= zero[block].items()


# ---- what every contestant counts ---------------------------------------------------------------


def test_warm_up_steps_are_discarded_and_the_others_counted(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    figures = timed_steps(lambda: calls.append(1), warmup=2, steps=3)
    assert len(calls) == 5 and len(figures["step_seconds"]) == len(figures["minor_faults"]) == 3
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["warmup"] * 2 + ["step"] * 3


def test_a_page_that_a_step_touches_first_is_a_fault() -> None:
    def touch() -> None:
        with mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
            fresh.madvise(mmap.MADV_NOHUGEPAGE)
            for page in range(PAGES):
                fresh[page * mmap.PAGESIZE] = 1

    assert min(timed_steps(touch, warmup=1, steps=3)["minor_faults"]) >= PAGES


def test_peak_memory_of_a_child_is_not_its_parents() -> None:
    ballast = torch.ones(300 << 20, dtype=torch.uint8)
    code = "from benchmarks.loop import peak_rss_bytes; print(peak_rss_bytes())"
    root = Path(__file__).parents[2]
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout
    assert peak_rss_bytes() > ballast.numel()
    assert 0 < int(told) < peak_rss_bytes() - ballast.numel() // 2


# ---- the questions ------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_step_holds_a_lean_step_against_its_floor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = answer(monkeypatch, tmp_path, "train_step", *TINY, "--steps", "4", "--tier", "nvme")
    assert content["missing"] == {"deepspeed": "left out by the test"}
    assert set(marks(content)) == {"nvme: lean / max(compute floor, read + write alone)"}
    last = content["series"][-1]["tried"][0]
    assert set(last) == {"lean", "auto", "compute floor", "read + write alone", "torch, fused AdamW"}
    lean = last["lean"]["figures"]
    moved = lean["nvme_read_bytes"] + lean["nvme_write_bytes"]
    told = content["figures"]["nvme: lean, bytes per parameter and step"]
    assert told["ours"] == moved > 0
    # Spilled states are read and written: the kernel must have seen what we say we moved. It also sees other
    # processes, and the pages of programs that are read in; and what is under way when counting begins or ends, up to
    # a step's records, is counted by the two at different moments: of four steps that is less than a quarter.
    assert told["kernel"] == 0 or told["kernel"] >= 0.75 * moved
    assert list(tmp_path.iterdir()) == [tmp_path / "answer.json"]


@pytest.mark.broad
def test_train_step_alone_measures_our_engine_on_each_tier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = answer(monkeypatch, tmp_path, "train_step", *TINY, "--alone", "--tier", "cpu", "none")
    assert [series["name"] for series in content["series"]] == ["cpu", "none"] and content["marks"] == []
    assert content["figures"]["parameters"] == SHAPES["tiny"].numel


@pytest.mark.slow
def test_train_step_with_muon_is_held_against_adamw_and_its_iterations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = answer(monkeypatch, tmp_path, "train_step", *TINY, "--optimizer", "Muon", "--tier", "nvme")
    (series,) = content["series"]
    alone = series["tried"][0]["Newton-Schulz alone"]["figures"]
    shape = SHAPES["tiny"]
    blocks = shape.layers * (2 * (4 * 4 + 2) + (4 * 3 + 2) + (4 + 2)) * shape.width**3
    head, position = (shape.width, shape.vocabulary), (shape.sequence, shape.width)  # (smaller, larger) dimension
    assert alone["flops"] == 5 * (blocks + sum((4 * m * n + 2 * m * m) * m for m, n in (head, position)))
    moved = {
        name: content["figures"][f"nvme: {name}, bytes per parameter and step"]["ours"] for name in ("AdamW", "Muon")
    }
    assert 0 < moved["Muon"] < moved["AdamW"], "a matrix has one state"
    assert "nvme: Muon / AdamW, step time" in marks(content)


@pytest.mark.slow
def test_faults_are_counted_for_each_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = answer(monkeypatch, tmp_path, "faults", *TINY, "--tokens", "32")
    assert {what: mark["at_most"] for what, mark in marks(content).items()} == {
        f"{tier}, 32 tokens: minor faults in a step": 1000 for tier in ("nvme", "cpu")
    }


@pytest.mark.slow
def test_the_loss_of_each_precision_is_held_against_that_of_fp32_from_the_same_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answer.json"
    size = ["--params", "100K", "--steps", "20", "--seeds", "1"]
    monkeypatch.setattr("sys.argv", ["precision_loss", *size, "--json", str(file)])
    precision_loss.main()
    runs = json.loads(file.read_text())["runs"]
    assert [run["preset"] for run in runs] == list(precision_loss.PRESETS)
    assert len({run["held_out"] for run in runs}) == len(runs), "each preset rounds in its own way"
    first = [run["curve"][0] for run in runs]
    assert max(first) - min(first) < 0.05, "all begin at the same weights, with the same batches"
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| bf16 masters |"))
    assert f"{runs[3]['held_out'] - runs[0]['held_out']:+.4f}" in row


@pytest.mark.slow
def test_memory_flat_holds_the_peak_against_plan_and_activations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = answer(monkeypatch, tmp_path, "memory_flat", *TINY[2:], "--shapes", "tiny", "--kinds")
    (mark,) = content["marks"]
    (parts,) = content["figures"].values()
    bound = parts["before the plan"] + parts["plan"] + parts["activations"]
    assert mark["values"] == [parts["peak"] / bound] and parts["activations"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(16,), (16, 32)], ids=str)
def test_overlap_demands_hiding_only_where_there_is_time_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    content = answer(monkeypatch, tmp_path, "overlap", *TINY, "--tokens", *map(str, sizes))
    told = content["figures"]
    for tokens in sizes:
        io = told[f"{tokens} tokens: forward and update I/O alone"]
        bound = marks(content)[f"{tokens} tokens: exposed wait / step time"]["at_most"]
        assert (bound is not None) == (io["forward_seconds"] >= io["update_io_seconds"])


# ---- the memory cgroup --------------------------------------------------------------------------


def may_limit() -> bool:
    """The right to make a control group, and a kernel that has them."""
    try:
        with MemoryCgroup(256 << 20, "zero-infinity-test"):
            return True
    except OSError:
        return False


needs_groups = pytest.mark.skipif(not may_limit(), reason="no right to make a memory cgroup here")


def in_group(group: MemoryCgroup, nbytes: int) -> int:
    code = f"data = bytearray({nbytes}); data[::4096] = bytes(1) * len(data[::4096])"
    return subprocess.run([*group.prefix, sys.executable, "-c", code], check=False).returncode


@needs_groups
def test_what_passes_the_limit_is_killed_and_counted() -> None:
    with MemoryCgroup(256 << 20) as group:
        assert in_group(group, 32 << 20) == 0 and group.kills == 0
        assert in_group(group, 400 << 20) == -9 and group.kills == 1
        assert group.peak_bytes is None or 32 << 20 < group.peak_bytes <= 256 << 20


@pytest.mark.slow
@needs_groups
def test_largest_model_trains_in_the_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only = ("--runs", "--gpt", "--rival-shapes", "168M")
    content = answer(monkeypatch, tmp_path, "largest_model", *TINY, *only, "--limit-gib", "2")
    assert content["figures"]["tiny (0.00 B parameters) in 2 GiB"]["kills"] == 0
    assert set(marks(content)) == {"tiny: step / bytes of the step alone"}
