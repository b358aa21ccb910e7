"""Loaders: what each rank gets of an epoch, and that all ranks get equally much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import build, make_config
from torch import nn
from torch.utils.data import IterableDataset, SequentialSampler

import zero
from offload.errors import ConfigError
from zero.config import load_config
from zero.data.loaders import Loaders
from zero.dist import world

Open = Callable[..., Any]


class Numbers:
    """A dataset of its own indices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def loaders(world_size: int, data: Any, *, micro: int = 1, drop: bool = False, **more: Any) -> list[Any]:
    """The loader of every rank."""
    config = load_config({"train_micro_batch_size_per_gpu": micro, "dataloader_drop_last": drop}, world_size=world_size)
    run: Any = SimpleNamespace(config=config, device=torch.device("cpu"), collate_fn=None)
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "world_size", lambda: world_size)
        for rank in range(world_size):
            patch.setattr(world, "rank", lambda rank=rank: rank)
            made.append(Loaders(run).deepspeed_io(data, **more))
    return made


def epoch(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@given(st.integers(1, 5), st.integers(1, 23), st.integers(1, 4))
def test_an_epoch_reaches_every_sample_and_every_rank_gets_equally_many_batches(
    world_size: int, samples: int, micro: int
) -> None:
    epochs = [epoch(loader) for loader in loaders(world_size, Numbers(samples), micro=micro)]
    sizes = [[len(batch) for batch in batches] for batches in epochs]
    assert all(size == sizes[0] for size in sizes)
    assert all(size == micro for size in sizes[0][:-1])
    seen = Counter(sample for batches in epochs for batch in batches for sample in batch)
    assert set(seen) == set(range(samples))
    assert seen.total() == -(-samples // world_size) * world_size
    assert max(seen.values(), default=0) - min(seen.values(), default=0) <= 1 or samples < world_size


@given(st.integers(1, 5), st.integers(1, 23), st.integers(1, 4))
def test_dropping_leaves_full_batches_of_different_samples(world_size: int, samples: int, micro: int) -> None:
    epochs = [epoch(loader) for loader in loaders(world_size, Numbers(samples), micro=micro, drop=True)]
    assert all(len(batches) == samples // world_size // micro for batches in epochs)
    seen = [sample for batches in epochs for batch in batches for sample in batch]
    assert all(len(batch) == micro for batches in epochs for batch in batches)
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_epoch_has_an_order_of_its_own_which_set_epoch_brings_back(world_size: int) -> None:
    first, second = [], []
    for loader in loaders(world_size, Numbers(64)):
        first.append(epoch(loader))
        second.append(epoch(loader))
        loader.sampler.set_epoch(0)
        assert epoch(loader) == first[-1] and epoch(loader) == second[-1]
    for order in (first, second):
        assert {sample for batches in order for batch in batches for sample in batch} == set(range(64))
    assert first != second


def test_the_order_of_one_rank_follows_the_seed_and_draws_no_random_number() -> None:
    orders = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        (loader,) = loaders(1, Numbers(64))
        before = torch.get_rng_state()
        orders.append(epoch(loader))
        assert torch.equal(torch.get_rng_state(), before)
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize("route", ["eval", "predict"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_not_training_is_in_order(world_size: int, route: str) -> None:
    for rank, loader in enumerate(loaders(world_size, Numbers(8), route=route)):
        expected = [[sample] for sample in range(rank, 8, world_size)]
        assert epoch(loader) == expected and epoch(loader) == expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sampler_that_is_given_decides(world_size: int) -> None:
    for loader in loaders(world_size, Numbers(4), data_sampler=SequentialSampler(Numbers(4)), batch_size=3):
        assert epoch(loader) == [[0, 1, 2], [3]]


def test_a_stream_is_for_one_rank() -> None:
    (loader,) = loaders(1, Stream(), micro=2)
    assert epoch(loader) == [[0, 1], [2, 3], [4]]
    with pytest.raises(ConfigError, match=r"cannot be split over 2 ranks.*your own DataLoader"):
        loaders(2, Stream())


@pytest.mark.parametrize(("data", "route", "message"), [(iter([1]), "train", "__getitem__"),
                                                        (Numbers(1), "test", "train, eval, predict")])  # fmt: skip
def test_what_is_no_dataset_or_no_route_is_refused(data: Any, route: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaders(1, data, route=route)


def test_the_engine_makes_loaders_as_deepspeeds_does(open_engine: Open, nvme_path: Any) -> None:
    config = {**make_config(("cpu", "cpu"), nvme_path), "train_micro_batch_size_per_gpu": 3}
    engine = open_engine(build("gpt"), config, training_data=Numbers(7), collate_fn=sorted)
    assert sorted(sample for batch in engine.training_dataloader for sample in batch) == list(range(7))
    loader = engine.deepspeed_io(Numbers(5), route="eval")
    assert list(loader) == [[0, 1, 2], [3, 4]], "the collate_fn of initialize serves every loader"
    loader = engine.deepspeed_io(Numbers(5), 2, "eval", True, None, list, 0)
    assert list(loader) == [[0, 1], [2, 3], [4]]
    loader = engine.deepspeed_io(Numbers(5), batch_size=5, data_sampler=SequentialSampler(Numbers(5)), collate_fn=list)
    assert list(loader) == [[0, 1, 2, 3, 4]]
    with pytest.raises(ConfigError, match="route"):
        engine.deepspeed_io(Numbers(5), route="valid")


def test_without_training_data_there_is_no_loader(open_engine: Open, nvme_path: Any) -> None:
    assert open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path)).training_dataloader is None


# ---- pipelines ---------------------------------------------------------------------------------


class PipelineModule(nn.Sequential):
    """DeepSpeed's is known by its name, here or in a base."""


class Staged(PipelineModule):
    pass


def marked() -> nn.Module:
    """A class of another name with what DeepSpeed's sets up."""
    model = nn.Sequential(nn.Linear(2, 2))
    for mark in ("forward_funcs", "_layer_specs", "_topo"):
        object.__setattr__(model, mark, [])
    return model


@pytest.mark.parametrize("make", [PipelineModule, Staged, marked])
def test_a_pipeline_is_refused_with_what_to_do_instead(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"zero\.pipe\.PipelineModule of the same layers"):
        zero.initialize(model=make(), config={"train_batch_size": 1})


def test_a_plain_sequence_is_no_pipeline(open_engine: Open) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = open_engine(model, {"train_batch_size": 1, "optimizer": {"type": "Adam"}})
    loss = engine(torch.ones(1, 4)).sum()
    engine.backward(loss)
    engine.step()
    assert engine.global_steps == 1
