"""After a fault or an interrupt the run is the run without it: nothing lost, nothing done twice, nothing left behind.

Every test trains on after the harm and compares with an undisturbed run bit for bit.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ADAMW, VOCAB, Stumbling, build, make_config, seeded, tokens, trainability
from reference import Hyper, Reference, differences, layout_of, snapshot
from torch import Tensor, nn

import offload.binding
import offload.mover
import zero
from offload.aio import AioFault, NativeAio
from offload.errors import BudgetError, StateError, StorageError, WatchdogError
from zero.config import load_config
from zero.machine import Machine
from zero.params.layout import Layout, UnitContent, build_layout
from zero.params.released import ReleasedParameter, is_kept
from zero.plan import NVME as ON_NVME
from zero.plan import Plan
from zero.planner import Planner

Open = Callable[..., Any]
NVME = ("nvme", "nvme")
HYPER = Hyper(ADAMW["lr"], (0.9, 0.95), 1e-8, 0.1)  # type: ignore[arg-type]


def failing(operation: Any, **more: Any) -> AioFault:
    return AioFault(fail_rate=1.0, ops=(operation,), **more)


def micro_batch(trainer: Any, index: int) -> None:
    trainer.backward(trainer(tokens(index)))
    trainer.step()


def train(trainer: Any, *indices: int) -> Any:
    for index in indices:
        micro_batch(trainer, index)
    return trainer


def reference_of(engine: Any, model: str = "gpt", **more: Any) -> Reference:
    return Reference(build(model), lambda name: HYPER, layout=layout_of(engine), **more)


def unequal(engine: Any, other: Any, model: str = "gpt") -> list[str]:
    names = trainability(build(model))
    return differences(snapshot(engine, names), snapshot(other, names))


def released(engine: Any) -> bool:
    return all(isinstance(p, ReleasedParameter) for p in engine.module.parameters())


def movers() -> int:
    return sum(thread.name == "zero-mover" for thread in threading.enumerate())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """The collections after each test look at what this module has made, not at all of torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def nothing_left(nvme_path: Path) -> Iterator[None]:
    """No thread, no descriptor and no file more at the end of the test than at its begin."""
    threads, files = movers(), descriptors()
    yield
    for _ in range(50):  # an abandoned engine's thread ends by itself
        if movers() <= threads and descriptors() <= files:
            break
        gc.collect()
        time.sleep(0.02)
    assert movers() <= threads and descriptors() <= files
    assert os.listdir(nvme_path) == []


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
    monkeypatch.setattr(offload.binding, "CAN_SWAP", False)
    keys = {"stage3_param_persistence_threshold": persistence_numel}
    engine = open_engine(build("gpt"), make_config(pair, nvme_path, zero=keys))
    assert any(unit.persistent for unit in engine.units)
    reference = train(reference_of(engine), 0, 1)
    train(engine, 0, 1)
    edited = torch.full_like(reference.full_parameter("norm.bias"), 0.25)
    with zero.GatheredParameters([engine.module.norm.bias]), torch.no_grad():
        engine.module.norm.bias.copy_(edited)
    reference.edit("norm.bias", edited)
    assert unequal(train(engine, 2, 3), train(reference, 2, 3)) == []


# ---- gradients on their way to the disk -----------------------------------------------------------------------------


class FaultyDisk:
    """The disk of one plane; the next transfer of the plane's home number `home` fails, once."""

    def __init__(self, plane: Any, operation: str, home: int) -> None:
        self._disk, self._operation, self.met = plane._disk, operation, False
        self._offset = plane._homes[home].swap_offset

    async def read(self, offset: int, buffer: Tensor) -> None:
        self._fail("read", offset)
        await self._disk.read(offset, buffer)

    async def write(self, offset: int, buffer: Tensor) -> None:
        self._fail("write", offset)
        await self._disk.write(offset, buffer)

    def _fail(self, operation: str, offset: int) -> None:
        if operation == self._operation and offset == self._offset and not self.met:
            self.met = True
            raise StorageError(operation, errno=errno.EIO, path="gradients", offset=offset, free_bytes=None)


