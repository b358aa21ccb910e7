"""An overflow on one rank is one on all: they skip the step together, and their loss scales stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from models import make_config, trainability
from pairwise import in_pairs
from ranks import RankPool
from ranks_model import LIVE_NUMEL, SAMPLES, batch, motley
from ranks_runs import digest, outcome_of, quiet
from reference import LossScaleRule

Pool = Callable[[int], RankPool]
FATES = (
    *(("fine", "fine"), ("inf", "fine"), ("fine", "fine"), ("fine", "fine"), ("fine", "nan"), ("inf", "inf")),
    *(("fine", "fine"), ("fine", "fine"), ("fine", "inf"), ("fine", "fine")),
)
"""What becomes of the loss, per step and rank."""
KEYS = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
FACTORS = {"fine": 1.0, "inf": float("inf"), "nan": float("nan")}


def sequence(stage: int, pair: tuple[str, str], nvme_path: str, accumulation: int) -> Any:
    """(scale, norm, skipped) after each step, and a digest of everything at the end."""
    import zero

    quiet()
    model = motley()
    names = trainability(model)
    keys: dict[str, Any] = {"stage": stage, "stage3_max_live_parameters": LIVE_NUMEL}
    config = make_config(
        *(pair, nvme_path), bf16=False, accumulation=accumulation, zero=keys, train_micro_batch_size_per_gpu=SAMPLES
    )
    config["fp16"] = {"enabled": True, **KEYS}
    rank, index, told = dist.get_rank(), 0, []
    with zero.initialize(model=model, config=config)[0] as engine:
        for fate in FATES:
            for micro in range(accumulation):
                factor = FACTORS[fate[rank]] if micro == 0 else 1.0
                engine.backward(engine(batch(index, rank, agreed=True)) * factor)
                engine.step()
                index += 1
            told.append((engine.optimizer.cur_scale, engine.get_global_grad_norm(), engine.skipped_steps))
        return told, digest(outcome_of(engine, names, [norm for _, norm, _ in told]))


@in_pairs(stage=(0, 1, 2, 3), states=("none", "cpu", "nvme"), accumulation=(1, 2))
def test_on_two_ranks_the_scale_follows_the_rule_whichever_of_them_overflows(
    rank_pool: Pool, nvme_path: Path, stage: int, states: str, accumulation: int
) -> None:
    pair = (states if stage == 3 else "none", states if stage else "none")
    answers = rank_pool(2).run(sequence, stage, pair, str(nvme_path), accumulation)
    assert answers[0] == answers[1]
    rule, skipped = LossScaleRule(2.0**8, 2, 2), 0
    for (scale, norm, counted), fate in zip(answers[0][0], FATES, strict=True):
        overflow = set(fate) != {"fine"}
        rule.update(overflow=overflow)
        skipped += overflow
        assert (scale, counted) == (rule.scale, skipped)
        assert (norm == float("inf")) == overflow


def stop_at_the_minimum(nvme_path: str) -> tuple[str, float, int]:
    """What is told where only the second rank overflows, and what the scale is then."""
    import zero

    quiet()
    config = make_config(("cpu", "cpu"), nvme_path, bf16=False, train_micro_batch_size_per_gpu=SAMPLES)
    config["zero_optimization"]["stage3_max_live_parameters"] = LIVE_NUMEL
    config["fp16"] = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}
    with zero.initialize(model=motley(), config=config)[0] as engine:
        rank = dist.get_rank()
        engine.backward(engine(batch(0, rank, agreed=True)) * (float("inf") if rank else 1.0))
        with pytest.raises(zero.optim.loss_scale.LossScaleError) as caught:
            engine.step()
        return str(caught.value), engine.optimizer.cur_scale, engine.global_steps


def test_at_the_smallest_scale_all_ranks_stop_and_name_the_same(rank_pool: Pool, nvme_path: Path) -> None:
    answers = rank_pool(2).run(stop_at_the_minimum, str(nvme_path))
    assert answers[0] == answers[1]
    assert "the loss and the gradients of " in answers[0][0] and answers[0][1:] == (1, 0)


def sums_in(nvme_path: str, stage: int, accum: str | None) -> tuple[Any, int]:
    """A digest of everything after two steps of three micro-batches, and the bytes of gradients in the plan."""
    import zero

    quiet()
    model = motley()
    names = trainability(model)
    keys: dict[str, Any] = {"stage": stage, "stage3_max_live_parameters": LIVE_NUMEL}
    pair = ("cpu" if stage == 3 else "none", "cpu")
    config = make_config(*(pair, nvme_path), accumulation=3, zero=keys, train_micro_batch_size_per_gpu=SAMPLES)
    config["data_types"] = {"grad_accum_dtype": accum}
    with zero.initialize(model=model, config=config)[0] as engine:
        for index in range(6):
            engine.backward(engine(batch(index, dist.get_rank(), agreed=True)))
            engine.step()
        norm = engine.get_global_grad_norm()
        held = sum(row.nbytes for row in engine.plan.rows if row.array == "gradients")
        return digest(outcome_of(engine, names, [norm])), held


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_add_gradients_up_in_16_bits_where_they_reduce_them_at_once(
    rank_pool: Pool, nvme_path: Path, stage: int
) -> None:
    """Stage 1 adds up whole gradients in fp32 and reduces once; 2 and 3 keep 16-bit sums: others, and half."""
    wide = rank_pool(2).run(sums_in, str(nvme_path), stage, None)
    narrow = rank_pool(2).run(sums_in, str(nvme_path), stage, "bf16")
    assert narrow[0] == narrow[1] and wide[0] == wide[1]
    if stage == 1:
        assert narrow == wide
    else:
        assert narrow[0][0] != wide[0][0] and 2 * narrow[0][1] == wide[0][1]
