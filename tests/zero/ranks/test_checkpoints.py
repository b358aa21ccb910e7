"""A checkpoint belongs to no number of ranks, no stage and no tier; and what fails on one rank fails on all."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import losses_of
from models import trainability
from pairwise import cover
from ranks import RankPool
from ranks_model import motley
from ranks_runs import Place, Run, digest, engine_config, on_batch, outcome_of, quiet
from reference import differences

from offload.errors import ConfigError, StateError, StorageError
from offload.files.durable import Files

Pool = Callable[[int], RankPool]
STEPS = 2
MICS = (("mics_shard_size", 1),)
PLACES = (
    Place(0), Place(1, "none", "nvme"), Place(2, "none", "cpu"), Place(3), Place(3, "cpu", "nvme"),
    Place(3, "nvme", "nvme"), Place(3, "nvme", "cpu", shared=False), Place(1, "none", "none", shared=False),
    Place(3, "none", "cpu", more=MICS),
)  # fmt: skip


def run_at(place: Place, steps: int = STEPS) -> Run:
    return Run(bf16=True, clipping=0.3, steps=steps, agreed=True)


def opened(place: Place, nvme_path: str, seed: int = 0, **more: Any) -> tuple[Any, Any]:
    import zero

    quiet()
    model = motley(seed)
    names = trainability(model)
    config = {**engine_config(run_at(place), place, nvme_path), **more}
    return zero.initialize(model=model, config=config)[0], names


def train(engine: Any, first: int, steps: int = STEPS) -> list[float]:
    return losses_of(engine, *range(first, first + steps), loss_of=on_batch)


def held(engine: Any, names: Any) -> Any:
    """(a digest on every rank, the values on the first)."""
    outcome = outcome_of(engine, names, [engine.global_steps])
    return digest(outcome), outcome.tensors if dist.get_rank() == 0 else None


def saved(place: Place, folder: str) -> Any:
    """Train, save, train on: what was saved, and what came of it."""
    engine, names = opened(place, folder)
    with engine:
        train(engine, 0)
        before = held(engine, names)
        if not engine.save_checkpoint(f"{folder}/saved", client_state={"rank": dist.get_rank()}):
            raise AssertionError("save_checkpoint did not return True")
        return before, train(engine, STEPS), held(engine, names)


def loaded(place: Place, folder: str) -> Any:
    """Load into other weights, train on."""
    engine, names = opened(place, folder, seed=9 + dist.get_rank())
    with engine:
        path, client = engine.load_checkpoint(f"{folder}/saved")
        return path, client, held(engine, names), train(engine, STEPS), held(engine, names)


def one(told: list[Any]) -> Any:
    """The first rank's values, after a look at whether all ranks see the same."""
    assert len({digest for digest, _ in told}) == 1, "the ranks see different values"
    return told[0][1]


def check(rank_pool: Pool, folder: Path, first: tuple[int, Place], second: tuple[int, Place]) -> None:
    wrote = rank_pool(first[0]).run(saved, first[1], str(folder))
    before = one([rank[0] for rank in wrote])
    read = rank_pool(second[0]).run(loaded, second[1], str(folder))
    for path, client, *_ in read:
        assert (path, client) == (f"{folder}/saved/global_step{STEPS}", {"rank": 0})
    assert differences(one([rank[2] for rank in read]), before) == []
    if first == second:
        assert [rank[3] for rank in read] == [rank[1] for rank in wrote]
        assert differences(one([rank[4] for rank in read]), one([rank[2] for rank in wrote])) == []


def name(case: dict[str, Any]) -> str:
    ends = (f"{case[ranks]} at {case[place].name}" for ranks, place in (("ranks", "place"), ("then", "there")))
    return " to ".join(ends)


CASES = cover({"ranks": (1, 2), "then": (1, 2), "place": PLACES[:7], "there": PLACES[:7]})[::3]
MORE = [
    dict(zip(("ranks", "then", "place", "there"), case, strict=True))
    for case in itertools.product((1, 2, 4), (1, 2, 3, 4), PLACES, PLACES)
]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_any_ranks_at_any_place_load_what_others_saved_bit_for_bit(
    rank_pool: Pool, tmp_path: Path, case: dict[str, Any]
) -> None:
    check(rank_pool, tmp_path, (case["ranks"], case["place"]), (case["then"], case["there"]))


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE[::5], ids=name)
def test_any_more_ranks_at_any_place_load_what_others_saved_bit_for_bit(
    rank_pool: Pool, tmp_path: Path, case: dict[str, Any]
) -> None:
    check(rank_pool, tmp_path, (case["ranks"], case["place"]), (case["then"], case["there"]))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_the_same_ranks_go_on_as_if_nothing_had_happened(rank_pool: Pool, tmp_path: Path, place: Place) -> None:
    check(rank_pool, tmp_path, (2, place), (2, place))


# ---- ranks that do not agree ------------------------------------------------------------------


def tagged(place: Place, folder: str, validation: str) -> list[str]:
    engine, _ = opened(place, folder, checkpoint={"tag_validation": validation})
    with engine:
        train(engine, 0, 1)
        engine.save_checkpoint(f"{folder}/saved", f"of-rank-{dist.get_rank()}")
        return sorted(os.listdir(f"{folder}/saved"))


