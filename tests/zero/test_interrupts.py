"""After an interrupt the run is the run without it: nothing lost, nothing done twice.

Every test trains on after the interrupt and compares with an undisturbed run bit for bit.
"""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import reference_run, train, unequal
from models import WIDTH, Stumbling, build, make_config, tokens
from pairwise import in_pairs
from probe import (
    CLOSE_STAGES,
    STEP_STAGES,
    at_each_look,
    coordinator_of,
    counted_transfers,
    is_waiting,
    keeper_of,
    step_is_asked,
    storage_of,
    units_in_use,
    updates_of,
    used_bytes,
)
from recovery import (
    HELD,
    NVME,
    Open,
    early_exit_run,
    held_until_awaited,
    interrupted_in_hold,
    interrupted_when,
    interrupted_while_waiting,
    released,
    scheduled,
    scheduled_run,
)
from torch import Tensor, nn

import offload.array.copies
import offload.io.io_loop
import zero
from offload.errors import WatchdogError
from zero.cache.hooks import count_open_calls

# ---- interrupts -----------------------------------------------------------------------------------------------------


WAITS: dict[str, Callable[[Any], Any]] = {
    "synchronize": lambda engine: engine.synchronize(),
    "forward": lambda engine: engine(tokens(8)),
    "full_state": lambda engine: engine.full_state("head.weight"),
    "named_full_parameters": lambda engine: list(engine.named_full_parameters()),
    "gathering": lambda engine: zero.GatheredParameters([engine.module.head.weight]).__enter__(),
}
GOING_ON: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda engine: None,  # the training that follows begins with a forward
    "zero_grad": lambda engine: engine.zero_grad(),
    "synchronize": lambda engine: engine.synchronize(),
}


def test_calls_on_the_stack_are_counted_once() -> None:
    class Again(nn.Module):
        def forward(self, depth: int) -> list[int]:
            return [count_open_calls(self), *(self(depth - 1) if depth else ())]

    module = Again()
    assert (module(2), count_open_calls(module)) == ([1, 2, 3], 0)
    threads = ThreadPoolExecutor(1)
    assert threads.submit(module, 0).result() == [1]


@pytest.mark.parametrize("part", ["module", "module at once", "block"])
def test_an_interrupted_call_past_the_engine_leaves_nothing_open(
    open_engine: Open, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """As in a notebook: a generation by the model itself is stopped, then the training goes on and is saved."""
    engine = train(open_engine(build("gpt"), make_config(NVME, nvme_path)), 0)
    model = engine.module
    called, given = (model, tokens(8)) if part != "block" else (model.blocks[0], torch.ones(1, 4, WIDTH).bfloat16())

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[0].down, "forward", interrupted)
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(KeyboardInterrupt):
                called(given)
    if part == "module":
        engine.save_checkpoint(tmp_path)
    forwards, begin = [], coordinator_of(engine).begin_forward
    monkeypatch.setattr(coordinator_of(engine), "begin_forward", lambda **more: (forwards.append(1), begin(**more)))
    assert unequal(train(engine, 1, 2), reference_run(0, 1, 2)) == []
    assert len(forwards) == 2
    engine.save_checkpoint(tmp_path)
    engine.synchronize()
    assert units_in_use(engine) == []


@pytest.mark.parametrize("going_on", GOING_ON)
@pytest.mark.parametrize("wait", WAITS)
def test_updates_go_on_when_whoever_waits_for_them_is_interrupted(
    open_engine: Open, nvme_path: Path, wait: str, going_on: str
) -> None:
    engine = open_engine(**scheduled(build("gpt"), NVME, nvme_path, zero={"sub_group_size": 8192}))
    reference = scheduled_run(3)
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    engine.synchronize()
    engine.inject(HELD)
    engine.step()
    interrupted_while_waiting(engine, lambda: WAITS[wait](engine))
    assert not keeper_of(engine).editor.is_editing
    GOING_ON[going_on](engine)
    train(engine, 2)
    assert (engine.global_steps, engine.micro_steps, engine.lr_scheduler.last_epoch) == (3, 3, 3)
    assert unequal(engine, reference) == []


RETRIES: dict[str, Callable[[Any], Any]] = {
    "engine.step": lambda engine: engine.step(),
    "optimizer.step": lambda engine: engine.optimizer.step(),
    **GOING_ON,
}