def break_gradients(engine: Any, operation: str, home: int) -> FaultyDisk:
    (plane,) = (plane for plane in engine._storage.gradients if plane is not None)
    plane._disk = FaultyDisk(plane, operation, home)
    return plane._disk


LATE, EARLY, WAITED = 0, 5, (3, 4)
"""Units of the tiny GPT in forward order. Gradients arrive in the opposite one, and the pool for them is small: the
storing of the middle ones is waited for within backward, that of the others within step."""


def least_host_bytes(config: dict[str, Any], model: str) -> int:
    with pytest.raises(BudgetError, match="at least") as refusal:
        zero.initialize(model=build(model), config={**config, "memory_budget": {"host": 1}})
    return int(re.findall(r"at least ([\d,]+)", str(refusal.value))[0].replace(",", ""))


def spilling(open_engine: Open, nvme_path: Path, **more: Any) -> Any:
    """An engine whose gradients are on NVMe."""
    config = make_config(NVME, nvme_path, **more)
    config["memory_budget"] = {"host": least_host_bytes(config, "gpt")}
    engine = open_engine(build("gpt"), config)
    assert set(engine.plan.gradient_tiers.values()) == {"nvme"}
    return engine


def once_more(action: Callable[[], Any], attempts: int = 4) -> int:
    """Repeat `action` while it raises StorageError; how many times it did."""
    for failed in range(attempts):
        try:
            action()
        except StorageError:
            continue
        return failed
    raise AssertionError(f"still failing after {attempts} attempts on a disk that is well again")


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("home", [LATE, EARLY, *WAITED])
def test_a_gradient_that_could_not_be_stored_is_never_silently_missing(
    open_engine: Open, nvme_path: Path, operation: str, home: int
) -> None:
    """Where the fault surfaces decides what is due: a step that raised is called again; after a backward that raised
    the gradients of the step are forgotten and computed anew."""
    engine = spilling(open_engine, nvme_path, accumulation=2)
    reference = train(reference_of(engine, accumulation=2), *range(6))
    train(engine, 0, 1)
    disk = break_gradients(engine, operation, home)
    raised, index = 0, 2
    while index < 6:
        try:
            engine.backward(engine(tokens(index)))
        except StorageError:
            raised += 1
            engine.zero_grad()
            if index % 2:
                engine.backward(engine(tokens(index - 1)))
            continue
        raised += once_more(engine.step)
        index += 1
    assert disk.met, "the fault was never met"
    assert raised == 1, "the fault was swallowed"
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("home", [LATE, EARLY])
@pytest.mark.parametrize("retry", ["step", "forward", "full_parameter"])
def test_a_step_whose_gradients_are_not_stored_yet_is_a_step_all_the_same(
    open_engine: Open, nvme_path: Path, home: int, retry: str
) -> None:
    engine = spilling(open_engine, nvme_path)
    reference = train(reference_of(engine), *range(4))
    train(engine, 0)
    loss = engine(tokens(1))
    break_gradients(engine, "write", home)
    engine.backward(loss)
    with pytest.raises(StorageError):
        engine.step()
    if retry == "step":
        engine.step()
    elif retry == "full_parameter":
        engine.full_parameter("norm.bias")
    train(engine, 2, 3)
    assert unequal(engine, reference) == []
    assert (engine.global_steps, engine.micro_steps) == (4, 4)


@pytest.mark.parametrize("home", WAITED)
def test_a_step_after_a_backward_that_lost_a_gradient_does_not_pretend(
    open_engine: Open, nvme_path: Path, home: int
) -> None:
    """Autograd stops where a hook raises: what was not reached is missing, and nobody but the engine knows."""
    engine = spilling(open_engine, nvme_path)
    reference = train(reference_of(engine), 0, 1)
    train(engine, 0)
    loss = engine(tokens(1))
    break_gradients(engine, "write", home)
    with pytest.raises(StorageError):
        engine.backward(loss)
    with pytest.raises((StorageError, StateError)):
        engine.step()
    engine.zero_grad()
    assert unequal(train(engine, 1), reference) == []


