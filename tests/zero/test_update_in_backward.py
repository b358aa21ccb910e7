"""Updates inside backward give what the plain order gives, or are taken back without a trace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import micro_batch, reference_of, reference_run, unequal
from models import build, make_config, tokens
from pairwise import in_pairs
from probe import keeper_of, layout_of, settle_updates_ahead, updates_ahead_of

import zero
from offload.disk.aio import AioFault
from offload.errors import ConfigError, StorageError

Open = Callable[..., Any]
NVME = ("nvme", "nvme")
IN_BACKWARD = {"offload_optimizer": {"update_in_backward": True}}


def opened(
    open_engine: Open, nvme_path: Path, model: str = "gpt", keys: dict[str, Any] | None = None, **more: Any
) -> Any:
    both = {**(keys or {}), **IN_BACKWARD}
    return open_engine(build(model), make_config(NVME, nvme_path, zero=both, **more))


def after_backward(engine: Any, index: int) -> None:
    """A backward whose updates ahead have all ended."""
    engine.backward(engine(tokens(index)))
    settle_updates_ahead(engine)


def committed(engine: Any) -> int:
    return int(engine.statistics().updated_in_backward_numel)


@in_pairs(model=("gpt", "mixed", "tied"), accumulation=(1, 3), sub_group_numel=(4096, 10**9), waits=(True, False))
def test_updates_inside_backward_are_bit_equal_to_the_plain_order(
    open_engine: Open, nvme_path: Path, model: str, accumulation: int, sub_group_numel: int, waits: bool
) -> None:
    engine = opened(open_engine, nvme_path, model, keys={"sub_group_size": sub_group_numel}, accumulation=accumulation)
    for index in range(4 * accumulation):
        if waits:
            after_backward(engine, index)
            engine.step()
        else:
            micro_batch(engine, index)
    assert unequal(engine, reference_run(*range(4 * accumulation), model=model, accumulation=accumulation), model) == []
    if waits:
        trained = sum(u.numel for u in engine.units if u.trainable)
        assert 0 < committed(engine) <= 4 * trained


def test_a_step_finds_every_unit_done_when_the_disk_had_time(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, nvme_path)
    after_backward(engine, 0)
    engine.step()
    assert committed(engine) == layout_of(engine).numel


@pytest.mark.parametrize("norm_max", [1e-3, 1e3])
def test_a_step_that_clips_takes_back_what_was_done_ahead(open_engine: Open, nvme_path: Path, norm_max: float) -> None:
    engine = opened(open_engine, nvme_path, clipping=norm_max)
    reference = reference_of(clipping=norm_max)
    for index in range(3):
        after_backward(engine, index)
        engine.step()
        micro_batch(reference, index)
    assert (committed(engine) == 0) == (norm_max < 1)
    assert unequal(engine, reference) == []


def edited(engine: Any) -> None:
    with torch.no_grad(), zero.GatheredParameters([engine.module.norm.weight]):
        engine.module.norm.weight.mul_(2)


def halved(engine: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.5


def nothing(engine: Any) -> None:
    return None


CHANGES: dict[str, Callable[[Any], None]] = {
    "another backward": lambda trainer: trainer.backward(trainer(tokens(77))),
    "zero_grad and anew": lambda trainer: (trainer.zero_grad(), trainer.backward(trainer(tokens(78)))),  # type: ignore[dict-item]
    "learning rate": halved,
    "edit": edited,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_backward_and_step_makes_void_what_was_done_ahead(
    open_engine: Open, nvme_path: Path, change: str
) -> None:
    """Beside a run in the plain order that sees the same."""
    plain = open_engine(build("gpt"), make_config(NVME, nvme_path))
    engine = opened(open_engine, nvme_path)
    for index in range(3):
        after_backward(engine, index)
        plain.backward(plain(tokens(index)))
        for trainer in (engine, plain):
            CHANGES[change](trainer)
            trainer.step()
    assert unequal(engine, plain) == []


def test_a_learning_rate_that_changes_after_every_backward_never_commits(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, nvme_path)
    for index in range(3):
        after_backward(engine, index)
        halved(engine)
        engine.step()
    assert committed(engine) == 0


def test_an_edited_unit_is_void_and_the_others_are_not(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, nvme_path)
    after_backward(engine, 0)
    edited(engine)
    engine.step()
    unit = keeper_of(engine).units_named("norm.weight")[0]
    assert committed(engine) == layout_of(engine).numel - engine.units[unit].numel


FAILURES = 2


def backward_anew(engine: Any, index: int) -> None:
    """Forward and backward on a disk that works again; what was read ahead before it did may still come to light."""
    for told in range(FAILURES):
        try:
            engine.backward(engine(tokens(index)))
        except StorageError:
            assert told + 1 < FAILURES, "more errors than failures"
            engine.zero_grad()
        else:
            return


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("skip", [0, 3, 9])
def test_a_failure_ahead_costs_nothing_but_the_work(
    open_engine: Open, nvme_path: Path, operation: Any, skip: int
) -> None:
    engine = opened(open_engine, nvme_path, keys={"sub_group_size": 4096})
    reference = reference_of()
    for index in range(2):
        micro_batch(engine, index)
        micro_batch(reference, index)
    loss = engine(tokens(2))
    engine.synchronize()
    engine.inject(AioFault(fail_rate=1.0, ops=(operation,), skip=skip, count_max=FAILURES))
    try:
        engine.backward(loss)
    except StorageError:  # a weight's read was hit; on a busy machine those of two units
        engine.inject(None)
        engine.zero_grad()
        backward_anew(engine, 2)
    settle_updates_ahead(engine)
    engine.inject(None)
    engine.step()
    micro_batch(reference, 2)
    assert unequal(engine, reference) == []


def test_it_turns_itself_off_when_too_many_steps_are_void_and_says_so(
    open_engine: Open, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = opened(open_engine, nvme_path, clipping=1e-4)
    reference = reference_of(clipping=1e-4)
    with caplog.at_level(logging.WARNING, logger="zero"):
        for index in range(20):
            after_backward(engine, index)
            engine.step()
            micro_batch(reference, index)
    assert not updates_ahead_of(engine).enabled
    assert sum("update_in_backward" in record.getMessage() for record in caplog.records) == 1
    micro_batch(engine, 20)
    micro_batch(reference, 20)
    assert unequal(engine, reference) == []


def test_the_second_slots_are_in_the_plan_and_cost_the_states_again(open_engine: Open, nvme_path: Path) -> None:
    plain = open_engine(build("gpt"), make_config(NVME, nvme_path))
    engine = opened(open_engine, nvme_path)
    assert engine.plan.swap_bytes == 2 * plain.plan.swap_bytes
    assert "second slots" in engine.plan.table()


@pytest.mark.parametrize("pair", [("cpu", "nvme"), ("nvme", "cpu"), ("cpu", "cpu"), ("none", "none")], ids="-".join)
def test_it_is_refused_where_weights_or_states_are_not_on_nvme(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError, match="update_in_backward"):
        open_engine(build("gpt"), make_config(pair, nvme_path, zero=IN_BACKWARD))
