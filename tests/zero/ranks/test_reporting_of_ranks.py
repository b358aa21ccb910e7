"""What two ranks say of a run: the first one writes, and what is counted is what was moved."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from models import make_config
from ranks import RankPool
from ranks_model import LIVE_NUMEL, SAMPLES, batch, motley
from ranks_runs import digest, outcome_of

Pool = Callable[[int], RankPool]
STEPS, ACCUMULATION = 4, 2
EVERYTHING: dict[str, Any] = {
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "comms_logger": {"enabled": True, "verbose": True},
    "flops_profiler": {"enabled": True, "profile_step": 2},
}


class Told(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(stage: int, nvme_path: str, folder: str, talks: bool, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Losses and norms of this rank, what it has logged, its summary of collectives, and a digest of everything."""
    from models import trainability

    import zero

    logger, told = logging.getLogger("zero"), Told()
    logger.setLevel(logging.INFO)
    logger.addHandler(told)
    pair = ("nvme" if stage == 3 else "none", "nvme")
    keys: dict[str, Any] = {"stage": stage, "stage3_max_live_parameters": LIVE_NUMEL, **(more or {})}
    config = make_config(
        *(pair, nvme_path), accumulation=ACCUMULATION, zero=keys, train_micro_batch_size_per_gpu=SAMPLES
    )
    if talks:
        config |= EVERYTHING | {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    model, rank = motley(), dist.get_rank()
    names, losses, norms = trainability(model), [], []
    try:
        with zero.initialize(model=model, config=config)[0] as engine:
            for index in range(STEPS * ACCUMULATION):
                loss = engine(batch(index, rank, agreed=True))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
                norms.append(engine.get_global_grad_norm())
            engine.synchronize()
            counted = engine.log_summary()
            return {
                "losses": losses,
                "norms": norms[ACCUMULATION - 1 :: ACCUMULATION],
                "lines": told.lines,
                "timers": engine.get_wall_clock_timers(),
                "summary": counted,
                "payload_numel": dict(engine.statistics().payload_numel),
                "digest": digest(outcome_of(engine, names, norms)),
            }
    finally:
        logger.removeHandler(told)


def rows_of(path: Path) -> list[tuple[int, float]]:
    with path.open(newline="") as file:
        return [(int(samples), float(value)) for samples, value in list(csv.reader(file))[1:]]


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_says_what_both_have_done_and_no_number_changes(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path, stage: int
) -> None:
    first, second = rank_pool(2).run(run, stage, str(nvme_path), str(tmp_path), True)
    silent = rank_pool(2).run(run, stage, str(nvme_path), str(tmp_path), False)
    assert first["digest"] == second["digest"] == silent[0]["digest"]
    said = {
        "step=": STEPS // 2 + 2 * STEPS,  # progress every second step; times and memory after each
        "flops profiler": 1,
        "configuration in effect": 1,
        "collectives after": STEPS + 1,  # the last was asked for
    }
    for begin, times in said.items():
        assert sum(line.startswith(begin) for line in first["lines"]) == times, begin
        assert sum(line.startswith(begin) for line in second["lines"]) == (begin == "collectives after")
    assert set(first["timers"]) == {"forward", "backward", "step", "wait"} and second["timers"] == {}
    samples = [2 * SAMPLES * ACCUMULATION * step for step in range(1, STEPS + 1)]
    folder = tmp_path / "job"
    assert rows_of(folder / "Train_Samples_grad_norm.csv") == list(zip(samples, first["norms"], strict=True))
    means = [sum(first["losses"][at : at + ACCUMULATION]) / ACCUMULATION for at in range(0, len(first["losses"]), 2)]
    assert rows_of(folder / "Train_Samples_train_loss.csv") == [
        (at, pytest.approx(mean, rel=1e-6)) for at, mean in zip(samples, means, strict=True)
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_summary_is_what_collectives_moved_of_each_kind(rank_pool: Pool, nvme_path: Path, stage: int) -> None:
    keys = {"shared_host_memory": False}
    answers = rank_pool(2).run(run, stage, str(nvme_path), "", False, keys)
    summary, numel = answers[0]["summary"], answers[0]["payload_numel"]
    assert {kind: counted["numel"] for kind, counted in summary.items()} == numel
    assert answers[1]["summary"] == summary and "gather" in summary and "reduce" in summary
    # Gathered weights are bf16; gradients too where every micro-step reduces them, and fp32 where they were added up.
    assert summary["gather"]["bytes"] == 2 * numel["gather"]
    assert summary["reduce"]["bytes"] == (2 if stage == 3 else 4) * numel["reduce"]
    assert [line.startswith("collectives after") for line in answers[1]["lines"]].count(True) == 1


def test_ranks_that_share_memory_say_why_collectives_have_moved_nothing(rank_pool: Pool, nvme_path: Path) -> None:
    for answer in rank_pool(2).run(run, 3, str(nvme_path), "", False):
        assert answer["summary"] == {}
        assert any(
            line.endswith("none: the ranks are on one node, and read each other's memory") for line in answer["lines"]
        )


def traced(stage: int, nvme_path: str, path: str) -> list[int]:
    """Bytes of each collective that the trace of a step has."""
    import zero

    keys = {"stage": stage, "stage3_max_live_parameters": LIVE_NUMEL, "shared_host_memory": False}
    rank = dist.get_rank()
    config = make_config(("none", "nvme"), nvme_path, zero=keys)
    with zero.initialize(model=motley(), config=config)[0] as engine, engine.trace(f"{path}.{rank}"):
        engine.backward(engine(batch(0, rank, agreed=True)))
        engine.step()
        engine.synchronize()
    events = json.loads(Path(f"{path}.{rank}").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X" and lanes[event["tid"]] == "collectives"]
    return [event["args"].get("bytes", 0) for event in spans]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_trace_has_the_collectives(rank_pool: Pool, nvme_path: Path, tmp_path: Path, stage: int) -> None:
    first, second = rank_pool(2).run(traced, stage, str(nvme_path), str(tmp_path / "trace"))
    assert sum(first) > 0 and sum(second) > 0