def interrupted_step(engine: Any) -> None:
    """A step waits for the one before, of which the forward between has left some due; and is interrupted."""
    train(engine, 0)
    engine.backward(engine(tokens(1), 1))
    assert not updates_of(engine).is_idle
    engine.inject(HELD)
    interrupted_while_waiting(engine, engine.step)


@pytest.mark.parametrize("retry", RETRIES)
def test_an_interrupted_step_is_taken_once(open_engine: Open, nvme_path: Path, retry: str) -> None:
    engine = open_engine(**scheduled(build("early_exit"), NVME, nvme_path, zero={"sub_group_size": 8192}))
    interrupted_step(engine)
    assert engine.global_steps == 1
    RETRIES[retry](engine)
    train(engine, 2)
    assert (engine.global_steps, engine.micro_steps, engine.lr_scheduler.last_epoch) == (3, 3, 3)
    assert unequal(engine, early_exit_run(), "early_exit") == []


class InterruptOnce:
    """Stands for a method; the first call is interrupted before it does anything, or when it has done it."""

    def __init__(self, owner: Any, name: str, when: str) -> None:
        self._owner, self._name, self._when, self._method = owner, name, when, getattr(owner, name)
        self.met = False
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        setattr(self._owner, self._name, self._method)
        self.met = True
        if self._when == "after":
            self._method(*arguments, **named)
        raise KeyboardInterrupt


@in_pairs(stage=STEP_STAGES, when=("before", "after"), retry=("engine.step", "nothing"), pair=(NVME, ("cpu", "cpu")))
def test_a_step_interrupted_at_any_stage_is_taken_once(
    open_engine: Open, nvme_path: Path, stage: str, when: str, retry: str, pair: tuple[str, str]
) -> None:
    keys = {"sub_group_size": 8192, "stage3_param_persistence_threshold": 64}
    engine = open_engine(**scheduled(build("gpt"), pair, nvme_path, zero=keys))
    train(engine, 0)
    engine.backward(engine(tokens(1)))
    interrupt = InterruptOnce(*STEP_STAGES[stage](engine), when)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert interrupt.met
    asked = step_is_asked(engine)
    if retry == "engine.step" and asked:
        engine.step()
    else:
        engine.synchronize()
    assert asked or (stage, when) in {("expect_forward", "before"), ("expect_forward", "after")}
    assert engine.get_global_grad_norm() == scheduled_run(3).norms[1]
    train(engine, 2)
    assert (engine.global_steps, engine.micro_steps, engine.lr_scheduler.last_epoch) == (3, 3, 3)
    assert unequal(engine, scheduled_run(3)) == []


def test_an_engine_closes_after_an_interrupted_step(open_engine: Open, nvme_path: Path, nothing_left: None) -> None:
    engine = open_engine(build("early_exit"), make_config(NVME, nvme_path))
    interrupted_step(engine)
    engine.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stage", CLOSE_STAGES)
def test_a_close_interrupted_at_any_stage_can_be_repeated(
    open_engine: Open, nvme_path: Path, nothing_left: None, stage: str, when: str
) -> None:
    """With updates under way, so that there is something to wait for."""
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    engine.backward(engine(tokens(0)))
    engine.synchronize()
    engine.inject(HELD)
    engine.step()
    with held_until_awaited(engine):
        interrupt = InterruptOnce(*CLOSE_STAGES[stage](engine), when)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
        assert interrupt.met
        engine.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in engine.module.modules())


@pytest.mark.parametrize("where", ["in a fetch", "in user code"])
def test_an_interrupted_forward_leaves_no_trace(open_engine: Open, nvme_path: Path, where: str) -> None:
    model = build("gpt")
    engine = open_engine(model, make_config(NVME, nvme_path))
    reference = reference_run(0, 1, 2)
    train(engine, 0)
    if where == "in a fetch":
        engine.inject(HELD)
        with interrupted_in_hold(engine):
            engine(tokens(7))
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
    reference = reference_run(0, 1, 2, model="stumbling")
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


def test_an_interrupt_while_a_unit_is_let_go_loses_no_memory(open_engine: Open, nvme_path: Path) -> None:
    """Its values are still on their way into the block."""
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = reference_run(0, 1)
    train(engine, 0)
    engine.synchronize()
    for _ in range(5):  # the pool holds fewer units than this
        coordinator_of(engine).evict_all()
        engine.inject(HELD)
        coordinator_of(engine).expect_forward()
        with interrupted_in_hold(engine):
            coordinator_of(engine).evict_all()
    coordinator_of(engine).evict_all()
    assert used_bytes(engine, "unit_pool") == 0
    assert unequal(train(engine, 1), reference) == []


