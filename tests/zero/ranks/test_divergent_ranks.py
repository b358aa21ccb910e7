"""Ranks that go different ways: with shared host memory each goes its own, without it the ranks that wait say who and
where, within a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import seeded, trainability
from pairwise import each_once
from ranks import RankError, RankPool
from ranks_model import Moody
from ranks_plain import Ddp, Opposite, Outcome, beyond
from ranks_runs import HYPER, Place, Run, by_either, engine_config, outcome_of, quiet
from torch import Tensor, nn

Pool = Callable[[int], RankPool]

LIMIT_SECONDS = 60.0
STEPS = 4
DIVERGING_STEP = 2


class Chain(nn.Module):
    """Blocks in a row, some of which a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(29, 37)
        self.blocks = nn.ModuleList(Moody(37, 211) for _ in range(4))
        self.last = nn.Linear(37, 3)

    def forward(self, x: Tensor, without: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = x if index in without else block(x)
        return self.last(x).square().mean()


WAYS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    # rank, step -> the blocks that are left out
    "one rank skips a block": lambda rank, step: (1,) if rank == 1 and step == DIVERGING_STEP else (),
    "each rank has a branch of its own": lambda rank, step: (1 + rank % 2,) if step >= DIVERGING_STEP else (),
    "one rank skips the last block": lambda rank, step: (3,) if rank == 1 and step == DIVERGING_STEP else (),
}


def model() -> Chain:
    with seeded(0):
        return Chain()


def train(trainer: Any, way: str, steps: int = STEPS) -> list[float]:
    rank, norms = dist.get_rank(), []
    for step in range(steps):
        x = torch.randn(5, 29, generator=torch.Generator().manual_seed(17 * step + rank))
        trainer.backward(trainer(x, WAYS[way](rank, step)))
        trainer.step()
        norms.append(trainer.norms[-1] if hasattr(trainer, "norms") else trainer.get_global_grad_norm())
    return norms


def trained(way: str, place: Place, nvme_path: str) -> Outcome:
    import zero

    quiet()
    chain = model()
    names = trainability(chain)
    with zero.initialize(model=chain, config=engine_config(Run(), place, nvme_path))[0] as engine:
        return outcome_of(engine, names, train(engine, way))


def plain(way: str) -> list[Outcome]:
    held = []
    for kind in (Ddp, Opposite):
        trainer = kind(model(), HYPER)
        train(trainer, way)
        held.append(trainer.outcome())
    return held


@each_once(
    place=(Place(1), Place(2, "none", "cpu"), Place(3), Place(3, "cpu", "cpu"), Place(3, "nvme", "nvme")), way=WAYS
)
def test_in_shared_host_memory_ranks_that_go_different_ways_train_as_under_ddp(
    rank_pool: Pool, nvme_path: Any, way: str, place: Place
) -> None:
    ours = rank_pool(2).run(trained, way, place, str(nvme_path), timeout_seconds=LIMIT_SECONDS)[0]
    assert beyond(ours, *rank_pool(2).run(plain, way)[0]) == []


def by_two(trainer: Any) -> list[float]:
    """Steps of two micro-batches; one block is used by one rank alone, in the first of the two."""
    rank, norms = dist.get_rank(), []
    for index in range(2 * STEPS):
        x = torch.randn(5, 29, generator=torch.Generator().manual_seed(17 * index + rank))
        trainer.backward(trainer(x, () if rank == 1 and index % 2 == 0 else (1,)))
        trainer.step()
        if index % 2:
            norms.append(trainer.norms[-1] if hasattr(trainer, "norms") else trainer.get_global_grad_norm())
    return norms


def trained_by_two(place: Place, nvme_path: str) -> Outcome:
    import zero

    quiet()
    chain = model()
    names = trainability(chain)
    with zero.initialize(model=chain, config=engine_config(Run(accumulation=2), place, nvme_path))[0] as engine:
        return outcome_of(engine, names, by_two(engine))


def plain_by_two(kind: type) -> Outcome:
    trainer = kind(model(), HYPER, accumulation=2)
    by_two(trainer)
    outcome: Outcome = trainer.outcome()
    return outcome


