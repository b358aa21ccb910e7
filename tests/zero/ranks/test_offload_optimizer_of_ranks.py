"""`zero.OffloadOptimizer` on two ranks: the bits of torch's optimizer under FSDP2 and DDP, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from offload_runs import offloaded
from probe import storages_behind
from ranks import RankPool
from recovery import failing
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero
from offload.errors import ConfigError, StateError, StorageError

Pool = Callable[[int], RankPool]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
STEPS = 20


def plain() -> nn.Sequential:
    """Its last layer has one row: one of two ranks has nothing of it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(11, 133), nn.GELU(), nn.LayerNorm(133), nn.Linear(133, 67), nn.Tanh(), nn.Linear(67, 1)
        )


def sharded() -> nn.Module:
    model, mesh = plain(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: Any, steps: range, decay: float = 1.0) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: decay**done)
    rank = torch.distributed.get_rank()
    for index in steps:
        batch = torch.randn(8, 11, generator=torch.Generator().manual_seed(10 * index + rank))
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(local(mine.detach()), local(theirs.detach())) for mine, theirs in pairs)


def same_states(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Values, and how they are sharded."""
    if first["state"].keys() != second["state"].keys() or first["param_groups"] != second["param_groups"]:
        return False
    for key, mine in first["state"].items():
        theirs = second["state"][key]
        if mine.keys() != theirs.keys():
            return False
        for name, value in mine.items():
            other = theirs[name]
            if getattr(value, "placements", None) != getattr(other, "placements", None):
                return False
            if value.shape != other.shape or not torch.equal(local(value), local(other)):
                return False
    return True


def against_torch(wrapped: bool, device: str, nvme_path: str) -> tuple[bool, bool]:
    """(equal weights, equal states) after 20 steps beside torch's AdamW."""
    expected, model = (sharded(), sharded()) if wrapped else [DistributedDataParallel(plain()) for _ in range(2)]
    reference = torch.optim.AdamW(expected.parameters(), **OPTIONS)
    offload = offloaded(device, Path(nvme_path))
    with zero.OffloadOptimizer(model.parameters(), torch.optim.AdamW, offload=offload, **OPTIONS) as ours:
        train(expected, reference, range(STEPS), decay=0.9)
        train(model, ours, range(STEPS), decay=0.9)
        states = same_states(reference.state_dict(), ours.state_dict())
        return same(expected, model), states


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("wrapped", [True, False], ids=["FSDP2", "DDP"])
def test_20_steps_have_the_bits_of_torchs_adamw(rank_pool: Pool, nvme_path: Path, wrapped: bool, device: str) -> None:
    assert rank_pool(2).run(against_torch, wrapped, device, str(nvme_path)) == [(True, True)] * 2


def through_a_checkpoint(saves: str, loads: str, nvme_path: str, folder: str, flat: bool) -> bool:
    """Train, save, load into other objects of another kind, train on: the bits of a run without a break."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def opened(kind: str, model: nn.Module) -> Any:
        if kind == "torch":
            return torch.optim.AdamW(model.parameters(), **OPTIONS)
        offload = offloaded(kind, Path(nvme_path))
        return zero.OffloadOptimizer(model.parameters(), torch.optim.AdamW, offload=offload, **OPTIONS)

    def held(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        states = get_optimizer_state_dict(model, optimizer, options=options)
        return {"model": get_model_state_dict(model), "optimizer": states}

    whole, first, second = sharded(), sharded(), sharded()
    reference = torch.optim.AdamW(whole.parameters(), **OPTIONS)
    before, after = opened(saves, first), opened(loads, second)
    train(whole, reference, range(5))
    train(first, before, range(5))
    dcp.save(held(first, before), checkpoint_id=folder)
    found = held(second, after)
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(second, found["model"])
    set_optimizer_state_dict(second, after, found["optimizer"], options=options)
    train(whole, reference, range(5, 9))
    train(second, after, range(5, 9))
    equal = same(whole, second)
    for optimizer in (before, after):
        if isinstance(optimizer, zero.OffloadOptimizer):
            optimizer.close()
    return equal


def masters_through_states() -> bool:
    """A bf16 model's states are loaded into another; the masters of both are equal."""
    first, second = sharded().bfloat16(), sharded().bfloat16()
    with ExitStack() as opened:
        before, after = (
            opened.enter_context(zero.OffloadOptimizer(model.parameters(), offload={"device": "cpu"}))
            for model in (first, second)
        )
        first(torch.ones(2, 11, dtype=torch.bfloat16)).float().square().mean().backward()
        before.step()
        second.load_state_dict(first.state_dict())
        after.load_state_dict(before.state_dict())
        masters = ([states["master"].to_local() for states in one.state.values()] for one in (before, after))
        return all(torch.equal(mine, loaded) for mine, loaded in zip(*masters, strict=True))


def test_the_master_of_a_parameter_of_one_element_loads_where_a_rank_has_nothing_of_it(rank_pool: Pool) -> None:
    assert rank_pool(2).run(masters_through_states) == [True, True]


@pytest.mark.parametrize(
    ("saves", "loads", "flat"),
    [("nvme", "cpu", False), ("torch", "nvme", True), ("nvme", "torch", False), ("cpu", "nvme", True)],
)
def test_dcp_carries_states_between_tiers_and_to_and_from_torch(
    rank_pool: Pool, nvme_path: Path, tmp_path: Path, saves: str, loads: str, flat: bool
) -> None:
    answers = rank_pool(2).run(through_a_checkpoint, saves, loads, str(nvme_path), str(tmp_path / "saved"), flat)
    assert answers == [True, True]


def states_are_local(nvme_path: str) -> tuple[int, int, list[Tensor]]:
    """(elements planned here, elements of the shards here, the states of the first weight)."""
    model = sharded()
    with zero.OffloadOptimizer(model.parameters(), offload=offloaded("nvme", Path(nvme_path)), lr=1e-2) as ours:
        train(model, ours, range(2))
        planned = sum(group.end - group.begin for group in ours.plans[0].sub_groups)
        here = sum(local(p.detach()).numel() for p in model.parameters())
        weight = next(iter(model.parameters()))
        return planned, here, [ours.state[weight]["exp_avg"].full_tensor()]


def test_each_rank_keeps_the_states_of_its_shards_alone(rank_pool: Pool, nvme_path: Path) -> None:
    whole = sum(p.numel() for p in plain().parameters())
    answers = rank_pool(2).run(states_are_local, str(nvme_path))
    assert sum(here for _, here, _ in answers) == whole
    for planned, here, _ in answers:
        assert here <= planned < here + 8192
    assert answers[0][2][0].shape == (133, 11) and torch.equal(answers[0][2][0], answers[1][2][0])


def refuses_shards_of_matrices(nvme_path: str) -> str:
    shards = [p for p in sharded().parameters() if p.dim() == 2]
    try:
        zero.OffloadOptimizer(shards, torch.optim.Muon, offload=offloaded("cpu", Path(nvme_path)))
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_a_class_that_looks_at_whole_parameters_gets_no_shards(rank_pool: Pool, nvme_path: Path) -> None:
    for said in rank_pool(2).run(refuses_shards_of_matrices, str(nvme_path)):
        assert "Muon updates whole parameters: expected (133, 11), contiguous, in this process" in said


def refuses_whole_states(nvme_path: str) -> str:
    model = sharded()
    with zero.OffloadOptimizer(model.parameters(), offload=offloaded("cpu", Path(nvme_path))) as ours:
        state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(133, 11), "exp_avg_sq": torch.zeros(133, 11)}
        try:
            ours.load_state_dict({**ours.state_dict(), "state": {0: state}})
        except ConfigError as error:
            return str(error)
    return "no error"