# ---- GatheredParameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [0, 5])
def test_gathering_that_fails_opens_nothing(open_engine: Open, nvme_path: Path, skip: int) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = train(reference_of(engine), 0, 1, 2)
    train(engine, 0, 1)
    engine.inject(failing("read", skip=skip))
    with pytest.raises(StorageError), zero.GatheredParameters(engine.module.parameters()):
        raise AssertionError("the context was entered")
    engine.inject(None)
    assert released(engine)
    assert engine._storage.arena.used_bytes == 0
    assert unequal(train(engine, 2), reference) == []


def test_gathering_inside_gathering_that_fails_leaves_the_outer_one_open(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = train(reference_of(engine), 0)
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
    reference = train(reference_of(engine), 0, 1)
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
    reference = train(reference_of(engine), 0, 1, 2)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    step = engine.step if call == "engine.step" else engine.optimizer.step
    with zero.GatheredParameters([engine.module.norm.weight]), pytest.raises(StateError, match="GatheredParameters"):
        step()
    assert (engine.global_steps, engine.micro_steps) == (1, 1)
    engine.step()
    assert unequal(train(engine, 2), reference) == []


# ---- a step that failed ---------------------------------------------------------------------------------------------


def scheduled(model: Any, pair: tuple[str, str], nvme_path: Path, **more: Any) -> dict[str, Any]:
    """What `initialize` takes, with a learning rate that halves every step: a step done twice would show."""
    return {
        "model": model,
        "config": make_config(pair, nvme_path, **more),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done),
    }


def scheduled_reference(engine: Any, accumulation: int) -> Reference:
    done = 0

    def stepped() -> None:
        nonlocal done
        done += 1

    def hyper_of(name: str) -> Hyper:
        return replace(HYPER, lr=HYPER.lr * 0.5**done)

    return Reference(build("gpt"), hyper_of, accumulation=accumulation, layout=layout_of(engine), on_step=stepped)


RETRIES: dict[str, Callable[[Any], Any]] = {
    "engine.step": lambda engine: engine.step(),
    "optimizer.step": lambda engine: engine.optimizer.step(),
    "forward": lambda engine: None,  # the training that follows begins with one
    "zero_grad": lambda engine: engine.zero_grad(),
    "full_state": lambda engine: engine.full_state("head.weight"),
    "eval": lambda engine: torch.no_grad()(engine)(tokens(9)),
    "gathering": lambda engine: zero.GatheredParameters([engine.module.norm.bias]).__enter__(),
}


@pytest.mark.parametrize("operation,accumulation", [("read", 2), ("write", 1)])
@pytest.mark.parametrize("retry", [name for name in RETRIES if name != "gathering"])
def test_a_failed_step_is_finished_once_by_whatever_comes_next(
    open_engine: Open, nvme_path: Path, operation: str, retry: str, accumulation: int
) -> None:
    more = {"accumulation": accumulation, "zero": {"sub_group_size": 8192}}
    engine = open_engine(**scheduled(build("gpt"), NVME, nvme_path, **more))
    reference = train(scheduled_reference(engine, accumulation), *range(3 * accumulation))
    train(engine, *range(2 * accumulation - 1))
    engine.backward(engine(tokens(2 * accumulation - 1)))
    engine.inject(failing(operation, skip=3))
    with pytest.raises(StorageError):
        engine.step()
    with pytest.raises(StorageError):
        RETRIES["full_state" if retry == "forward" else retry](engine)  # the disk is still ill
    engine.inject(None)
    RETRIES[retry](engine)
    train(engine, *range(2 * accumulation, 3 * accumulation))
    assert (engine.global_steps, engine.micro_steps) == (3, 3 * accumulation)
    assert engine.lr_scheduler.last_epoch == 3
    assert engine.optimizer.param_groups[0]["lr"] == ADAMW["lr"] * 0.5**3  # type: ignore[operator]
    assert engine.get_global_grad_norm() == reference.norms[-1]
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("retry", ["optimizer.step", "engine.step", "forward"])
def test_a_failed_optimizer_step_is_finished_once_too(open_engine: Open, nvme_path: Path, retry: str) -> None:
    engine = open_engine(**scheduled(build("gpt"), NVME, nvme_path, zero={"sub_group_size": 8192}))
    reference = train(scheduled_reference(engine, 1), 0, 1, 2)
    for index in range(3):
        engine.backward(engine(tokens(index)))
        if index != 1:
            engine.optimizer.step()
            continue
        engine.inject(failing("write", skip=2))
        with pytest.raises(StorageError):
            engine.optimizer.step()
        engine.inject(None)
        RETRIES[retry](engine)
    assert engine.global_steps == 3 and engine.lr_scheduler.last_epoch == 3
    assert unequal(engine, reference) == []


