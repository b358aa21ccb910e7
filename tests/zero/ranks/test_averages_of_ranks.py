"""Averages of the weights on several ranks: the bits of one, shown to all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_config
from pairwise import in_pairs
from ranks import RankPool
from ranks_runs import quiet
from tiled_optimizers import batch, differences, held_by, patchy, train

pytestmark = pytest.mark.broad

Pool = Callable[[int], RankPool]

STEPS = 4
KINDS: dict[str, dict[str, Any]] = {
    "ema, of Muon and AdamW": {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}, "ema_decay": 0.9},
    "schedule-free": {"optimizer": {"type": "AdamWScheduleFree", "params": {"lr": 0.01, "betas": [0.8, 0.99]}}},
}
PLACES = (
    (0, "none", "none"), (1, "none", "cpu"), (1, "none", "nvme"), (2, "none", "cpu"), (3, "none", "none"),
    (3, "cpu", "cpu"), (3, "nvme", "nvme"),
)  # fmt: skip
Seen = list[Any]


def seen(kind: str, place: tuple[int, str, str], nvme_path: str, folder: str, shared: bool, bf16: bool) -> Seen:
    """What is held and what a forward gives: while averages are shown, afterwards, and after going on from there."""
    import zero

    quiet()
    stage, *pair = place
    keys = {"stage": stage, "shared_host_memory": shared, "sub_group_size": 8192}

    def opened() -> tuple[Any, torch.nn.Module]:
        model = patchy()
        config = make_config((pair[0], pair[1]), nvme_path, bf16=bf16, zero=keys, **KINDS[kind])
        return zero.initialize(model=model, config=config)[0], model

    def look(engine: Any, model: torch.nn.Module) -> list[Any]:
        with torch.no_grad():
            return [float(engine(batch(9, bf16), 0)), held_by(engine, model)]

    engine, model = opened()
    with engine:
        train(engine, 0, STEPS, bf16=bf16)
        with engine.averaged_weights():
            told = look(engine, model)
        told += look(engine, model)
        engine.save_checkpoint(folder)
    resumed, model = opened()
    with resumed:
        resumed.load_checkpoint(folder)
        with resumed.averaged_weights():
            told += look(resumed, model)
        train(resumed, STEPS, 2 * STEPS, bf16=bf16)
        return told + look(resumed, model)


@in_pairs(kind=tuple(KINDS), place=PLACES, shared=(True, False), bf16=(True, False))
def test_two_ranks_see_the_averages_of_one(
    rank_pool: Pool,
    nvme_path: Path,
    tmp_path: Path,
    kind: str,
    place: tuple[int, str, str],
    shared: bool,
    bf16: bool,
) -> None:
    """They see the same samples, of which the mean gradient is that of one rank, where nothing is rounded between."""
    alone = rank_pool(1).run(seen, kind, place, str(nvme_path), str(tmp_path / "one"), shared, bf16)[0]
    for each in rank_pool(2).run(seen, kind, place, str(nvme_path), str(tmp_path / "two"), shared, bf16):
        assert each[::2] == alone[::2]
        for ours, theirs in zip(each[1::2], alone[1::2], strict=True):
            assert differences(ours, theirs) == []
    assert alone[0] == alone[4] != alone[2]
