"""Engines that fail to begin, or end at an odd moment, leave nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import reference_run, train, unequal
from models import build, make_config, tokens
from probe import at_each_look, let_mover_idle, pipeline_of, storage_of, updates_of
from recovery import HELD, NVME, Open, failing, held_until_awaited, spilling
from torch import nn

import offload.io.io_loop
import zero
from offload.errors import StorageError
from offload.io.aio import NativeAio
from zero.params.released_parameter import is_managed

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
        assert ours is objects[name] and type(ours) is nn.Parameter and not is_managed(ours)
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
    reference = reference_run(0, 1, model=model_name)
    assert unequal(train(engine, 0, 1), reference, model_name) == []
    engine.close()


# ---- ends -----------------------------------------------------------------------------------------------------------


def held_step(engine: Any, index: int) -> None:
    """A step whose updates are under way until their transfers are released, or due."""
    engine.backward(engine(tokens(index)))
    engine.synchronize()
    engine.inject(HELD)
    engine.step()
    assert not updates_of(engine).is_idle


@contextmanager
def held_unless_awaited(engine: Any) -> Iterator[None]:
    """Inside, transfers move only while the training thread waits for the mover; what it began last stays held."""
    engine.inject(HELD)
    # What was held goes on, what follows is held until the next look.
    with at_each_look(engine, lambda: engine.inject(HELD)):
        yield


def failed_update(engine: Any, index: int) -> None:
    engine.backward(engine(tokens(index)))
    engine.synchronize()
    engine.inject(failing("write"))
    engine.step()
    with pytest.raises(StorageError):
        engine.synchronize()


@pytest.mark.parametrize(
    "moment", ["forward", "backward", "gradients in flight", "updates in flight", "forward beside updates", "failure"]
)
def test_close_waits_for_what_is_in_flight_and_leaves_nothing(
    open_engine: Open, nvme_path: Path, nothing_left: None, moment: str
) -> None:
    engine = spilling(open_engine, nvme_path) if "gradients" in moment else None
    engine = engine or open_engine(build("gpt"), make_config(NVME, nvme_path, zero={"sub_group_size": 8192}))
    train(engine, 0)  # from now on the order of units is known, and reads are ahead
    if moment == "failure":
        failed_update(engine, 1)
    elif "updates" in moment:
        held_step(engine, 1)
        if "forward" in moment:
            with held_unless_awaited(engine):
                engine(tokens(2))
    else:
        with held_unless_awaited(engine):
            loss = engine(tokens(1))
            if moment != "forward":
                engine.backward(loss)
    with nullcontext() if moment == "failure" else held_until_awaited(engine):
        engine.close()


def test_close_begins_no_update_that_nobody_can_see_any_more(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(NVME, nvme_path, zero={"sub_group_size": 4096}))
    train(engine, 0)
    engine.synchronize()
    begun, pipeline = [], pipeline_of(engine)
    update = pipeline.begin_update

    def spy(group: Any, *more: Any) -> Any:
        begun.append(group)
        return update(group, *more)

    pipeline.begin_update = spy
    held_step(engine, 1)
    let_mover_idle(engine)  # it begins what is read ahead
    before = len(begun)
    with held_until_awaited(engine):
        engine.close()
    assert 0 < before == len(begun) < len(engine.plan.sub_groups)


@pytest.mark.parametrize("moment", ["trained", "forward", "updates in flight", "failure", "gathered"])
def test_an_engine_that_is_dropped_leaves_nothing(nvme_path: Path, nothing_left: None, moment: str) -> None:
    model = build("gpt")
    engine = zero.initialize(model=model, config=make_config(NVME, nvme_path))[0]
    train(engine, 0)
    if moment == "forward":
        engine(tokens(1))
    if moment == "failure":
        failed_update(engine, 1)
    if moment == "updates in flight":
        held_step(engine, 1)
    if moment == "gathered":
        with zero.GatheredParameters(model.parameters()):
            pass
    aio, block = storage_of(engine).disk.aio, offload.io.io_loop.IoLoop.wait_for

    def release(mover: Any, what: str, *more: Any) -> None:
        aio.inject(None)
        block(mover, what, *more)

    del engine, model
    with mock.patch.object(offload.io.io_loop.IoLoop, "wait_for", release):
        gc.collect()
