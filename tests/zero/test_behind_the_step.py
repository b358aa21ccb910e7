"""Updates run behind the step, in the order of the next forward; nobody can tell but by the bytes and the time."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import micro_batch, reference_of, reference_run, train, unequal
from models import ADAMW, GPT, build, make_config, seeded, tokens, trainability
from probe import (
    coordinator_of,
    disk_of,
    gradients_of,
    keeper_of,
    layout_of,
    mover_of,
    pipeline_of,
    put_disk,
    read_nothing_ahead,
    storage_of,
    stranded_in,
    updates_of,
    used_bytes,
)
from recovery import HELD, LOOKS, NVME, Open, held_until_awaited, least_host_bytes, once_more, spilling
from reference import differences, snapshot
from torch import Tensor

import zero
from offload.errors import StorageError


class Spy:
    """Which sub-groups were updated, in order, and with which step's arguments."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.begun: list[tuple[int, Any]] = []
        """(number of the step, sub-group)"""
        self.steps: list[Any] = []
        pipeline = pipeline_of(engine)
        self._update, pipeline.begin_update = pipeline.begin_update, self

    def __call__(self, group: Any, arguments: Any, *more: Any) -> Any:
        if not any(known is arguments for known in self.steps):
            self.steps.append(arguments)
        number = next(i for i, known in enumerate(self.steps) if known is arguments)
        self.begun.append((number, group))
        return self._update(group, arguments, *more)

    def units(self, number: int) -> list[int]:
        """Units in the order in which a step's updates reached them first."""
        layout = layout_of(self._engine)
        found: dict[int, None] = {}
        for step, group in self.begun:
            if step == number:
                found.update(dict.fromkeys(u.index for u in layout.spaces[group.space].units_between(*span(group))))
        return list(found)


def span(group: Any) -> tuple[int, int]:
    return group.begin, group.end


# ---- bytes ----------------------------------------------------------------------------------------------------------

MIDDLE = {"width": 256, "blocks": 4, "vocab": 512}
"""3.4 million parameters; padding to 4096 elements is 0.25 % of them."""

TRAFFIC: dict[str, tuple[tuple[str, str], bool, bool, int, int, int]] = {
    # placement, bf16, gradients spilled: bytes per parameter of state and weights read and written by an update, of
    # weights read by backward, of gradients written and read
    "all on nvme": (NVME, True, False, 24, 2, 0),
    "weights in memory": (("cpu", "nvme"), True, False, 20, 0, 0),
    "states in memory": (("nvme", "cpu"), True, False, 4, 2, 0),
    "fp32": (NVME, False, False, 24, 4, 0),
    "gradients spilled": (NVME, True, True, 24, 2, 4),
}


@pytest.mark.parametrize("sub_group_numel", [65_536, 10**9])
@pytest.mark.parametrize("placement", TRAFFIC)
def test_a_step_moves_26_bytes_a_parameter_and_not_one_more(
    open_engine: Open, nvme_path: Path, placement: str, sub_group_numel: int
) -> None:
    """The update's read delivers the forward's weights: they are never read for the forward alone."""
    pair, bf16, spilled, update, backward, gradients = TRAFFIC[placement]
    keys = {
        "stage3_max_live_parameters": 3_400_000,
        "stage3_prefetch_bucket_size": 800_000,
        "sub_group_size": sub_group_numel,
    }
    config = make_config(pair, nvme_path, bf16=bf16, zero=keys)
    if spilled:
        config["memory_budget"] = {"host": least_host_bytes(config, "gpt", **MIDDLE)}
    model = build("gpt", **MIDDLE)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = open_engine(model, config)
    shots = []
    for index in range(4):
        engine.backward(engine(tokens(index, vocab=512)))
        engine.synchronize()
        shots.append(engine.statistics())
        engine.step()
    numel, root, head = sum(unit.numel for unit in engine.units), engine.units[0].numel, engine.units[-1].numel
    moved = [shot.nvme_read_bytes + shot.nvme_write_bytes for shot in shots]
    # Backward begins with the root, whose use encloses all others, and the unit that forward has used last: both are
    # still there.
    expected = (update + gradients) * numel + backward * (numel - root - head)
    assert [after - before for before, after in pairwise(moved)] == [expected] * 3
    assert expected == pytest.approx((update + gradients + backward) * parameters, rel=0.025)
    if placement == "all on nvme":
        assert expected == pytest.approx(26 * parameters, rel=0.01)
    written = shots[-1].nvme_write_bytes - shots[-2].nvme_write_bytes
    assert written == (update + gradients) // 2 * numel


