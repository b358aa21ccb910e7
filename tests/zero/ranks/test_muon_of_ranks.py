"""Whole matrices on several ranks: any number goes on where others stopped, with the bits of one that has them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import make_config
from muon_plain import BLOCK, MuonAndAdam
from ranks import RankPool
from ranks_runs import quiet
from tiled_optimizers import Plain, differences, held_by, patchy, train

Pool = Callable[[int], RankPool]
STEPS_EACH = 2


def part(pair: tuple[str, str], first: int, folder: str, stage: int) -> Any:
    """Go on from what is saved, if anything is; what is held then."""
    import zero

    quiet()
    model = patchy()
    keys = {"stage": stage, "sub_group_size": 8192, "stage3_param_persistence_threshold": 200}
    config = make_config(pair, f"{folder}/nvme", optimizer=BLOCK, bf16=True, zero=keys)
    with zero.initialize(model=model, config=config)[0] as engine:
        if first:
            engine.load_checkpoint(folder)
        train(engine, first, first + STEPS_EACH, bf16=True)
        engine.save_checkpoint(folder)
        return held_by(engine, model)


@pytest.mark.broad
@pytest.mark.parametrize(("counts", "stage"), [((1, 2, 4, 1), 3), pytest.param((4, 2, 3), 1, marks=pytest.mark.slow)])
def test_ranks_come_and_go_between_checkpoints(
    rank_pool: Pool, tmp_path: Path, counts: tuple[int, ...], stage: int
) -> None:
    (tmp_path / "nvme").mkdir()
    pairs = [("nvme", "nvme"), ("cpu", "nvme"), ("cpu", "cpu"), ("none", "none")]
    pairs = pairs if stage == 3 else [("none", states) for _, states in pairs]
    plain = Plain(MuonAndAdam, {}, bf16=True, clipping=0.0)
    for number, (count, pair) in enumerate(zip(counts, pairs, strict=False)):
        first = number * STEPS_EACH
        train(plain, first, first + STEPS_EACH, bf16=True)
        for held in rank_pool(count).run(part, pair, first, str(tmp_path), stage):
            assert differences(held, plain.held()) == [], f"{count} ranks"
