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
from torch import nn

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


class Branches(nn.Module):
    """One unit, of which each forward uses some parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Parameter(torch.randn(5000)), nn.Parameter(torch.randn(5000))
        self.c = nn.Parameter(torch.ones(5000))

    def forward(self, factor: float, used: str) -> torch.Tensor:
        return sum(factor * getattr(self, name).sum() for name in used)  # type: ignore[return-value]


def unlike(place: Place, nvme_path: str) -> None:
    """Ranks use different parameters, and one is used by none; what each does with gradients is torch's."""
    import zero

    quiet()
    rank, plain = torch.distributed.get_rank(), Branches()
    config = place.config(Run(accumulation=2), nvme_path)
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.5}}}
    config |= {"train_micro_batch_size_per_gpu": 1}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.5)
    with zero.initialize(model=copy.deepcopy(plain), config=config)[0] as engine:
        for index in range(4):
            factor = 0.25 * (index + 1)
            engine.backward(engine(factor, "ab"[rank]))
            (plain(factor, "ab") / 4).backward()
            for model in (engine, plain):
                parameters = dict(model.named_parameters()).items()
                a = next(p for name, p in parameters if name.endswith("a"))
                if index == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                elif index == 2:
                    a.grad = None
            engine.step()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(engine.full_parameter(name), parameter.detach(), rtol=2e-5, atol=2e-6, msg=name)


def averaging(place: Place, nvme_path: str) -> None:
    """The loop that averages gradients over ranks, as of code for plain torch, changes nothing here."""
    with opened(place, nvme_path, Small(unused=False)) as engine:
        engine.backward(engine(tokens(0, torch.distributed.get_rank())))
        before = [p.grad.clone() for p in engine.parameters() if p.grad is not None]
        for p in engine.parameters():
            if p.grad is not None:
                torch.distributed.all_reduce(p.grad.data)
                p.grad.data /= torch.distributed.get_world_size()
        after = [p.grad.clone() for p in engine.parameters() if p.grad is not None]
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@everywhere
@pytest.mark.parametrize("job", [unlike, averaging], ids=lambda job: job.__name__)
def test_ranks_that_use_different_parameters_and_average_gradients_step_as_torch(
    rank_pool: Pool, nvme_path: Any, place: Place, job: Any
) -> None:
    rank_pool(2).run(job, place, str(nvme_path))