# ---- step() returns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [NVME, ("cpu", "nvme"), ("nvme", "cpu")], ids="-".join)
@pytest.mark.parametrize("look", LOOKS)
def test_step_waits_for_no_transfer_and_whoever_looks_does(
    open_engine: Open, nvme_path: Path, look: str, pair: tuple[str, str]
) -> None:
    engine = open_engine(build("gpt"), make_config(pair, nvme_path, zero={"sub_group_size": 8192}))
    reference = reference_run(0, 1)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    before = engine.statistics()
    engine.inject(HELD)
    engine.step()  # would not return if it waited for a transfer
    assert engine.statistics().nvme_write_bytes == before.nvme_write_bytes
    assert not updates_of(engine).is_idle
    assert not any(updates_of(engine).is_current(unit.index) for unit in engine.units)
    with held_until_awaited(engine):
        LOOKS[look](engine)
    assert any(updates_of(engine).is_current(unit.index) for unit in engine.units)
    if look in ("synchronize", "named_full_parameters"):
        assert updates_of(engine).is_idle
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("pair", [("none", "none"), ("cpu", "cpu"), ("none", "cpu"), ("cpu", "none")], ids="-".join)
def test_updates_that_need_no_disk_are_over_when_step_returns(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    engine = open_engine(build("gpt"), make_config(pair, nvme_path))
    for index in range(2):
        micro_batch(engine, index)
        assert updates_of(engine).is_idle


def test_asking_what_is_due_never_trips_over_the_mover(open_engine: Open, nvme_path: Path) -> None:
    """The training thread asks while updates begin and end on the mover's."""
    keys = {"sub_group_size": 4096, "offload_optimizer": {"buffer_count": 16}}
    engine = open_engine(build("gpt", blocks=12), make_config(NVME, nvme_path, zero=keys))
    updates, before = updates_of(engine), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for index in range(10):
            micro_batch(engine, index)
            transfer = mover_of(engine).submit("finishing", updates.finish_groups(updates.groups_of(None)))
            while not transfer.done():
                groups = updates.groups_of(None)
                assert len(groups) <= len(engine.plan.sub_groups)
                assert [updates.is_written_from(unit.index) for unit in engine.units]
            assert updates.groups_of(None) == []
    finally:
        sys.setswitchinterval(before)


# ---- order ----------------------------------------------------------------------------------------------------------


class Backwards(GPT):
    """The last block runs first."""

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in reversed(self.blocks):
            x = block(x)
        return self.norm(x)


@pytest.mark.parametrize("sub_group_numel", [4096, 10**9])
@pytest.mark.parametrize("prefetch_numel", [0, 60_000])
def test_updates_come_in_the_order_of_the_next_forward(
    open_engine: Open, nvme_path: Path, prefetch_numel: int, sub_group_numel: int
) -> None:
    with seeded(0):
        model = Backwards(blocks=4)
    keys = {"sub_group_size": sub_group_numel, "stage3_prefetch_bucket_size": prefetch_numel}
    engine = open_engine(model, make_config(NVME, nvme_path, zero=keys))
    spy = Spy(engine)
    used: list[int] = []
    coordinator = coordinator_of(engine)
    begin = coordinator.begin_forward_use

    def seen(index: int, **more: Any) -> None:
        if index not in used:
            used.append(index)
        begin(index, **more)

    coordinator.begin_forward_use = seen
    train(engine, 0, 1, 2)
    engine(tokens(3))
    assert used != sorted(used), "the order of use is to differ from the order of the layout"
    for number in range(3):
        assert spy.units(number) == used


def test_gathering_one_parameter_updates_its_unit_and_no_other(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero={"stage3_prefetch_bucket_size": 0}))
    train(engine, 0)
    engine.synchronize()
    read_nothing_ahead(engine)
    gathered = zero.GatheredParameters([engine.module.head.weight])
    for name, look in {
        "blocks.1.up.weight": lambda name: engine.full_parameter(name),
        "blocks.2.up.bias": lambda name: engine.full_state(name),
        "blocks.0.up.bias": lambda name: engine.full_master(name),
        "head.weight": lambda name: gathered.__enter__(),
    }.items():
        engine.backward(engine(tokens(1)))
        engine.synchronize()
        spy = Spy(engine)
        engine.step()
        look(name)
        (unit,) = keeper_of(engine).units_of(name)
        assert spy.units(0) == [unit]
        assert [u.index for u in engine.units if updates_of(engine).is_current(u.index)] == [unit]
        if name != "head.weight":
            engine.synchronize()
            assert sorted(spy.units(0)) == [u.index for u in engine.units]
    gathered.__exit__(None, None, None)


# ---- what a forward does not use ------------------------------------------------------------------------------------


def _evaluate(engine: Any, reference: Any) -> None:
    for trainer in (engine, reference):
        trainer.eval()
        with torch.no_grad():
            trainer(tokens(50), 2)
        trainer.train()