@pytest.mark.parametrize("validation", ["Ignore", "Warn", "Fail"])
def test_ranks_with_different_tags_take_the_first_ones_or_are_refused(
    rank_pool: Pool, tmp_path: Path, validation: str
) -> None:
    told = rank_pool(2).run(tagged, Place(3), str(tmp_path), validation, errors="return")
    if validation == "Fail":
        for error in told:
            assert isinstance(error, ConfigError)
            assert "'of-rank-0'" in str(error) and "'of-rank-1'" in str(error)
        assert not (tmp_path / "saved").exists()
    else:
        for names in told:
            assert [name for name in names if not name.startswith(".")] == ["latest", "of-rank-0"]


class FailingFiles(Files):
    """Of one rank: operation number `number` fails, and what comes after works."""

    def __init__(self, number: int) -> None:
        self._left = number

    def perform(self, operation: Any, path: Path, action: Callable[[], Any], new: Path | None = None) -> Any:
        self._left -= 1
        if self._left == 0:
            raise StorageError(operation, errno=errno.EIO, path=str(path), offset=0, free_bytes=None)
        return super().perform(operation, path, action, new)


def failing(place: Place, folder: str, rank: int, numbers: tuple[int, ...]) -> Any:
    """A save for each of the numbers, and then a good one; what was there meanwhile."""
    engine, names = opened(place, folder)
    told = []
    with engine:
        for number in numbers:
            train(engine, number, 1)
            if dist.get_rank() == rank:
                engine.files = FailingFiles(number)
            try:
                engine.save_checkpoint(f"{folder}/saved", "it")
                told.append("")
            except (StorageError, StateError) as error:
                told.append(f"{type(error).__name__}: {error}")
            engine.files = Files()
            dist.barrier()
            told.append(sorted(name for name in os.listdir(folder + "/saved") if name != ".lock"))
            dist.barrier()
        engine.save_checkpoint(f"{folder}/saved", "it")
        return told, held(engine, names)


@pytest.mark.parametrize(("rank", "numbers"), [(0, (3, 9, 12)), (1, (1, 2, 3))])
def test_a_disk_that_fails_one_rank_fails_all_and_leaves_nothing(
    rank_pool: Pool, tmp_path: Path, rank: int, numbers: tuple[int, ...]
) -> None:
    (tmp_path / "saved").mkdir()
    place = Place(3, "cpu", "nvme")
    told = rank_pool(2).run(failing, place, str(tmp_path), rank, numbers)
    for reports, _ in told:
        for error, names in zip(reports[::2], reports[1::2], strict=True):
            assert error and names == []
    assert all("StateError" in error and f"rank {rank}" in error for error in told[1 - rank][0][::2])
    read = rank_pool(2).run(loaded, place, str(tmp_path))
    assert differences(one([rank[2] for rank in read]), one([rank[1] for rank in told])) == []


def unpicklable(place: Place, folder: str) -> str:
    """A save whose client state the first rank cannot write, and a good one."""
    engine, _ = opened(place, folder)
    with engine:
        train(engine, 0, 1)
        try:
            engine.save_checkpoint(f"{folder}/saved", "it", {"function": lambda: 0} if dist.get_rank() == 0 else {})
        except Exception as error:
            train(engine, 1, 1)
            engine.save_checkpoint(f"{folder}/saved", "it")
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_client_state_that_cannot_be_written_fails_on_all_ranks(rank_pool: Pool, tmp_path: Path) -> None:
    told = rank_pool(2).run(unpicklable, Place(3), str(tmp_path))
    assert all(told), told
    assert sorted(n for n in os.listdir(tmp_path / "saved") if n != ".lock") == ["it", "latest"]


def damaged(place: Place, folder: str) -> Any:
    """A load of which one rank's part is damaged; then a good one."""
    engine, _ = opened(place, folder, seed=5)
    with engine:
        try:
            engine.load_checkpoint(f"{folder}/saved", "damaged")
        except (ConfigError, StateError) as error:
            engine.load_checkpoint(f"{folder}/saved", "good")
            train(engine, 0, 1)
            return f"{type(error).__name__}: {error}"
    return ""


def save_twice(place: Place, folder: str) -> None:
    engine, _ = opened(place, folder)
    with engine:
        train(engine, 0, 1)
        for tag in ("damaged", "good"):
            engine.save_checkpoint(f"{folder}/saved", tag)


@pytest.mark.parametrize("place", [PLACES[4], PLACES[6]], ids=lambda place: place.name)
def test_a_part_that_is_damaged_for_one_rank_fails_on_all(rank_pool: Pool, tmp_path: Path, place: Place) -> None:
    rank_pool(2).run(save_twice, place, str(tmp_path))
    path = tmp_path / "saved" / "damaged" / "__1_0.distcp"
    with open(path, "r+b") as file:
        file.seek(4096 + 8)
        byte = file.read(1)
        file.seek(4096 + 8)
        file.write(bytes([byte[0] ^ 16]))
    told = rank_pool(2).run(damaged, place, str(tmp_path))
    assert all("DamagedError" in each and "__1_0.distcp" in each for each in told), told
