"""After a fault the run is the run without it: nothing lost, nothing done twice.

Every test trains on after the fault and compares with an undisturbed run bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HYPER, reference_run, train, unequal
from models import ADAMW, VOCAB, build, make_config, seeded, tokens, trainability
from pairwise import in_pairs
from probe import bound_units, updates_of, used_bytes
from recovery import (
    LOOKS,
    NVME,
    Open,
    break_gradients,
    early_exit_run,
    failing,
    once_more,
    released,
    scheduled,
    scheduled_reference,
    scheduled_run,
    spilling,
)
from reference import Reference, differences, snapshot
from torch import Tensor, nn

import offload.memory.flat_storage
import zero
from offload.errors import StateError, StorageError

# ---- a torch that cannot swap storages ------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [("none", "none"), ("cpu", "cpu"), NVME], ids="-".join)
@pytest.mark.parametrize("persistence_numel", [64, 10_000])
def test_without_swapping_storages_units_train_to_the_same_bits(
    open_engine: Open,
    nvme_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    persistence_numel: int,
) -> None:
    monkeypatch.setattr(offload.memory.flat_storage, "CAN_SWAP", False)
    keys = {"stage3_param_persistence_threshold": persistence_numel}
    engine = open_engine(build("gpt"), make_config(pair, nvme_path, zero=keys))
    assert any(unit.persistent for unit in engine.units)
    reference = reference_run(0, 1)
    train(engine, 0, 1)
    edited = torch.full_like(reference.full_parameter("norm.bias"), 0.25)
    with zero.GatheredParameters([engine.module.norm.bias]), torch.no_grad():
        engine.module.norm.bias.copy_(edited)
    reference.edit("norm.bias", edited)
    assert unequal(train(engine, 2, 3), train(reference, 2, 3)) == []


@pytest.mark.parametrize("persistence_numel", [0, 64])
def test_without_swapping_storages_the_plan_has_room_for_what_is_copied(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, persistence_numel: int
) -> None:
    monkeypatch.setattr(offload.memory.flat_storage, "CAN_SWAP", False)
    keys = {"stage3_param_persistence_threshold": persistence_numel, "stage3_max_reuse_distance": 10**9}
    engine = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path, zero=keys))
    seen = [0]

    def look(*_: object) -> None:
        seen.append(sum(unit.flat.untyped_storage().nbytes() for unit in bound_units(engine)))

    for module in engine.module.modules():
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    train(engine, 0, 1)
    (planned,) = (row.nbytes for row in engine.plan.rows if row.array == "copies of units in use")
    assert 0 < max(seen) <= planned


# ---- gradients on their way to the disk -----------------------------------------------------------------------------


LATE, WAITED = (0, 1), (3, 4, 5)
"""Units of the tiny GPT in forward order. Gradients arrive in the opposite one, and the pool for them is small: the
storing of the first to arrive is waited for within backward, that of the last within step."""


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("home", [*LATE, *WAITED])
def test_a_gradient_that_could_not_be_stored_is_never_silently_missing(
    open_engine: Open, nvme_path: Path, operation: str, home: int
) -> None:
    """Where the fault surfaces decides what is due: a forward or a step that raised is called again; after a backward
    that raised the gradients of the step are forgotten and computed anew."""
    engine = spilling(open_engine, nvme_path, accumulation=2)
    reference = reference_run(*range(6), accumulation=2)
    train(engine, 0, 1)
    engine.synchronize()
    disk = break_gradients(engine, operation, home)
    raised, index = 0, 2
    while index < 6:
        loss = None

        def forward() -> None:
            nonlocal loss
            loss = engine(tokens(index))  # noqa: B023

        raised += once_more(forward)
        try:
            engine.backward(loss)
        except StorageError:
            raised += 1
            engine.zero_grad()
            if index % 2:
                engine.backward(engine(tokens(index - 1)))
            continue
        raised += once_more(engine.step)
        index += 1
    raised += once_more(engine.synchronize)
    assert disk.met, "the fault was never met"
    assert raised == 1, "the fault was swallowed"
    assert (engine.global_steps, engine.micro_steps) == (3, 6)
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("home", LATE)
@pytest.mark.parametrize("retry", ["step", "forward", "full_parameter", "synchronize"])
def test_a_step_whose_gradients_are_not_stored_yet_is_a_step_all_the_same(
    open_engine: Open, nvme_path: Path, home: int, retry: str
) -> None:
    engine = spilling(open_engine, nvme_path)
    reference = reference_run(*range(4))
    train(engine, 0)
    loss = engine(tokens(1))
    engine.synchronize()
    break_gradients(engine, "write", home)
    engine.backward(loss)
    with pytest.raises(StorageError):
        engine.step()
    if retry == "step":
        engine.step()
    elif retry != "forward":
        LOOKS[retry](engine)
    train(engine, 2, 3)
    assert unequal(engine, reference) == []
    assert (engine.global_steps, engine.micro_steps) == (4, 4)


@pytest.mark.parametrize("home", WAITED)
def test_a_step_after_a_backward_that_lost_a_gradient_does_not_pretend(
    open_engine: Open, nvme_path: Path, home: int
) -> None:
    """Autograd stops where a hook raises: what was not reached is missing, and nobody but the engine knows."""
    engine = spilling(open_engine, nvme_path)
    reference = reference_run(0, 1)
    train(engine, 0)
    loss = engine(tokens(1))
    break_gradients(engine, "write", home)
    with pytest.raises(StorageError):
        engine.backward(loss)
    with pytest.raises((StorageError, StateError)):
        engine.step()
    engine.zero_grad()
    assert unequal(train(engine, 1), reference) == []


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_who_drops_gradients_after_a_lost_one_hears_which_micro_batches_have_to_be_run_again(
    open_engine: Open, nvme_path: Path, micro_batch: int
) -> None:
    engine = spilling(open_engine, nvme_path, accumulation=2)
    reference = reference_run(0, 1, 2, 3, accumulation=2)
    train(engine, 0, 1, *range(2, 2 + micro_batch))
    loss = engine(tokens(2 + micro_batch))
    break_gradients(engine, "write", WAITED[0])
    with pytest.raises(StorageError):
        engine.backward(loss)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        engine.zero_grad()
    said = ["all of them again before step()" in str(warning.message) for warning in heard]
    assert said == [True] * micro_batch
    for index in range(2, 2 + micro_batch):
        engine.backward(engine(tokens(index)))
    assert unequal(train(engine, *range(2 + micro_batch, 4)), reference) == []


# ---- GatheredParameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_is", ["complete", "due"])
@pytest.mark.parametrize("skip", [0, 5])
def test_gathering_that_fails_opens_nothing(open_engine: Open, nvme_path: Path, skip: int, step_is: str) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = reference_run(0, 1, 2)
    train(engine, 0, 1)
    if step_is == "complete":
        engine.synchronize()
    engine.inject(failing("read", skip=skip))
    with pytest.raises(StorageError), zero.GatheredParameters(engine.module.parameters()):
        raise AssertionError("the context was entered")
    engine.inject(None)
    assert released(engine)
    if step_is == "due":
        once_more(lambda: engine(tokens(9)))  # reads ahead that have failed
        engine.synchronize()
    assert used_bytes(engine, "host_pool") == 0
    assert unequal(train(engine, 2), reference) == []


def test_gathering_inside_gathering_that_fails_leaves_the_outer_one_open(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = reference_run(0)
    train(engine, 0)
    weight = engine.module.head.weight
    edited = torch.full_like(reference.full_parameter("head.weight"), 0.5)
    with zero.GatheredParameters([weight]), torch.no_grad():
        weight.copy_(edited)
        engine.inject(failing("read"))
        with pytest.raises(StorageError), zero.GatheredParameters(engine.module.parameters()):
            raise AssertionError("the context was entered")
        engine.inject(None)
        assert torch.equal(weight, edited)
    reference.edit("head.weight", edited)
    assert released(engine)
    assert unequal(train(engine, 1), train(reference, 1)) == []


EDITED = ("blocks.0.up.weight", "blocks.2.down.bias", "head.weight")


@pytest.mark.parametrize("operation,skip", [("write", 0), ("write", 3), ("read", 0), ("read", 1)])
def test_edits_that_cannot_be_stored_are_kept_and_everything_is_released(
    open_engine: Open, nvme_path: Path, operation: str, skip: int
) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero={"sub_group_size": 4096}))
    reference = reference_run(0, 1)
    train(engine, 0, 1)
    parameters = [engine.module.get_parameter(name) for name in EDITED]
    with pytest.raises(StorageError), zero.GatheredParameters(parameters), torch.no_grad():
        for name, parameter in zip(EDITED, parameters, strict=True):
            parameter.mul_(-0.5)
            reference.edit(name, reference.full_parameter(name) * -0.5)
        engine.inject(failing(operation, skip=skip))
    assert released(engine)
    engine.inject(None)
    for name in EDITED:
        assert torch.equal(engine.full_parameter(name), reference.full_parameter(name)), name
    assert unequal(engine, reference) == []
    assert unequal(train(engine, 2, 3), train(reference, 2, 3)) == []


@pytest.mark.parametrize("pair", [("none", "none"), ("cpu", "cpu"), NVME], ids="-".join)
@pytest.mark.parametrize("call", ["engine.step", "optimizer.step"])
def test_a_step_inside_gathered_parameters_is_refused_and_changes_nothing(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str], call: str
) -> None:
    engine = open_engine(build("gpt"), make_config(pair, nvme_path))
    reference = reference_run(0, 1, 2)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    step = engine.step if call == "engine.step" else engine.optimizer.step
    with zero.GatheredParameters([engine.module.norm.weight]), pytest.raises(StateError, match="GatheredParameters"):
        step()
    assert (engine.global_steps, engine.micro_steps) == (1, 1)
    engine.step()
    assert unequal(train(engine, 2), reference) == []


# ---- an update that failed ------------------------------------------------------------------------------------------


@in_pairs(look=tuple(LOOKS), operation=("read", "write"), skip=(0, 3))
def test_an_update_that_fails_is_told_to_whoever_looks_and_is_done_once(
    open_engine: Open, nvme_path: Path, operation: str, look: str, skip: int
) -> None:
    accumulation = 2 if operation == "read" else 1
    more = {"accumulation": accumulation, "zero": {"sub_group_size": 8192}}
    engine = open_engine(**scheduled(build("gpt"), NVME, nvme_path, **more))
    reference = scheduled_run(3, accumulation)
    train(engine, *range(2 * accumulation - 1))
    engine.backward(engine(tokens(2 * accumulation - 1)))
    engine.synchronize()
    engine.inject(failing(operation, skip=skip))
    engine.step()
    with pytest.raises(StorageError, match="update of step 2: "):
        LOOKS[look](engine)
        engine.synchronize()  # a result is stored after it was delivered: the error comes later than the look
    with pytest.raises(StorageError):
        LOOKS[look](engine)  # the disk is still ill
        engine.synchronize()
    assert (engine.global_steps, engine.micro_steps) == (2, 2 * accumulation)
    engine.inject(None)
    once_more(lambda: LOOKS[look](engine))
    once_more(lambda: engine(tokens(9)))  # reads ahead that have failed
    train(engine, *range(2 * accumulation, 3 * accumulation))
    assert (engine.global_steps, engine.micro_steps) == (3, 3 * accumulation)
    assert engine.lr_scheduler.last_epoch == 3
    assert engine.optimizer.param_groups[0]["lr"] == ADAMW["lr"] * 0.5**3  # type: ignore[operator]
    assert engine.get_global_grad_norm() == reference.norms[-1]
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("look", ["forward", "eval", "full_parameter", "full_state", "gathering"])
def test_who_looks_at_a_unit_that_cannot_be_read_is_told_at_once(open_engine: Open, nvme_path: Path, look: str) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    engine.inject(failing("read"))
    engine.step()
    with pytest.raises(StorageError, match="update of step 2: "):
        LOOKS[look](engine)
    engine.inject(None)


RETRIES: dict[str, Callable[[Any], Any]] = {
    "engine.step": lambda engine: engine.step(),
    "optimizer.step": lambda engine: engine.optimizer.step(),
    "nothing": lambda engine: None,  # the training that follows begins with a forward
    "zero_grad": lambda engine: engine.zero_grad(),
    **LOOKS,
}


def with_the_last_step_half_done(engine: Any) -> None:
    """Step 2 can be fixed only once step 1 is complete, and the forward between has left some of it due."""
    train(engine, 0)
    engine.backward(engine(tokens(1), 1))
    assert not updates_of(engine).is_idle


@in_pairs(retry=tuple(RETRIES), operation=("read", "write"), call=("engine.step", "optimizer.step"))
def test_a_step_that_raises_for_the_one_before_is_taken_once_by_whatever_comes_next(
    open_engine: Open, nvme_path: Path, operation: str, retry: str, call: str
) -> None:
    engine = open_engine(**scheduled(build("early_exit"), NVME, nvme_path, zero={"sub_group_size": 8192}))
    with_the_last_step_half_done(engine)
    engine.inject(failing(operation))
    for _ in range(3):
        with pytest.raises(StorageError):
            RETRIES[call](engine)
    assert engine.global_steps == 1
    engine.inject(None)
    once_more(lambda: RETRIES[retry](engine))
    train(engine, 2)
    assert engine.global_steps == engine.lr_scheduler.last_epoch == 3
    assert unequal(engine, early_exit_run(), "early_exit") == []


def test_a_micro_step_that_raises_for_the_step_before_is_counted_once(open_engine: Open, nvme_path: Path) -> None:
    """Nothing but the count is due at a step inside an accumulation."""
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, accumulation=2, zero={"sub_group_size": 8192}))
    reference = reference_run(*range(4), accumulation=2)
    train(engine, 0, 1)
    engine.backward(engine(tokens(2)))
    failure = StorageError("write", errno=5, path="somewhere", offset=0, free_bytes=None)
    updates_of(engine).failure = failure  # a result of step 1 could not be stored, and nobody knows yet
    with pytest.raises(StorageError):
        engine.step()
    engine.step()
    assert engine.micro_steps == 3
    train(engine, 3)
    assert (engine.global_steps, engine.micro_steps) == (2, 4)
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_step_after_one_whose_updates_fail_is_a_step_of_its_own(
    open_engine: Open, nvme_path: Path, operation: str
) -> None:
    """The first one returned, so it was taken; the second one has no gradient, but it counts."""
    engine = open_engine(**scheduled(build("gpt"), NVME, nvme_path, zero={"sub_group_size": 8192}))
    reference = scheduled_reference()
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    engine.inject(failing(operation))
    engine.step()
    for _ in range(2):
        with pytest.raises(StorageError, match="update of step 2: "):
            engine.step()
    engine.inject(None)
    once_more(engine.step)
    train(reference, 0, 1)
    reference.step()
    assert engine.global_steps == engine.lr_scheduler.last_epoch == 3
    once_more(lambda: engine(tokens(9)))
    assert unequal(train(engine, 2), train(reference, 2)) == []


@pytest.mark.parametrize("retry", ["synchronize", "zero_grad", "full_state"])
def test_what_a_failed_update_does_was_decided_when_the_step_was_called(
    open_engine: Open, nvme_path: Path, retry: str
) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero={"sub_group_size": 8192}, clipping=0.3))
    reference = reference_run(0, 1, clipping=0.3)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.inject(failing("read", skip=2))
    engine.step()
    norm = engine.get_global_grad_norm()
    for group in engine.optimizer.param_groups:
        group["lr"] = 123.0
    for _ in range(2):
        with pytest.raises(StorageError):
            engine.synchronize()
    engine.inject(None)
    RETRIES[retry](engine)
    assert engine.get_global_grad_norm() == norm == reference.norms[-1]
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("told", [False, True], ids=["nobody was told", "somebody was told"])
def test_a_model_taken_back_after_failed_updates_carries_the_completed_step(
    open_engine: Open, nvme_path: Path, told: bool
) -> None:
    model = build("gpt")
    engine = open_engine(model, make_config(NVME, nvme_path, zero={"sub_group_size": 8192}))
    reference = reference_run(0, 1)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    engine.inject(failing("write", skip=2))
    engine.step()
    if told:
        with pytest.raises(StorageError):
            engine.synchronize()
    with pytest.raises(StorageError):  # nothing can be taken back from a disk that fails, and nothing is lost
        zero.initialize(model=model, config=make_config(("cpu", "cpu"), nvme_path))
    engine.inject(None)
    second = open_engine(model, make_config(("cpu", "cpu"), nvme_path))
    for name, _ in trainability(build("gpt")):
        assert torch.equal(second.full_master(name), reference.full_master(name)), name
    fresh = build("gpt")
    for name, parameter in fresh.named_parameters():
        parameter.data = reference.full_master(name)
    follower = Reference(fresh, lambda name: HYPER)
    assert unequal(train(second, 2, 3), train(follower, 2, 3)) == []


@pytest.mark.parametrize("count_max", [0, 1])
def test_writes_that_fail_in_every_sub_group_are_made_up_for(
    open_engine: Open, nvme_path: Path, nothing_left: None, count_max: int
) -> None:
    keys = {"sub_group_size": 4096, "offload_optimizer": {"buffer_count": 2}}
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero=keys))
    reference = reference_run(0, 1, 2)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    engine.inject(failing("write", count_max=count_max))
    engine.step()
    for attempt in range(4):
        with pytest.raises(StorageError):
            engine.synchronize()
        engine.inject(failing("write", skip=attempt, count_max=count_max))
    engine.inject(None)
    once_more(engine.synchronize)
    assert unequal(train(engine, 2), reference) == []
    engine.backward(engine(tokens(3)))
    engine.synchronize()
    engine.inject(failing("write"))
    engine.step()
    with pytest.raises(StorageError):
        engine.synchronize()
    engine.close()


class Wide(nn.Module):
    """24 million parameters, of which a step uses all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 1024)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(23))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


@pytest.mark.slow
def test_blocks_kept_by_failed_writes_never_exhaust_the_arena(open_engine: Open, nvme_path: Path) -> None:
    """Slots of full size, as many as are in flight, all of them stranded."""
    with seeded(0):
        model, plain = Wide(), Wide()
        plain.load_state_dict(model.state_dict())
    names = trainability(plain)
    keys = {"stage3_max_live_parameters": 20_000_000, "stage3_prefetch_bucket_size": 2_000_000}
    engine = open_engine(model, make_config(NVME, nvme_path, zero=keys))
    reference = Reference(plain, lambda name: HYPER)
    train(reference, 0, 1)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    engine.inject(failing("write"))
    engine.step()
    for attempt in range(6):
        with pytest.raises(StorageError):
            engine.synchronize()
        engine.inject(failing("write", skip=attempt))
    engine.inject(None)
    once_more(engine.synchronize)
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    engine.close()