@pytest.mark.parametrize(
    "place",
    [*(Place(stage, shared=shared) for stage in (0, 1) for shared in (True, False)), Place(2), Place(3, "cpu", "cpu")],
    ids=lambda place: place.name,
)
def test_what_one_rank_alone_has_of_an_earlier_micro_batch_counts_as_under_ddp(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    try:
        ours = rank_pool(2).run(trained_by_two, place, str(nvme_path), timeout_seconds=LIMIT_SECONDS)
    except RankError:
        rank_pool(2).restart()
        raise
    one, other = (rank_pool(2).run(plain_by_two, kind)[0] for kind in (Ddp, Opposite))
    assert beyond(ours[0], one, other) == []


class Towers(nn.Module):
    """Two rows of layers on the raw input: no gradient passes their first ones, so nothing says when those are done.

    Each first one has a parameter that one rank uses and the other does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList((Moody(37, 211), Moody(37, 199))) for _ in range(2))
        self.last = nn.Linear(37, 3)

    def forward(self, x: Tensor, moody: bool) -> Tensor:
        outputs = [second(first(x, moody)) for first, second in self.towers]
        return self.last(outputs[0] * outputs[1]).square().mean()


def towers(place: Place | None, kind: type | None, nvme_path: str) -> Outcome:
    def inputs(step: int) -> tuple[Any, ...]:
        x = torch.randn(5, 37, generator=torch.Generator().manual_seed(17 * step + dist.get_rank()))
        return x, bool((step + dist.get_rank()) % 2)

    with seeded(0):
        chain = Towers()
    return by_either(chain, place, kind, nvme_path, inputs)


@pytest.mark.parametrize(
    "place", [Place(0), Place(2), Place(3, shared=False), Place(3, "nvme", "nvme", shared=False)],
    ids=lambda place: place.name,
)  # fmt: skip
def test_parameters_that_one_rank_leaves_out_of_a_module_both_call_train_as_under_ddp(
    rank_pool: Pool, nvme_path: Any, place: Place
) -> None:
    try:
        ours = rank_pool(2).run(towers, place, None, str(nvme_path), timeout_seconds=LIMIT_SECONDS)[0]
    except RankError:
        rank_pool(2).restart()
        raise
    one, other = (rank_pool(2).run(towers, None, kind, str(nvme_path))[0] for kind in (Ddp, Opposite))
    assert beyond(ours, one, other) == []


def errors_of(pool: RankPool, job: Callable[..., Any], *args: Any) -> list[BaseException | None]:
    """Each rank's error, or None; the pool starts anew afterwards, for its group is out of step."""
    try:
        told = pool.run(job, *args, timeout_seconds=LIMIT_SECONDS, errors="return")
    finally:
        pool.restart()
    return [answer if isinstance(answer, BaseException) else None for answer in told]


@each_once(way=WAYS, tier=("none", "nvme"))
def test_without_it_every_rank_that_waits_names_rank_and_module(
    rank_pool: Pool, nvme_path: Any, way: str, tier: str
) -> None:
    place = Place(3, tier, tier, shared=False)
    for rank, error in enumerate(errors_of(rank_pool(2), trained, way, place, str(nvme_path))):
        assert error is not None, f"rank {rank} went on with what another had not done"
        assert "rank 0" in str(error) and "rank 1" in str(error), str(error)
        assert "blocks." in str(error), str(error)


def uneven(place: Place, nvme_path: str) -> None:
    """Rank 1 has one batch less, and is done."""
    import zero

    quiet()
    with zero.initialize(model=model(), config=engine_config(Run(), place, nvme_path))[0] as engine:
        train(engine, "one rank skips a block", DIVERGING_STEP - dist.get_rank())


@pytest.mark.broad
@each_once(stage=(0, 2, 3), shared=(False, True))
def test_a_rank_that_has_fewer_batches_is_named_by_those_that_wait_for_it(
    rank_pool: Pool, nvme_path: Any, stage: int, shared: bool
) -> None:
    error = errors_of(rank_pool(2), uneven, Place(stage, shared=shared), str(nvme_path))[0]
    assert error is not None, "rank 0 went on alone"
    assert "rank 1" in str(error), str(error)
