"""Stage, ranks, tier, accumulation, clipping and backwards never change a number beyond the order of a sum.

Of one run (ranks, accumulation, clipping, backwards) every place of one stage trains to the same bits, on every rank;
against DistributedDataParallel each is as near as two plain-torch runs are to each other that add in opposite orders.
With and without shared memory the bits are the same where all ranks call the same modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pairwise import cover
from ranks import RankPool
from ranks_plain import Outcome, beyond
from ranks_runs import CLIPPING, Place, Run, plain, trained
from reference import differences

Pool = Callable[[int], RankPool]

RANKS = (1, 2, 4)
TIERS = ("none", "cpu", "nvme")
FEW_STEPS = 4
WHERE = (
    Place(0),
    *(Place(stage, "none", states) for stage in (1, 2) for states in TIERS),
    *(Place(3, params, states) for params in TIERS for states in TIERS),
)
CHOICES: dict[str, tuple[Any, ...]] = {
    "ranks": RANKS,
    "stage": (0, 1, 2, 3),
    "params": TIERS,
    "states": TIERS,
    "shared": (True, False),
    "accumulation": (1, 4),
    "clipping": (0.0, CLIPPING),
    "backwards": (1, 2),
}


def possible(chosen: dict[str, Any]) -> bool:
    """Whether some cell has all of these."""
    return any(
        all(getattr(place, key) == value for key, value in chosen.items() if key in ("stage", "params", "states"))
        for place in WHERE
    )


def pairwise() -> Iterator[tuple[Run, Place]]:
    """Cells in which every two choices meet that can."""
    for chosen in cover(CHOICES, possible):
        place = Place(*(chosen[key] for key in ("stage", "params", "states", "shared")))
        run = Run(chosen["ranks"], chosen["accumulation"], chosen["clipping"], chosen["backwards"], steps=FEW_STEPS)
        yield for_place(run, place), place


def for_place(run: Run, place: Place) -> Run:
    """Without shared memory all ranks have to fetch what one of them calls, so in that case they call the same."""
    return replace(run, agreed=place.stage == 3 and not place.shared)


class Matrix:
    """Runs cells; every outcome and every comparison is kept."""

    def __init__(self, rank_pool: Pool, nvme_path: Any) -> None:
        self._pool, self._nvme_path = rank_pool, str(nvme_path)
        self._plain: dict[Run, tuple[Outcome, Outcome]] = {}
        self._first: dict[tuple[Run, int], Outcome] = {}

    def plain(self, run: Run) -> tuple[Outcome, Outcome]:
        if run not in self._plain:
            self._plain[run] = self._pool(run.ranks).run(plain, run)[0]
        return self._plain[run]

    def trained(self, run: Run, place: Place) -> Outcome:
        """What the place gives, the same on every rank."""
        pool = self._pool(run.ranks)
        try:
            told = pool.run(trained, run, place, self._nvme_path)
        except BaseException:
            pool.restart()  # the ranks may be out of step, with each other or with us
            raise
        digests = [digest for digest, _ in told]
        assert len(set(digests)) == 1, f"{place.name}: the ranks see different values"
        return told[0][1]

    def first(self, run: Run, stage: int) -> Outcome:
        """The stage without offloading, which every place of it must equal; in fp32 held against DDP."""
        if (run, stage) not in self._first:
            first = self.trained(run, Place(stage))
            assert run.bf16 or beyond(first, *self.plain(run)) == [], Place(stage).name
            self._first[run, stage] = first
        return self._first[run, stage]

    def check(self, run: Run, place: Place) -> list[str]:
        """What is wrong with a cell, in words."""
        if not (place.shared or run.agreed):
            # Ranks that have different units reduce some of them in two parts where memory to wait is used up, and that
            # is another place with and without shared memory: another order of a sum, so DDP's spread is the measure.
            ours = self.trained(run, place)
            wrong = [] if run.bf16 else beyond(ours, *self.plain(run))
            return wrong + self.check(replace(run, agreed=True), place)
        ours, first = self.trained(run, place), self.first(run, place.stage)
        wrong = differences(ours.tensors, first.tensors) + ["norms"] * (ours.norms != first.norms)
        return [f"{place.name}: {line}" for line in wrong]


@pytest.fixture(scope="module")
def matrix(rank_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(rank_pool, tmp_path_factory.mktemp("nvme"))


# What only matters where weights are sharded, meet over two ranks, come from the disk and nobody sees others' memory.
GATHERED = (Run(2, 4, CLIPPING, 2, steps=FEW_STEPS, agreed=True), Place(3, "nvme", "nvme", shared=False))
CELLS = (*pairwise(), GATHERED)


@pytest.mark.parametrize(("run", "place"), CELLS, ids=[f"{run.name}, {place.name}" for run, place in CELLS])
def test_a_cell_trains_to_the_bits_of_its_stage_and_within_the_spread_of_ddp(
    matrix: Matrix, run: Run, place: Place
) -> None:
    assert matrix.check(run, place) == []


RUNS = (
    *(Run(ranks, *rest) for ranks in RANKS for rest in itertools.product((1, 4), (0.0, CLIPPING), (1, 2))),
    *(Run(ranks, 1, CLIPPING, 2, bf16=True) for ranks in RANKS),
)
EVERYWHERE = (
    *WHERE,
    *(Place(stage, shared=False) for stage in (0, 2, 3)),
    Place(3, "nvme", "nvme", shared=False),
    Place(2, "none", "nvme", cached=0.3),
    *(Place(3, "nvme", "nvme", cached=share) for share in (0.0, 0.3)),
)


@pytest.mark.slow
@pytest.mark.parametrize("place", EVERYWHERE, ids=lambda place: place.name)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_place_trains_to_the_bits_of_its_stage_and_within_the_spread_of_ddp(
    matrix: Matrix, run: Run, place: Place
) -> None:
    assert matrix.check(for_place(run, place), place) == []


BF16 = (
    Place(0), Place(1, "none", "cpu"), Place(2, "none", "nvme"), Place(3, "cpu", "nvme"), Place(3, "nvme", "nvme"),
    Place(3, "nvme", "nvme", shared=False), Place(3, "nvme", "nvme", cached=0.3),
)  # fmt: skip


@pytest.mark.parametrize("place", BF16, ids=lambda place: place.name)
def test_bf16_trains_to_the_same_bits_in_every_place_and_every_time(matrix: Matrix, place: Place) -> None:
    run = for_place(Run(2, 1, CLIPPING, 2, bf16=True, steps=FEW_STEPS), place)
    assert matrix.check(run, place) == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_trains_to_the_bits_of_stage_3_at_every_stage(matrix: Matrix, stage: int) -> None:
    run = Run(1, 4, CLIPPING, 2, steps=FEW_STEPS)
    assert differences(matrix.trained(run, Place(stage)).tensors, matrix.trained(run, Place(3)).tensors) == []


@pytest.mark.parametrize("place", [Place(3, "cpu", "cpu"), Place(3, "nvme", "nvme", cached=0.5)], ids=lambda p: p.name)
def test_ranks_that_copy_units_instead_of_aliasing_them_train_to_the_same_bits(
    matrix: Matrix, nvme_path: Any, place: Place
) -> None:
    run = Run(2, 1, CLIPPING, 1, steps=FEW_STEPS, agreed=True)
    pool = RankPool(2, environment={"ZERO_NO_ALIAS": "1"})
    try:
        _, ours = pool.run(trained, run, place, str(nvme_path))[0]
    finally:
        pool.close()
    assert differences(ours.tensors, matrix.first(run, 3).tensors) == []
