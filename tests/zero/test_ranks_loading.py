"""What `zero.initialize` does with a configuration and data on real ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import ADAMW
from torch import nn

import zero
from offload.errors import StateError

RankPool = Callable[[int], Any]


class Numbers:
    """A dataset of vectors that tell their index."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < 11:
            raise IndexError(index)
        return torch.full((4,), float(index))


class Branches(nn.Module):
    """Uses the branches it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return sum((self.branches[index](x) for index in used), x).square().mean()


def config(**zero_keys: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": ADAMW}, "zero_optimization": zero_keys}


def loads(stage: int) -> tuple[Any, ...]:
    """Two epochs of training data: (micro-batch size, batches' indices per epoch, steps taken)."""
    keys = {**config(stage=stage), "train_batch_size": 8, "gradient_accumulation_steps": 2}
    engine, _, loader, _ = zero.initialize(model=Branches(), config=keys, training_data=Numbers())
    epochs = []
    with engine:
        for _ in range(2):
            batches = list(loader)
            epochs.append([batch[:, 0].long().tolist() for batch in batches])
            for batch in batches:
                engine.backward(engine(batch, [0, 1]))
                engine.step()
        return engine.train_micro_batch_size_per_gpu(), epochs, engine.global_steps, engine.global_rank


def steps_with(used: list[int], ignore: bool) -> tuple[str, int]:
    """The error of one step, if any, and the number of steps taken."""
    engine = zero.initialize(model=Branches(), config=config(stage=2, ignore_unused_parameters=ignore))[0]
    with engine:
        engine.backward(engine(torch.ones(1, 4), used))
        try:
            engine.step()
        except StateError as error:
            return str(error), engine.global_steps
        return "", engine.global_steps


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_trains_on_a_part_of_its_own_and_all_take_equally_many_steps(rank_pool: RankPool, stage: int) -> None:
    results = rank_pool(2).run(loads, stage)
    assert [rank for *_, rank in results] == [0, 1]
    for micro, epochs, steps, _ in results:
        assert micro == 2 and steps == 3, "6 samples an epoch in 3 batches, two batches a step"
        assert [[len(batch) for batch in batches] for batches in epochs] == [[2, 2, 2]] * 2
    for epoch in range(2):
        seen = Counter(index for _, epochs, *_ in results for batch in epochs[epoch] for index in batch)
        assert set(seen) == set(range(11)) and seen.total() == 12
    assert results[0][1][0] != results[0][1][1], "each epoch has an order of its own"


def test_unused_is_what_no_rank_has_used_and_every_rank_is_told(rank_pool: RankPool) -> None:
    pool = rank_pool(2)
    assert pool.run(steps_with, per_rank=[([0], False), ([0, 1], False)]) == [("", 1), ("", 1)]
    for error, steps in pool.run(steps_with, [0], False):
        assert "no gradient for branches.1.weight, branches.1.bias" in error and steps == 0
    assert pool.run(steps_with, [0], True) == [("", 1), ("", 1)]