def _generate(engine: Any, reference: Any) -> None:
    with torch.no_grad():
        for length in range(1, 4):
            assert torch.equal(engine(tokens(51, length=length), 1), reference(tokens(51, length=length), 1))


def _edit(engine: Any, reference: Any) -> None:
    edited = torch.full_like(reference.full_parameter("blocks.2.up.bias"), 0.125)
    with zero.GatheredParameters([engine.module.blocks[2].up.bias]), torch.no_grad():
        engine.module.blocks[2].up.bias.copy_(edited)
    reference.edit("blocks.2.up.bias", edited)


def _zero_grad(engine: Any, reference: Any) -> None:
    engine.backward(engine(tokens(52), 2))
    engine.zero_grad()


BETWEEN: dict[str, Callable[[Any, Any], None]] = {
    "nothing": lambda engine, reference: None,
    "evaluation": _evaluate,
    "generation": _generate,
    "zero_grad": lambda engine, reference: engine.zero_grad(),
    "a backward forgotten": _zero_grad,
    "an edit": _edit,
    "a look": lambda engine, reference: engine.full_state("blocks.1.up.weight"),
}
DEPTHS = (None, 1, 2, None, 1, 1, None)


@pytest.mark.parametrize("sub_group_numel", [4096, 10**9])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_forward_does_not_use_is_updated_once_and_before_the_next_step(
    open_engine: Open, nvme_path: Path, between: str, sub_group_numel: int
) -> None:
    engine = open_engine(build("early_exit"), make_config(NVME, nvme_path, zero={"sub_group_size": sub_group_numel}))
    reference = reference_of("early_exit")
    spy = Spy(engine)
    left = 0
    for index, depth in enumerate(DEPTHS):
        for trainer in (engine, reference):
            trainer.backward(trainer(tokens(index), depth))
        left += not updates_of(engine).is_idle
        engine.step()
        assert {step for step, group in spy.begun if step < index} == set(range(index)), "a step has left something"
        reference.step()
        BETWEEN[between](engine, reference)
    assert left or between not in ("nothing", "zero_grad"), "some forward is to leave something due"
    assert unequal(engine, reference, "early_exit") == []
    assert set(Counter(spy.begun).values()) == {1}
    sizes = Counter(step for step, _ in spy.begun)
    full = len(engine.plan.sub_groups)
    assert [sizes[index] == full for index in range(len(DEPTHS))] == [depth is None for depth in DEPTHS]


