"""`destroy()`: where no weight is cut among ranks, the model goes on without the engine, as with DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import micro_batch
from models import build, tokens
from probe import keeper_of
from torch import nn

import zero
from offload.errors import StateError, StorageError
from zero.engine.engine import ZeroEngine
from zero.params.released_parameter import is_managed

Open = Callable[..., Any]
Pool = Callable[[int], Any]


def config(stage: int, device: str, nvme_path: Any) -> dict[str, Any]:
    place = {"device": device, **({"nvme_path": str(nvme_path)} if device == "nvme" else {})}
    block = {"stage": stage, **({"offload_optimizer": place} if stage else {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": block,
    }


@pytest.mark.parametrize(("stage", "device"), [(0, "none"), (1, "cpu"), (2, "nvme")])
def test_the_model_keeps_the_weights_of_the_last_step(
    open_engine: Open, nvme_path: Path, stage: int, device: str
) -> None:
    model = build("gpt")
    engine = open_engine(model, config(stage, device, nvme_path))
    micro_batch(engine, 0)
    engine.synchronize()
    expected = {name: keeper_of(engine).weights(name) for name, _ in model.named_parameters()}
    engine.destroy()
    engine.destroy()
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter and not is_managed(parameter)
        assert torch.equal(parameter, expected[name]), name
    model(tokens(1)).backward()
    with pytest.raises(StateError, match="the engine is closed"):
        engine(tokens(0))
    micro_batch(open_engine(model, config(stage, device, nvme_path)), 0)


def test_weights_that_are_cut_among_ranks_end_with_the_engine(open_engine: Open) -> None:
    """Whole, they may not fit; a checkpoint or `_zero3_consolidated_16bit_state_dict` keeps them."""
    model = build("gpt")
    engine = open_engine(model, config(3, "none", None))
    micro_batch(engine, 0)
    engine.destroy()
    assert all(is_managed(parameter) for parameter in model.parameters())


def destroyed(stage: int) -> list[float]:
    rank = torch.distributed.get_rank()
    model = build("gpt")
    engine = zero.initialize(model=model, config=config(stage, "cpu", None))[0]
    micro_batch(engine, rank)
    engine.destroy()
    return [parameter.double().sum().item() for parameter in model.parameters()]


@pytest.mark.parametrize("stage", (1, 2))
def test_on_two_ranks_each_keeps_all_of_them(rank_pool: Pool, stage: int) -> None:
    ours, theirs = rank_pool(2).run(destroyed, stage)
    assert ours == theirs
    initial = [parameter.double().sum().item() for parameter in build("gpt").parameters()]
    assert all(a != b for a, b in zip(ours, initial, strict=True))


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_sharded_weights_stay_if_the_caller_asks_for_it(open_engine: Open, nvme_path: Path, device: str) -> None:
    """On NVMe they wait as the values of a model that was just built under `zero.Init`."""
    model = build("gpt")
    engine = open_engine(model, sharded(device, nvme_path))
    micro_batch(engine, 0)
    engine.synchronize()
    expected = {name: keeper_of(engine).weights(name) for name, _ in model.named_parameters()}
    ZeroEngine.destroy(engine, keeps_shards=True)
    assert engine.run.closed
    for name, parameter in model.named_parameters():
        assert is_managed(parameter) == (device == "nvme")
        with zero.GatheredParameters([parameter]):
            assert torch.equal(parameter, expected[name]), name
    again = open_engine(model, sharded(device, nvme_path))
    assert all(torch.equal(keeper_of(again).weights(name), value) for name, value in expected.items())
    micro_batch(again, 0)


def test_a_disk_without_room_for_them_is_an_error_and_the_engine_ends(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(build("gpt"), sharded("nvme", nvme_path))

    def full(*given: Any) -> int:
        raise StorageError.from_os_error(OSError(28, "no room"), "spilling initial values", "here", 0)

    monkeypatch.setattr("offload.io.init_file.InitFile.append", full)
    with pytest.raises(StorageError, match="ENOSPC"):
        ZeroEngine.destroy(engine, keeps_shards=True)
    assert engine.run.closed


def sharded(device: str, nvme_path: Any) -> dict[str, Any]:
    place = {"device": device, **({"nvme_path": str(nvme_path)} if device == "nvme" else {})}
    block = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    return {**config(3, device, nvme_path), "zero_optimization": {**block, "stage3_param_persistence_threshold": 0}}


def kept_on_ranks(device: str, nvme_path: str) -> list[float]:
    model, rank = build("gpt"), torch.distributed.get_rank()
    engine = zero.initialize(model=model, config=sharded(device, nvme_path))[0]
    micro_batch(engine, rank)
    ZeroEngine.destroy(engine, keeps_shards=True)
    again = zero.initialize(model=model, config=sharded(device, nvme_path))[0]
    micro_batch(again, rank)
    again.synchronize()
    sums = [again.full_parameter(name).double().sum().item() for name, _ in model.named_parameters()]
    again.close()
    return sums


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_two_ranks_go_on_with_what_they_had(rank_pool: Pool, nvme_path: Path, device: str) -> None:
    """As at stage 2, where each rank has all weights."""
    ours, theirs = rank_pool(2).run(kept_on_ranks, device, str(nvme_path))
    assert ours == theirs
    assert ours == rank_pool(2).run(gone_on_with)[0]


def gone_on_with() -> list[float]:
    model, rank = build("gpt"), torch.distributed.get_rank()
    for _ in range(2):
        engine = zero.initialize(model=model, config=config(2, "cpu", None))[0]
        micro_batch(engine, rank)
        engine.destroy()
    return [parameter.double().sum().item() for parameter in model.parameters()]