def test_what_a_failed_step_does_was_decided_when_it_was_called(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero={"sub_group_size": 8192}, clipping=0.3))
    reference = train(reference_of(engine, clipping=0.3), 0, 1)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.inject(failing("read", skip=2))
    with pytest.raises(StorageError):
        engine.step()
    norm = engine.get_global_grad_norm()
    for group in engine.optimizer.param_groups:
        group["lr"] = 123.0
    with pytest.raises(StorageError):
        engine.zero_grad()
    engine.inject(None)
    engine.zero_grad()
    assert engine.get_global_grad_norm() == norm == reference.norms[-1]
    assert unequal(engine, reference) == []


def test_a_model_taken_back_after_a_failed_step_carries_the_completed_step(open_engine: Open, nvme_path: Path) -> None:
    model = build("gpt")
    engine = open_engine(model, make_config(NVME, nvme_path, zero={"sub_group_size": 8192}))
    reference = train(reference_of(engine), 0, 1)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.inject(failing("write", skip=2))
    with pytest.raises(StorageError):
        engine.step()
    with pytest.raises(StorageError):  # nothing can be taken back from a disk that fails, and nothing is lost
        zero.initialize(model=model, config=make_config(("cpu", "cpu"), nvme_path))
    engine.inject(None)
    second = open_engine(model, make_config(("cpu", "cpu"), nvme_path))
    for name, _ in trainability(build("gpt")):
        assert torch.equal(second.full_master(name), reference.full_master(name)), name
    fresh = build("gpt")
    for name, parameter in fresh.named_parameters():
        parameter.data = reference.full_master(name)
    follower = Reference(fresh, lambda name: HYPER, layout=layout_of(second))
    assert unequal(train(second, 2, 3), train(follower, 2, 3)) == []


@pytest.mark.parametrize("count_max", [0, 1])
def test_writes_that_fail_in_every_sub_group_are_made_up_for(
    open_engine: Open, nvme_path: Path, nothing_left: None, count_max: int
) -> None:
    keys = {"sub_group_size": 4096, "offload_optimizer": {"buffer_count": 2}}
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero=keys))
    reference = train(reference_of(engine), 0, 1, 2)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    for attempt in range(4):
        engine.inject(failing("write", skip=attempt, count_max=count_max))
        with pytest.raises(StorageError):
            engine.step()
    engine.inject(None)
    engine.step()
    assert unequal(train(engine, 2), reference) == []
    engine.backward(engine(tokens(3)))
    engine.inject(failing("write"))
    with pytest.raises(StorageError):
        engine.step()
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
    for attempt in range(6):
        engine.inject(failing("write", skip=attempt))
        with pytest.raises(StorageError):
            engine.step()
    engine.inject(None)
    engine.step()
    assert differences(snapshot(engine, names), snapshot(reference, names)) == []
    engine.close()


# ---- interrupts -----------------------------------------------------------------------------------------------------


@contextmanager
def interrupted_when(ready: Callable[[], bool]) -> Iterator[None]:
    """A KeyboardInterrupt in the main thread, inside, as soon as `ready()`."""

    def interrupt(number: int, frame: Any) -> None:
        if not ready():
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            return
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0.005)  # somebody else's, such as the time limit of a test
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left)


