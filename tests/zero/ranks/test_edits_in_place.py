"""What a rank does to weights that it sees at any time, or that all ranks see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import seeded
from ranks import RankPool
from ranks_runs import Place, Run, engine_config, quiet
from torch import nn

from offload.errors import StateError

Pool = Callable[[int], RankPool]


class Scaled(nn.Module):
    """Two layers; the first may scale its own weight whenever it is called."""

    def __init__(self, shrinks: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.shrinks = nn.Linear(37, 41), nn.Linear(41, 3), shrinks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shrinks:
            with torch.no_grad():
                self.first.weight.mul_(0.5)
        return self.second(torch.relu(self.first(x))).square().mean()


def opened(place: Place, nvme_path: str, model: nn.Module) -> Any:
    import zero

    quiet()
    return zero.initialize(model=model, config=engine_config(Run(), place, nvme_path))[0]


def edit_between_steps(place: Place, nvme_path: str) -> list[torch.Tensor]:
    """A weight before an edit that every rank makes, after it, and after another step: two ranks, equal data."""
    with seeded(3):
        model, x = Scaled(), torch.randn(5, 37)
    told = []
    with opened(place, nvme_path, model) as engine:
        for turn in range(2):
            engine.backward(engine(x))
            engine.step()
            told.append(engine.full_master("first.weight"))
            if turn == 0:
                model.first.weight.data.mul_(0.5)
                told.append(engine.full_master("first.weight"))
    return told


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
@pytest.mark.parametrize(("stage", "states"), [(0, "none"), (1, "cpu"), (2, "none"), (2, "nvme")])
def test_an_edit_that_every_rank_makes_to_its_weights_happens_once(
    rank_pool: Pool, nvme_path: Any, stage: int, states: str, shared: bool
) -> None:
    several = rank_pool(2).run(edit_between_steps, Place(stage, "none", states, shared=shared), str(nvme_path))
    alone = edit_between_steps(Place(stage, "none", states), str(nvme_path))
    for told in several:
        for ours, theirs in zip(told, alone, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(told[1], told[0] * 0.5)


def shrink_in_forward(place: Place, nvme_path: str) -> str:
    with seeded(3):
        model, x = Scaled(shrinks=True), torch.randn(5, 37)
    with opened(place, nvme_path, model) as engine:
        try:
            engine(x)
        except StateError as error:
            return str(error)
    return ""


def test_forward_may_not_modify_the_one_copy_that_all_ranks_see(rank_pool: Pool, nvme_path: Any) -> None:
    for told in rank_pool(2).run(shrink_in_forward, Place(3), str(nvme_path)):
        assert "in place" in told
        assert "shared_host_memory" in told