class Scaling(nn.Module):
    """Changes a weight in front of using it, which is then stored."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scaled = build("gpt"), nn.Linear(64, 128)

    def forward(self, text: Tensor) -> Tensor:
        with torch.no_grad():
            self.scaled.weight.mul_(0.5)  # exactly
        return self.inner(text) * self.scaled(torch.ones(64, dtype=self.scaled.weight.dtype)).mean()


def test_what_forward_has_modified_is_stored_whole_after_an_interrupt(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other units need the memory that it is stored from, and the next call the unit itself."""
    monkeypatch.setattr(offload.array.copies, "CHUNK_BYTES", 8192)  # two of them
    limits = {"stage3_max_live_parameters": 30_000, "stage3_prefetch_bucket_size": 1}
    model: Any = Scaling()
    engine = open_engine(model, make_config(NVME, nvme_path, zero=limits))
    with zero.GatheredParameters([model.scaled.weight]):
        before = model.scaled.weight.detach().clone()
    with torch.no_grad():
        engine.inject(replace(HELD, ops=("write",)))
        with (
            counted_transfers(engine, "write") as writes,
            interrupted_when(lambda: writes[0] > 0 and is_waiting(engine)),
        ):
            engine(tokens(0))
        with held_until_awaited(engine):
            model.inner(tokens(1))
        engine(tokens(2))
    with zero.GatheredParameters([model.scaled.weight]):
        assert torch.equal(model.scaled.weight.detach(), before / 4)


# ---- the watchdog ---------------------------------------------------------------------------------------------------


def test_the_watchdog_is_patient_while_bytes_move(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time jumps whenever bytes have moved; all jumps together are several times what a standstill may last."""
    monkeypatch.setattr(offload.io.io_loop, "WARN_SECONDS", 0.8)
    monkeypatch.setattr(offload.io.io_loop, "RAISE_SECONDS", 0.9)
    keys = {"sub_group_size": 4096, "offload_optimizer": {"buffer_count": 2}}
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero=keys))
    reference = reference_run(0)
    engine.backward(engine(tokens(0)))
    engine.synchronize()
    engine.inject(HELD)
    engine.step()
    seen = set[int]()

    def look() -> None:
        engine.inject(HELD)  # what was held goes on, what comes after it is held until the next look
        done = storage_of(engine).disk.aio.stats()
        seen.add(done.read_bytes + done.write_bytes)

    monkeypatch.setattr(offload.io.io_loop, "time", SimpleNamespace(perf_counter=lambda: 0.7 * len(seen)))
    with at_each_look(engine, look), warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.synchronize()
    monkeypatch.undo()
    assert 0.7 * len(seen) > 2 * 0.9, "the updates are to take longer than the watchdog waits"
    engine.inject(None)
    assert unequal(engine, reference) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_watchdog_raises_when_nothing_moves_and_the_step_is_still_completed(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path))
    reference = reference_run(0, 1)
    engine.backward(engine(tokens(0)))
    with monkeypatch.context() as patch:
        engine.inject(HELD)
        engine.step()
        patch.setattr(offload.io.io_loop, "WARN_SECONDS", 0.1)
        patch.setattr(offload.io.io_loop, "RAISE_SECONDS", 0.2)
        with pytest.raises(WatchdogError, match=re.escape(str(nvme_path))):
            engine.synchronize()
    engine.inject(None)
    engine.synchronize()
    assert unequal(train(engine, 1), reference) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_settle_outlasts_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.io.io_loop, "WARN_SECONDS", 0.02)
    monkeypatch.setattr(offload.io.io_loop, "RAISE_SECONDS", 0.05)
    mover, ending, limits = offload.io.io_loop.IoLoop(), asyncio.Event(), list[str]()
    block = mover.wait_for

    def end_at_the_second_limit(what: str, *more: Any) -> None:
        try:
            block(what, *more)
        except WatchdogError:
            limits.append(what)
            if len(limits) == 2:
                mover.call_soon(ending.set)
            raise

    monkeypatch.setattr(mover, "wait_for", end_at_the_second_limit)
    try:
        good = mover.submit("slow", ending.wait())
        with pytest.raises(WatchdogError):
            good.result()
        assert good.wait() is None
        assert good.done() and len(limits) >= 2
    finally:
        monkeypatch.undo()
        mover.close()