SLOW = AioFault(delay_rate=1.0, delay_seconds=0.1)


def interrupted_in_step(engine: Any) -> None:
    def under_way() -> bool:
        pending = engine._stepper._pending
        return pending is not None and pending.transfer is not None

    engine.inject(SLOW)
    with interrupted_when(under_way):
        engine.step()
    assert not engine._stepper._pending.transfer.settled(), "the delays are to outlast the interrupt"
    engine.inject(None)


@pytest.mark.parametrize("retry", ["engine.step", "optimizer.step", "forward", "zero_grad", "gathering"])
def test_an_interrupted_step_is_waited_for_and_done_once(open_engine: Open, nvme_path: Path, retry: str) -> None:
    engine = open_engine(**scheduled(build("gpt"), NVME, nvme_path, zero={"sub_group_size": 8192}))
    reference = train(scheduled_reference(engine, 1), 0, 1, 2)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    interrupted_in_step(engine)
    RETRIES[retry](engine)
    if retry == "gathering":
        engine._keeper.close([engine.module.norm.bias])
    train(engine, 2)
    assert (engine.global_steps, engine.micro_steps, engine.lr_scheduler.last_epoch) == (3, 3, 3)
    assert unequal(engine, reference) == []


def test_an_engine_closes_after_an_interrupted_step(open_engine: Open, nvme_path: Path, nothing_left: None) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    engine.backward(engine(tokens(0)))
    interrupted_in_step(engine)
    engine.close()


def test_an_interrupted_close_can_be_repeated(open_engine: Open, nvme_path: Path, nothing_left: None) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    engine.backward(engine(tokens(0)))
    interrupted_in_step(engine)
    with interrupted_when(lambda: engine._closed):
        engine.close()
    engine.close()


@pytest.mark.parametrize("where", ["in a fetch", "in user code"])
def test_an_interrupted_forward_leaves_no_trace(open_engine: Open, nvme_path: Path, where: str) -> None:
    model = build("gpt")
    engine = open_engine(model, make_config(NVME, nvme_path))
    reference = train(reference_of(engine), 0, 1, 2)
    train(engine, 0)
    if where == "in a fetch":
        engine.inject(SLOW)
        with interrupted_when(lambda: engine._storage.mover.exposed._depth > 0):
            engine(tokens(7))
        engine.inject(None)
    else:

        def stop(module: nn.Module, args: Any) -> None:
            raise KeyboardInterrupt

        handle = model.blocks[1].up.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            engine(tokens(7))
        handle.remove()
    assert released(engine)
    train(engine, 1, 2)
    assert unequal(engine, reference) == []


@pytest.mark.parametrize("call", ["engine.backward", "loss.backward"])
@pytest.mark.parametrize("block", [0, 2])
def test_a_backward_that_raises_leaves_no_trace_after_zero_grad(
    open_engine: Open, nvme_path: Path, call: str, block: int
) -> None:
    model = build("stumbling")
    engine = open_engine(model, make_config(NVME, nvme_path))
    reference = train(reference_of(engine, "stumbling"), 0, 1, 2)
    train(engine, 0)
    model.fail_back_at = block
    loss = engine(tokens(1))
    model.fail_back_at = None
    with pytest.raises(Stumbling.Stumble):
        engine.backward(loss) if call == "engine.backward" else loss.backward()
    engine.zero_grad()
    train(engine, 1, 2)
    assert released(engine)
    assert unequal(engine, reference, "stumbling") == []