@pytest.mark.parametrize("model", ["branching", "mixed", "tied", "lora"])
def test_units_that_take_turns_are_never_behind(open_engine: Open, nvme_path: Path, model: str) -> None:
    engine = open_engine(build(model), make_config(NVME, nvme_path, accumulation=2))
    reference = reference_of(model, accumulation=2)
    inputs = [(tokens(i), (i // 3) % 2) if model == "branching" else (tokens(i),) for i in range(12)]
    for given in inputs:
        for trainer in (engine, reference):
            trainer.backward(trainer(*given))
            trainer.step()
    assert unequal(engine, reference, model) == []


# ---- what is fixed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", ["synchronize", "forward", "full_state"])
def test_hyper_parameters_changed_after_a_step_are_those_of_the_next(
    open_engine: Open, nvme_path: Path, look: str
) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero={"sub_group_size": 8192}))
    reference = reference_run(0, 1, 2)
    for index in range(3):
        micro_batch(engine, index)
        for group in engine.optimizer.param_groups:
            group.update(lr=123.0, betas=(0.5, 0.5), weight_decay=7.0, eps=1.0)
        LOOKS[look](engine)
        for group in engine.optimizer.param_groups:
            group.update(lr=ADAMW["lr"], betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    assert unequal(engine, reference) == []


# ---- results that are stored while the model uses them --------------------------------------------------------------


class LateDisk:
    """The disk of one plane; writes take a moment while `late`, and fail then while `failing`."""

    def __init__(self, plane: Any) -> None:
        self._disk, self.late, self.failing, self.failed = disk_of(plane), False, False, 0
        put_disk(plane, self)

    async def read(self, offset: int, buffer: Tensor, what: str = "") -> None:
        await self._disk.read(offset, buffer, what)

    async def write(self, offset: int, buffer: Tensor, what: str = "") -> None:
        if self.late:
            await asyncio.sleep(0.1)
        if self.failing:
            self.failed += 1
            raise StorageError("write", errno=5, path="weights", offset=offset, free_bytes=None)
        await self._disk.write(offset, buffer, what)


def test_weights_that_cannot_be_stored_while_forward_uses_them_are_kept(open_engine: Open, nvme_path: Path) -> None:
    """The update writes from the memory that the unit is bound to; what it keeps must be the weights."""
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = reference_run(0, 1)
    disk = LateDisk(storage_of(engine).weights[0])
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    disk.late = disk.failing = True
    engine.step()
    # The first block is in use until the write of its weights has failed.
    handle = engine.module.blocks[0].up.register_forward_pre_hook(lambda module, args: time.sleep(0.4))
    with pytest.raises(StorageError, match="update of step 2: "):
        engine(tokens(2))
        engine.synchronize()
    handle.remove()
    assert disk.failed
    disk.late = disk.failing = False
    once_more(engine.synchronize)
    assert unequal(engine, reference) == []


class Annealing(GPT):
    """Every forward halves a bias in place."""

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            with torch.no_grad():
                block.norm_in.bias.mul_(0.5)
            x = block(x)
        return self.norm(x)


def test_what_forward_modifies_while_its_update_is_being_stored_is_kept(open_engine: Open, nvme_path: Path) -> None:
    def opened() -> Any:
        with seeded(0):
            return open_engine(Annealing(), make_config(NVME, nvme_path))

    calm, hasty = opened(), opened()
    disk = LateDisk(storage_of(hasty).weights[0])
    for index in range(4):
        calm.synchronize()  # nothing is stored beside the forward
        train(calm, index)
        disk.late = True
        loss = hasty(tokens(index))
        disk.late = False
        hasty.backward(loss)
        hasty.step()
    names = trainability(build("gpt"))
    held = snapshot(hasty, names)
    assert differences(held, snapshot(calm, names)) == []
    calm(tokens(9))
    halved = calm.full_parameter("blocks.1.norm_in.bias")
    assert torch.equal(halved, held["blocks.1.norm_in.bias/weight"] * 0.5)


def test_what_forward_modifies_outlasts_a_disk_that_fails(open_engine: Open, nvme_path: Path) -> None:
    with seeded(0):
        engine = open_engine(Annealing(), make_config(NVME, nvme_path))
    name = "blocks.0.norm_in.bias"
    train(engine, 0, 1)
    engine.synchronize()
    disk = LateDisk(storage_of(engine).weights[0])
    for _ in range(5):  # the pool holds fewer units than this: none of them may get lost
        before = engine.full_parameter(name)
        disk.failing = True
        with pytest.raises(StorageError), torch.no_grad():  # with gradients, backward's first units are not let go
            engine(tokens(2))
            engine.synchronize()
        disk.failing = False
        assert torch.equal(engine.full_parameter(name), before * 0.5)
    before = engine.full_parameter(name)
    with torch.no_grad():
        engine(tokens(2))
    engine.synchronize()
    assert not any(stranded_in(plane) for plane in storage_of(engine).weights)
    coordinator_of(engine).evict_all()
    assert used_bytes(engine, "unit_pool") == 0
    assert torch.equal(engine.full_parameter(name), before * 0.5)


# ---- gradients of the next step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spilled", [False, True])
def test_a_gradient_of_the_next_step_waits_until_the_last_one_was_used(
    open_engine: Open, nvme_path: Path, spilled: bool
) -> None:
    """Without a forward nothing has fetched the unit: its sealed gradient is still needed where the new one goes."""
    engine = spilling(open_engine, nvme_path) if spilled else open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = reference_run(0, 1)
    read_nothing_ahead(engine)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    engine.step()
    for unit in engine.units:
        assert not updates_of(engine).is_current(unit.index)
        engine.inject(HELD)
        with held_until_awaited(engine):
            for position, slot in enumerate(unit.slots):
                gradients_of(engine).add_gradient(
                    unit.index, position, torch.full(slot.shape, 1e9, dtype=torch.bfloat16)
                )
        assert updates_of(engine).is_current(unit.index)
        gradients_of(engine).flush(unit.index)
    engine.zero_grad()
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("persistence_numel", [64, 10_000])
def test_units_that_are_always_bound_are_updated_before_they_are_seen(
    open_engine: Open, nvme_path: Path, persistence_numel: int
) -> None:
    keys = {"stage3_param_persistence_threshold": persistence_numel}
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero=keys))
    always = [unit for unit in engine.units if unit.persistent]
    assert always
    reference = reference_of()
    train(reference, 0)
    engine.backward(engine(tokens(0)))
    engine.synchronize()
    engine.inject(HELD)
    engine.step()
    assert not any(updates_of(engine).is_current(unit.index) for unit in always)
    with torch.no_grad(), held_until_awaited(engine):
        assert torch.equal(engine(tokens(1)), reference(tokens(1)))
    assert all(updates_of(engine).is_current(unit.index) for unit in always)
    assert unequal(train(engine, 1, 2), train(reference, 1, 2)) == []
