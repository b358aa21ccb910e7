"""Loaders that go on where the loop was: the same batches in the same order, fetched once, with any ranks and sizes."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import zero
from offload.errors import ConfigError
from offload.files.archives import make_archive, read_archive
from zero.config import load_config
from zero.data.loaders import Loaders
from zero.dist import world

Batches = list[list[int]]


class Numbers:
    """A dataset of its own indices; notes what was fetched, where the loop loads."""

    def __init__(self, count: int) -> None:
        self.count, self.fetched = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


class Draws(Numbers):
    """Every sample is another random number."""

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 40, ()))


class Stateful:
    """A sampler that knows where it is: counts on for ever, in epochs."""

    def __init__(self, length: int, epoch: int = 0) -> None:
        self.length, self.drawn, self.epoch_number = length, 0, epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        while self.drawn < self.length:
            self.drawn += 1
            yield (self.drawn * 7 + self.epoch_number) % self.length
        self.drawn, self.epoch_number = 0, self.epoch_number + 1

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn, "epoch": self.epoch_number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn, self.epoch_number = state["drawn"], state["epoch"]


def open_loader(data: Any, micro: int, *, rank: int = 0, of: int = 1, drop: bool = False, **more: Any) -> Any:
    config = load_config({"train_micro_batch_size_per_gpu": micro, "dataloader_drop_last": drop}, world_size=of)
    run: Any = SimpleNamespace(config=config, device=torch.device("cpu"), collate_fn=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "world_size", lambda: of)
        patch.setattr(world, "rank", lambda: rank)
        return Loaders(run).deepspeed_io(data, **more)


def walk(loader: Any, epochs: int) -> list[Batches]:
    return [[used(batch) for batch in loader] for _ in range(epochs)]


def used(batch: torch.Tensor) -> list[int]:
    """As a model with dropout does, which draws random numbers."""
    torch.rand(1)
    return batch.tolist()


def flat(lists: list[Any]) -> list[Any]:
    return [item for inner in lists for item in inner]


def interrupt(loader: Any, epoch: int, batches: int) -> tuple[list[Batches], dict[str, Any]]:
    """What was got until then, and the state as a checkpoint would have it."""
    got = walk(loader, epoch)
    batch = iter(loader)
    got.append([used(next(batch)) for _ in range(batches)])
    return got, read_archive(make_archive(loader.state_dict()), "state")


def joined(before: list[Batches], after: list[Batches]) -> list[Batches]:
    return [*before[:-1], before[-1] + after[0], *after[1:]]


@given(st.data())
def test_an_interrupted_loop_gets_what_an_uninterrupted_one_does(data: st.DataObject) -> None:
    of, samples, micro = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 17)), data.draw(st.integers(1, 5))
    more = {"drop": data.draw(st.booleans()), "route": data.draw(st.sampled_from(["train", "eval"]))}
    epoch, rank = data.draw(st.integers(0, 2)), data.draw(st.integers(0, of - 1))

    def opened() -> Any:
        return open_loader(Numbers(samples), micro, rank=rank, of=of, **more)

    whole = walk(opened(), 5)
    stops = data.draw(st.lists(st.integers(0, len(whole[0])), min_size=1, max_size=3).map(sorted))
    before, state = interrupt(opened(), epoch, stops[0])
    for last, stop in itertools.pairwise(stops):  # interrupted again, in the same epoch
        more_of_it, state = interrupt(resumed(opened(), state), 0, stop - last)
        before[-1] += more_of_it[0]
    assert (state["epoch"], state["batches"]) == (epoch, stops[-1])
    loader = resumed(opened(), state)
    assert joined(before, walk(loader, 5 - epoch)) == whole
    assert loader.dataset.fetched == flat(flat(whole[epoch:])[stops[-1] :])


def resumed(loader: Any, state: dict[str, Any]) -> Any:
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("workers", [(2, 2), (2, 0), (0, 2)])
def test_what_workers_have_fetched_ahead_does_not_count(workers: tuple[int, int], shuffled: bool) -> None:
    route = "train" if shuffled else "eval"
    whole = walk(open_loader(Numbers(23), 2, route=route), 3)
    before, state = interrupt(open_loader(Numbers(23), 2, route=route, num_local_io_workers=workers[0]), 1, 3)
    loader = open_loader(Numbers(23), 2, route=route, num_local_io_workers=workers[1])
    loader.load_state_dict(state)
    assert joined(before, walk(loader, 2)) == whole


def test_workers_draw_other_numbers_each_epoch_and_the_same_when_one_is_repeated() -> None:
    torch.manual_seed(3)
    loader = open_loader(Draws(8), 4, num_local_io_workers=1)
    whole = walk(loader, 3)
    assert len({tuple(batch) for batches in whole for batch in batches}) == 6
    torch.manual_seed(3)
    before, state = interrupt(open_loader(Draws(8), 4, num_local_io_workers=1), 0, 1)
    loader = open_loader(Draws(8), 4, num_local_io_workers=1)
    loader.load_state_dict(state)
    after = walk(loader, 3)
    assert after[1:] == whole[1:] and before[0][0] == whole[0][0] and after[0][0] not in whole[0]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(Numbers(11)),
    "random": lambda: RandomSampler(Numbers(11)),
    "with replacement": lambda: RandomSampler(Numbers(11), replacement=True, num_samples=70),
    "own generator": lambda: RandomSampler(Numbers(11), generator=torch.Generator().manual_seed(1)),
    "own, replacement": lambda: RandomSampler(
        Numbers(11), replacement=True, num_samples=70, generator=torch.Generator().manual_seed(1)
    ),
    "subset": lambda: SubsetRandomSampler([1, 3, 5, 7, 9]),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0] + [1.0] * 8, 9),
    "distributed": lambda: DistributedSampler(Numbers(11), 2, 1),
    "stateful": lambda: Stateful(11),
    "list": lambda: [4, 2, 8, 6],
}


PLACES = [(0, 0), (0, 1), (1, 2), (1, -1), (2, 0)]
"""(epoch, batches had; -1: all of them)."""
GIVEN = [
    *((name, place, 0) for name in SAMPLERS for place in PLACES),
    *((name, place, 1) for name in ("random", "own, replacement", "stateful") for place in PLACES[2:4]),
]


@pytest.mark.parametrize(("name", "place", "workers"), GIVEN)
def test_a_sampler_that_was_given_goes_on_in_the_order_it_had(name: str, place: tuple[int, int], workers: int) -> None:
    epoch, batches = place

    def opened() -> Any:
        return open_loader(Numbers(11), 2, data_sampler=SAMPLERS[name](), num_local_io_workers=workers)

    torch.manual_seed(5)
    whole = walk(opened(), 4)
    torch.manual_seed(5)
    before, state = interrupt(opened(), epoch, batches if batches >= 0 else len(whole[epoch]))
    random = torch.get_rng_state()
    torch.manual_seed(6)
    loader = opened()
    torch.set_rng_state(random)
    loader.load_state_dict(state)
    assert joined(before, walk(loader, 4 - epoch)) == whole


def test_one_that_was_told_its_epoch_is_told_again() -> None:
    sampler = DistributedSampler(Numbers(11), 1, 0)
    sampler.set_epoch(4)
    before, state = interrupt(open_loader(Numbers(11), 2, data_sampler=sampler), 0, 2)
    loader = open_loader(Numbers(11), 2, data_sampler=DistributedSampler(Numbers(11), 1, 0))
    loader.load_state_dict(state)
    assert loader.sampler.epoch == 4
    assert joined(before, walk(loader, 1)) == walk(open_loader(Numbers(11), 2, data_sampler=sampler), 1)


def test_set_epoch_after_loading_decides() -> None:
    whole = walk(open_loader(Numbers(11), 2), 4)
    _, state = interrupt(open_loader(Numbers(11), 2), 1, 3)
    loader = open_loader(Numbers(11), 2)
    loader.load_state_dict(state)
    loader.sampler.set_epoch(1)
    assert walk(loader, 1)[0] == whole[1][3:], "the epoch it is in: the rest of it"
    loader.load_state_dict(state)
    loader.sampler.set_epoch(3)
    assert loader.state_dict()["epoch"] == 3 and loader.state_dict()["batches"] == 0
    assert walk(loader, 1)[0] == whole[3], "another one: all of it"


@given(st.data())
def test_other_ranks_and_sizes_go_on_after_the_samples_that_were_had(data: st.DataObject) -> None:
    old, new = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    samples, micro, other = data.draw(st.integers(4, 40)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    loaders = [open_loader(Numbers(samples), micro, rank=rank, of=old) for rank in range(old)]
    stop = data.draw(st.integers(0, len(loaders[0])))
    had, states = [], []
    for loader in loaders:
        loader.sampler.seed = 0
        before, state = interrupt(loader, 0, stop)
        had += flat(before[0])
        states.append(state)
    fresh = [open_loader(Numbers(samples), other, rank=rank, of=new) for rank in range(new)]
    rest, shapes = [], []
    for rank, loader in enumerate(fresh):
        loader.load_state_dict(states[rank if rank < old else 0])
        assert (at := loader.state_dict())["epoch"] == 0 and at["batches"] == stop and at["world_size"] == new
        batches = walk(loader, 1)[0]
        shapes.append([len(batch) for batch in batches])
        rest += flat(batches)
    assert all(shape == shapes[0] for shape in shapes)
    left_out = set(range(samples)) - set(had) - set(rest)
    consumed = states[0]["samples"]
    assert len(left_out) <= -consumed % new, "with a position that divides by the ranks, nothing is"
    assert len(set(had) & set(rest)) <= new - 1, "what fills up the last batches of an epoch, and no more"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro": 3}, "batches had 2 samples and have 3"),
        ({"count": 12}, "the dataset had 11 samples when this was saved and has 12 now"),
        ({"data_sampler": SequentialSampler(Numbers(11))}, "another kind of sampler"),
        ({"of": 4}, r"6 samples of the epoch were used.*4 ranks cannot divide evenly; 2 more are skipped"),
        ({"of": 3}, None),
        ({}, None),
    ],
)
def test_what_is_not_as_it_was_is_said(
    change: dict[str, Any], message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    _, state = interrupt(open_loader(Numbers(11), 2), 0, 3)
    options = {"micro": 2, "count": 11} | change
    loader = open_loader(Numbers(options.pop("count")), options.pop("micro"), **options)
    with caplog.at_level(logging.WARNING, "zero"):
        loader.load_state_dict(state)
    text = "\n".join(caplog.messages)
    assert (text == "") if message is None else re.search(message, text)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="without batches, samples, world_size, batch_size, dataset_samples"):
        open_loader(Numbers(3), 1).load_state_dict({"epoch": 3})


def test_an_iteration_that_is_left_and_one_begun_anew_are_two_epochs() -> None:
    whole = walk(open_loader(Numbers(11), 2), 3)
    loader = open_loader(Numbers(11), 2)
    left = iter(loader)
    assert [next(left).tolist(), next(left).tolist()] == whole[0][:2]
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (0, 2)
    again = iter(loader)
    assert next(again).tolist() == whole[1][0]
    assert next(left).tolist() == whole[0][2], "two at once do not disturb each other"
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (1, 1), "what began last counts"
    assert [batch.tolist() for batch in again] == whole[1][1:]
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (2, 0)
    assert len(loader) == len(again) == len(whole[0]) == 6


def test_loading_takes_effect_with_the_next_first_batch_and_a_state_is_there_before() -> None:
    whole = walk(open_loader(Numbers(11), 2), 3)
    _, state = interrupt(open_loader(Numbers(11), 2), 1, 4)
    loader = open_loader(Numbers(11), 2)
    made_before = iter(loader)
    loader.load_state_dict(state)
    assert {**loader.state_dict(), "random": None} == {**state, "random": None}
    assert [batch.tolist() for batch in made_before] == whole[1][4:]


def test_a_default_device_does_not_matter() -> None:
    loaders = [open_loader(Numbers(11), 2, collate_fn=list) for _ in range(2)]
    expected = [list(loaders[0]) for _ in range(2)]
    with torch.device("meta"):
        assert [list(loaders[1]) for _ in range(2)] == expected


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise ValueError("sample 4")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_could_not_be_made_is_passed_over_only_if_the_loop_goes_on(workers: int) -> None:
    loader = open_loader(Broken(10), 2, route="eval", num_local_io_workers=workers)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="sample 4"):
        next(batches)
    assert loader.state_dict()["batches"] == 2, "mended, it may be had"
    assert next(batches).tolist() == [6, 7]
    state = loader.state_dict()
    assert (state["batches"], state["samples"]) == (4, 8)
    fresh = open_loader(Broken(10), 2, route="eval")
    fresh.load_state_dict(state)
    assert walk(fresh, 1) == [[[8, 9]]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_a_stream_has_no_position() -> None:
    assert not hasattr(open_loader(Stream(), 2), "state_dict")


# ---- RepeatingLoader ---------------------------------------------------------------------------


def test_repeated_a_loader_begins_anew_and_its_state_passes_through() -> None:
    whole = flat(walk(open_loader(Numbers(5), 2), 4))
    repeating = zero.RepeatingLoader(open_loader(Numbers(5), 2))
    assert [next(repeating).tolist() for _ in range(12)] == whole
    for stop in range(9):
        stopped = zero.RepeatingLoader(open_loader(Numbers(5), 2))
        assert [next(stopped).tolist() for _ in range(stop)] == whole[:stop]
        for direct in (False, True):  # to the loader it wraps, as when the engine has that one
            again = zero.RepeatingLoader(open_loader(Numbers(5), 2))
            next(again)
            (again.loader if direct else again).load_state_dict(stopped.state_dict())
            assert [next(again).tolist() for _ in range(12 - stop)] == whole[stop:]


def test_repeated_a_list_has_no_state_and_nothing_is_nothing() -> None:
    repeating = zero.RepeatingLoader([1, 2])
    assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert repeating.state_dict() is None and iter(repeating) is repeating
    with pytest.raises(StopIteration):
        next(zero.RepeatingLoader([]))