# ---- initialisation that fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_name,skip", [("gpt", 0), ("gpt", 17), ("mixed", 5)])
def test_an_initialisation_that_fails_gives_the_model_back(
    open_engine: Open,
    nvme_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nothing_left: None,
    skip: int,
    model_name: str,
) -> None:
    monkeypatch.setenv("ZERO_AIO_BACKEND", "threads")
    construct = NativeAio.__init__

    def faulty(self: Any, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        self.inject(failing("write", skip=skip))

    model, twin = build(model_name), build(model_name)
    objects = dict(model.named_parameters())
    config = make_config(NVME, nvme_path, zero={"sub_group_size": 4096})
    with monkeypatch.context() as patch:
        patch.setattr(NativeAio, "__init__", faulty)
        with pytest.raises(StorageError):
            zero.initialize(model=model, config=config)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours is objects[name] and type(ours) is nn.Parameter and not is_kept(ours)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
        assert not ours._post_accumulate_grad_hooks
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert type(module._parameters) is dict
    loss, expected = model(tokens(0)), twin(tokens(0))
    assert torch.equal(loss, expected)
    loss.backward()
    assert model.head.weight.grad is not None
    model.zero_grad()
    engine = open_engine(model, config)
    reference = train(reference_of(engine, model_name), 0, 1)
    assert unequal(train(engine, 0, 1), reference, model_name) == []
    engine.close()


# ---- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["forward", "backward", "failed step", "gradients in flight"])
def test_close_waits_for_what_is_in_flight_and_leaves_nothing(
    open_engine: Open, nvme_path: Path, nothing_left: None, moment: str
) -> None:
    engine = spilling(open_engine, nvme_path) if "gradients" in moment else None
    engine = engine or open_engine(build("gpt"), make_config(NVME, nvme_path))
    train(engine, 0)  # from now on the order of units is known, and reads are ahead
    engine.inject(replace(SLOW, delay_seconds=0.03))
    loss = engine(tokens(1))
    if moment != "forward":
        engine.backward(loss)
    if moment == "failed step":
        engine.inject(failing("write"))
        with pytest.raises(StorageError):
            engine.step()
    engine.close()


@pytest.mark.parametrize("moment", ["trained", "forward", "failed step", "gathered"])
def test_an_engine_that_is_dropped_leaves_nothing(nvme_path: Path, nothing_left: None, moment: str) -> None:
    model = build("gpt")
    engine = zero.initialize(model=model, config=make_config(NVME, nvme_path))[0]
    train(engine, 0)
    if moment == "forward":
        engine(tokens(1))
    if moment == "failed step":
        engine.backward(engine(tokens(1)))
        engine.inject(failing("write"))
        with pytest.raises(StorageError) as failure:
            engine.step()
        del failure
    if moment == "gathered":
        with zero.GatheredParameters(model.parameters()):
            pass
    del engine, model
    gc.collect()


# ---- the watchdog ---------------------------------------------------------------------------------------------------


def test_the_watchdog_is_patient_while_bytes_move(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transfer takes 0.1 s, all of them together several times what a standstill may last."""
    monkeypatch.setattr(offload.mover, "WARN_SECONDS", 0.8)
    monkeypatch.setattr(offload.mover, "RAISE_SECONDS", 0.9)
    keys = {"sub_group_size": 4096, "offload_optimizer": {"buffer_count": 2}}
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero=keys))
    reference = train(reference_of(engine), 0)
    engine.backward(engine(tokens(0)))
    engine.inject(AioFault(delay_rate=1.0, delay_seconds=0.1))
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step()
    assert time.monotonic() - begin > 0.9, "the step is to take longer than the watchdog waits"
    engine.inject(None)
    assert unequal(engine, reference) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_watchdog_raises_when_nothing_moves_and_the_step_is_still_finished(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = train(reference_of(engine), 0, 1)
    engine.backward(engine(tokens(0)))
    with monkeypatch.context() as patch:
        patch.setattr(offload.mover, "WARN_SECONDS", 0.1)
        patch.setattr(offload.mover, "RAISE_SECONDS", 0.2)
        engine.inject(AioFault(delay_rate=1.0, delay_seconds=1.5, count_max=8))
        with pytest.raises(WatchdogError, match=re.escape(str(nvme_path))):
            engine.step()
    engine.step()
    engine.inject(None)
    assert unequal(train(engine, 1), reference) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_settle_outlasts_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.mover, "WARN_SECONDS", 0.02)
    monkeypatch.setattr(offload.mover, "RAISE_SECONDS", 0.05)
    mover = offload.mover.Mover()
    try:
        good = mover.post("slow", asyncio.sleep(0.4))
        with pytest.raises(WatchdogError):
            good.result()
        assert good.settle() is None
        assert good.settled()
    finally:
        monkeypatch.undo()
        mover.close()


# ---- budgets --------------------------------------------------------------------------------------------------------

MACHINE = Machine(
    available_bytes=1 << 40, available_source="MemAvailable", memlock_bytes=None, device_bytes=1 << 40, rss_bytes=123
)


def units_of(*numels: int, frozen: tuple[int, ...] = ()) -> Layout:
    contents = [
        UnitContent(f"u{i}", ((i, (f"p{i}",), torch.Size((n,))),), torch.bfloat16, i not in frozen, False)
        for i, n in enumerate(numels)
    ]
    return build_layout(contents, 1)


def on_nvme(plan: Plan, layout: Layout) -> dict[str, int]:
    """Bytes that every step has to move to and from NVMe, by kind."""
    weights = sum(u.nbytes * (4 if u.trainable else 2) for u in layout.units if plan.weight_tiers[u.index] == ON_NVME)
    width = 4 if plan.gradient_wide else 2
    gradients = 2 * sum(u.numel * width for u in layout.units if plan.gradient_tiers.get(u.index) == ON_NVME)
    groups = zip(plan.sub_groups, plan.record_tiers, strict=True)
    records = 2 * sum(
        plan.record_format(layout.spaces[g.space]).nbytes(g.end - g.begin) for g, t in groups if t == ON_NVME
    )
    return {"weights": weights, "gradients": gradients, "states": records}


LADDERS: dict[str, tuple[Layout, tuple[str, str], int, dict[str, Any]]] = {
    "plain": (units_of(40_000, 120_000, 90_000, 8_000, frozen=(2,)), NVME, 1, {}),
    "accumulating": (units_of(40_000, 120_000, 90_000, 8_000), NVME, 4, {}),
    "seven buffers": (units_of(300_000, 20_000), NVME, 1, {"offload_optimizer": {"buffer_count": 7}}),
    "small sub-groups": (units_of(300_000, 20_000), NVME, 1, {"sub_group_size": 20_000}),
    "huge sub-groups": (units_of(300_000, 20_000), NVME, 2, {"sub_group_size": 10**9}),
    "weights on the host": (units_of(40_000, 120_000, 90_000), ("cpu", "nvme"), 1, {}),
    "states on the host": (units_of(40_000, 120_000, 90_000), ("nvme", "cpu"), 2, {}),
    "many small": (units_of(*[5_000] * 40), NVME, 1, {}),
}


@pytest.mark.parametrize("name", LADDERS)
def test_a_little_more_host_memory_is_never_refused_and_never_costs_traffic(name: str) -> None:
    layout, pair, accumulation, keys = LADDERS[name]
    base = make_config(
        pair, "/anywhere", accumulation=accumulation, zero={"stage3_max_live_parameters": 10_000_000, **keys}
    )
    step = sum(unit.shard_numel for unit in layout.units) // 16
    accepted = 0
    before: dict[str, int] = {}
    for host in range(4096, 100_000_000, step):
        config = load_config({**base, "memory_budget": {"host": host}})
        try:
            plan = Planner(layout, config, MACHINE, torch.device("cpu"), True, 0).make()
        except BudgetError as refusal:
            assert not accepted, f"{accepted:,} bytes were accepted, {host:,} are refused: {refusal}"
            continue
        now = on_nvme(plan, layout)
        if accepted:
            assert sum(now.values()) <= sum(before.values()), f"{accepted:,}: {before}, {host:,}: {now}"
        accepted, before = host, now
        if not sum(now.values()):
            return
    raise AssertionError(f"with {accepted:,} bytes of host memory there is still something on NVMe: {before}")
