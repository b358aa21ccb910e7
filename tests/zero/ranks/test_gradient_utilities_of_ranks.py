"""torch's gradient utilities with two ranks: the norm is that of all ranks, and every rank takes the same step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_utilities import ACTS, LR, Small, compare, tokens
from ranks import RankPool
from ranks_runs import Place, Run, opened, quiet

Pool = Callable[[int], RankPool]
PLACES = (Place(1, "none", "cpu"), Place(3, "nvme", "nvme"))
BROAD = (Place(0), Place(1), Place(2), Place(2, "none", "nvme"), Place(3), Place(3, "cpu", "cpu", shared=False))
everywhere = pytest.mark.parametrize(
    "place",
    [*PLACES, *(pytest.param(place, marks=pytest.mark.broad) for place in BROAD)],
    ids=lambda place: place.name,
)


def acting(place: Place, nvme_path: str, accumulation: int) -> None:
    import zero

    quiet()
    config = place.config(Run(accumulation=accumulation), nvme_path)
    config |= {"optimizer": {"type": "SGD", "params": {"lr": LR}}, "train_micro_batch_size_per_gpu": 2}
    plain = Small(unused=False)
    with zero.initialize(model=copy.deepcopy(plain), config=config)[0] as engine:
        compare(engine, plain, ACTS, accumulation, ranks=2, rtol=2e-5)


@everywhere
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.broad), 2])
def test_they_act_as_on_one_model_with_all_batches(
    rank_pool: Pool, nvme_path: Any, place: Place, accumulation: int
) -> None:
    rank_pool(2).run(acting, place, str(nvme_path), accumulation)


def looking_alone(place: Place, nvme_path: str) -> list[bool]:
    """Whether there is a gradient, asked on the first rank only."""
    with opened(place, nvme_path, Small(unused=False)) as engine:
        rank = torch.distributed.get_rank()
        engine.backward(engine(tokens(0, rank)))
        found = [] if rank else [p.grad is not None for p in engine.parameters()]
        engine.step()
        return found


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_one_rank_alone_may_ask_whether_there_is_a_gradient(rank_pool: Pool, nvme_path: Any, place: Place) -> None:
    found = rank_pool(2).run(looking_alone, place, str(nvme_path))[0]
    assert found == [p.requires_grad for p in Small(unused=False).parameters()]