def test_whole_states_are_refused_by_a_sharded_parameter(rank_pool: Pool, nvme_path: Path) -> None:
    for told in rank_pool(2).run(refuses_whole_states, str(nvme_path)):
        assert "set_optimizer_state_dict" in told


def after_a_fault(nvme_path: str, change: str) -> str:
    """Rank 0's disk fails in a step; then its gradients are as they were, or `change` happens to them."""
    expected, model = sharded(), sharded()
    reference = torch.optim.AdamW(expected.parameters(), **OPTIONS)
    with zero.OffloadOptimizer(model.parameters(), offload=offloaded("nvme", Path(nvme_path)), **OPTIONS) as ours:
        train(expected, reference, range(2))
        train(model, ours, range(2))
        for net in (expected, model):
            net(torch.ones(2, 11)).square().mean().backward()
        reference.step()
        (storage,) = storages_behind(ours)
        storage.disk.aio.inject(failing("read") if torch.distributed.get_rank() == 0 else None)
        told = "taken"
        try:
            ours.step()
        except StorageError:
            told = "failed"
        storage.disk.aio.inject(None)
        if change == "zeroed":
            ours.zero_grad(set_to_none=False)
        elif change == "added to":
            model(torch.ones(2, 11)).square().mean().backward()
        if told == "failed":
            try:
                ours.step()
            except StateError as error:
                return str(error)
        return "same" if same(expected, model) else "different"


@pytest.mark.parametrize("change", ["none", "zeroed", "added to"])
def test_a_step_that_failed_on_one_rank_is_finished_there_unless_its_gradients_have_changed(
    rank_pool: Pool, nvme_path: Path, change: str
) -> None:
    first, second = rank_pool(2).run(after_a_fault, str(nvme_path), change)
    assert second == "same"
    assert first == "same" if change == "none" else "its gradients no longer exist" in first
