"""Where the number of ranks comes from, and who goes by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from offload.errors import ConfigError
from zero.config import load_config
from zero.dist import world


@pytest.fixture(autouse=True)
def nobody_has_joined() -> None:
    """An engine that was made before has joined a group of one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def second_of_four() -> Iterator[None]:
    """torch.distributed as rank 1 of 4 has it; its fake backend needs no other process."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_before_torch_distributed_is_initialised_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (world.world_size(), world.rank(), world.ranks_per_node()) == (1, 0, 1)
    assert load_config({}).world_size == 1


@pytest.mark.usefixtures("second_of_four")
def test_a_configuration_is_completed_for_the_ranks_there_are() -> None:
    assert (world.world_size(), world.rank()) == (4, 1)
    config = load_config({"train_batch_size": 32, "gradient_accumulation_steps": 2})
    assert (config.world_size, config.train_micro_batch_size_per_gpu) == (4, 4)
    assert load_config({"train_batch_size": 8}, world_size=2).train_micro_batch_size_per_gpu == 4
    with pytest.raises(ConfigError, match="world_size 4"):
        load_config({"train_batch_size": 6})


@pytest.mark.usefixtures("second_of_four")
@pytest.mark.parametrize(("said", "known"), [("2", 2), ("4", 4), ("8", None), ("0", None), ("x", None), ("", None)])
@pytest.mark.parametrize("name", world.LOCAL_SIZES)
def test_the_ranks_of_a_node_are_what_the_launcher_says_if_it_can_be(
    monkeypatch: pytest.MonkeyPatch, name: str, said: str, known: Any
) -> None:
    for other in world.LOCAL_SIZES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, said)
    assert world.ranks_per_node() == known
    block = {"zero_optimization": {"zero_hpz_partition_size": 4}}
    if known == 2:
        with pytest.raises(ConfigError, match="a divisor of 2, the number of ranks on a node"):
            load_config(block)
    else:
        assert load_config(block).zero_optimization.zero_hpz_partition_size == 4


def test_a_config_from_before_is_read_again_once_there_are_ranks() -> None:
    before = load_config({"train_batch_size": 32})
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert before.train_micro_batch_size_per_gpu == 32
        assert load_config(before).train_micro_batch_size_per_gpu == 16
    finally:
        dist.destroy_process_group()
