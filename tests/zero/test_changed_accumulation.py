"""The number of micro-batches in a step may change, and their gradients may be forgotten: the next step has all of its
own, and the run is one that was so from the beginning.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import BATCH, build, make_config, tokens
from on_tiers import equal, masters
from probe import storage_of
from recovery import break_gradients, failing, once_more, spilling

from offload.errors import StateError, StorageError
from zero.optim.loss_scale import LossScaleError
from zero.plan.plan import NVME
from zero.store import storage

Open = Callable[..., Any]
PAIR = ("nvme", "nvme")


def config_of(nvme_path: Path, accumulation: int, **more: Any) -> dict[str, Any]:
    return make_config(PAIR, nvme_path, accumulation=accumulation, **{"bf16": False, **more})


def by_hand(engine: Any, first: int, count: int) -> list[int]:
    """Micro-batches one by one; steps taken after each."""
    told = []
    for index in range(first, first + count):
        engine.backward(engine(tokens(index)))
        engine.step()
        told.append(engine.global_steps)
    return told


def whole_batch(engine: Any, first: int) -> float:
    def stream() -> Iterator[torch.Tensor]:
        return (tokens(index) for index in range(first, 10_000))

    return float(engine.train_batch(stream()))


def run_to(open_engine: Open, nvme_path: Path, folder: Path) -> Any:
    """An engine after three steps of two micro-batches, saved."""
    engine = open_engine(build("gpt"), config_of(nvme_path, 2))
    by_hand(engine, 0, 6)
    engine.save_checkpoint(folder)
    return engine


@pytest.mark.parametrize("way", ["by hand", "whole batch"])
def test_a_run_that_is_resumed_with_more_micro_batches_begins_a_step(
    open_engine: Open, nvme_path: Path, tmp_path: Path, way: str
) -> None:
    engine = run_to(open_engine, nvme_path, tmp_path)
    engine.set_gradient_accumulation_steps(4)
    resumed = open_engine(build("gpt"), config_of(nvme_path, 4))
    resumed.load_checkpoint(tmp_path)
    for each in (engine, resumed):
        assert each.micro_steps == 6
        if way == "by hand":
            assert by_hand(each, 6, 4) == [3, 3, 3, 4]
        else:
            whole_batch(each, 6)
        assert (each.global_steps, each.micro_steps) == (4, 10)
    assert equal(masters(engine), masters(resumed))


def test_a_step_that_a_checkpoint_was_saved_amid_goes_on(open_engine: Open, nvme_path: Path, tmp_path: Path) -> None:
    engine, resumed = (open_engine(build("gpt"), config_of(nvme_path, 2)) for _ in range(2))
    by_hand(engine, 0, 2)
    engine.set_gradient_accumulation_steps(3)
    by_hand(engine, 2, 2)
    engine.save_checkpoint(tmp_path)
    resumed.set_gradient_accumulation_steps(3)
    resumed.load_checkpoint(tmp_path)
    for each in (engine, resumed):
        with pytest.raises(StateError, match="2 micro-batches of this step have already been run one by one"):
            whole_batch(each, 4)
        assert by_hand(each, 4, 4) == [2, 2, 2, 3]
    assert equal(masters(engine), masters(resumed))


def test_a_step_whose_gradients_were_discarded_goes_on_where_it_was_saved(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    """The saved run would have taken its step with the next micro-batch."""
    config = make_config(("cpu", "cpu"), nvme_path, accumulation=3)
    saved = open_engine(build("gpt"), config)
    for index in range(2):
        saved.backward(saved(tokens(index)))
        saved.step()
    saved.zero_grad()
    saved.save_checkpoint(tmp_path)
    resumed = open_engine(build("gpt"), config)
    resumed.load_checkpoint(tmp_path)
    for engine in (saved, resumed):
        engine.backward(engine(tokens(2)))
        engine.step()
        assert engine.global_steps == 1
    assert equal(masters(saved), masters(resumed))


def test_after_single_steps_a_batch_of_several_is_one_step(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of(nvme_path, 1))
    for first in range(3):
        whole_batch(engine, first)
    engine.set_gradient_accumulation_steps(2)
    whole_batch(engine, 3)
    assert (engine.global_steps, engine.micro_steps) == (4, 5)


def test_a_whole_batch_may_follow_micro_batches_that_were_forgotten(open_engine: Open, nvme_path: Path) -> None:
    engine, other = (open_engine(build("gpt"), config_of(nvme_path, 4)) for _ in range(2))
    by_hand(engine, 90, 2)
    with pytest.raises(StateError, match=r"2 micro-batches .* call zero_grad\(\) to discard them"):
        whole_batch(engine, 0)
    engine.zero_grad()
    losses = [whole_batch(each, 0) for each in (engine, other)]
    assert losses[0] == losses[1] and engine.global_steps == 1
    assert equal(masters(engine), masters(other))


def test_a_loop_that_forgets_its_gradients_goes_on_counting(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of(nvme_path, 3))
    for _ in range(6):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            begun = engine.micro_steps % 3
            engine.zero_grad()
        assert ["zero_grad() discards" in str(each.message) for each in told] == [True] * (begun > 0)
        by_hand(engine, 0, 1)
    assert engine.global_steps == 2


def test_after_a_loss_scale_that_cannot_be_less_a_step_has_all_its_micro_batches(
    open_engine: Open, nvme_path: Path
) -> None:
    half = {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 1, "hysteresis": 1}
    engine = open_engine(build("gpt"), config_of(nvme_path, 2, fp16=half))
    with pytest.raises(LossScaleError):
        for index in range(2):
            engine.backward(engine(tokens(index)) * torch.inf)
            engine.step()
    assert by_hand(engine, 0, 2) == [0, 1]


def test_without_the_key_raised_accumulation_runs_one_after_the_other(open_engine: Open, nvme_path: Path) -> None:
    engine, other = (open_engine(build("gpt"), config_of(nvme_path, count)) for count in (1, 4))
    engine.set_gradient_accumulation_steps(4)
    threads: set[int] = set()

    def loss_of(trainer: Any, batch: torch.Tensor) -> Any:
        threads.add(threading.get_ident())
        return trainer(batch)

    for each in (engine, other):
        each.train_batch(iter([tokens(index) for index in range(4)]), partial(loss_of, each))
    assert threads == {threading.get_ident()}
    assert equal(masters(engine), masters(other))


def test_sums_that_no_plan_has_go_to_nvme_when_memory_has_no_room(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least of what may be free: the plan holds no limit to go by, for it fitted."""
    monkeypatch.setattr(storage, "available_memory", lambda: (0, "nothing"))
    engine, other = (open_engine(build("gpt"), config_of(nvme_path, count, bf16=True)) for count in (1, 2))
    assert NVME not in engine.plan.gradient_tiers.values() and engine.plan.host_limit_bytes is None
    before = sum(region.nbytes for region in storage_of(engine).memory_pools)
    engine.set_gradient_accumulation_steps(2)
    for each in (engine, other):
        assert by_hand(each, 0, 2) == [0, 1]
    assert sum(region.nbytes for region in storage_of(engine).memory_pools) == before
    assert equal(masters(engine), masters(other))


def test_where_the_user_says_when_a_step_is_its_backwards_are_its_samples(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of(nvme_path, 1, managed_gradient_accumulation=False))
    for step in range(2):
        for index in range(3):
            engine.backward(engine(tokens(index)))
        engine.step()
        assert engine.global_samples == 3 * BATCH * (step + 1)


@pytest.mark.parametrize("where", ["weights", "gradients"])
def test_a_bare_backward_that_a_fault_broke_off_is_no_part_of_a_step(
    open_engine: Open, nvme_path: Path, where: str
) -> None:
    engine = spilling(open_engine, nvme_path, accumulation=2)
    loss = engine(tokens(0))
    engine.synchronize()
    if where == "weights":
        engine.inject(failing("read"))
    else:
        break_gradients(engine, "write", 3)  # waited for within the backward
    with pytest.raises(StorageError):
        loss.backward()
    engine.inject(None)
    once_more(engine.step)
    once_more(lambda: engine(tokens(1)))
    engine(tokens(1)).backward()
    with pytest.raises(StateError, match=r"some gradients are missing; call zero_grad\(\)"):
        engine.step()
    engine.zero_grad()
    other = spilling(open_engine, nvme_path, accumulation=1)
    engine.set_gradient_accumulation_steps(1)
    for each in (engine, other):
        by_hand(each, 0, 1)
    assert equal(masters(engine), masters(other))


def test_the_number_of_micro_batches_may_be_set_as_in_deepspeed(open_engine: Open, nvme_path: Path) -> None:
    """To begin a step anew after something went wrong."""
    engine = open_engine(build("gpt"), config_of(nvme_path, 3))
    assert by_hand(engine, 0, 4) == [0, 0, 1, 1]
    engine.zero_grad()
    engine.micro_steps = 0
    assert by_hand(engine, 4, 3) == [1, 1, 2]
    engine.micro_steps = 4
    assert by_hand(engine, 7, 2) == [2, 3]


def test_a_gradient_beside_a_batch_of_one_is_added_to_it(open_engine: Open, nvme_path: Path) -> None:
    """Of a penalty, for example."""
    engine, reference = (open_engine(build("gpt"), config_of(nvme_path, 1)) for _ in range(2))
    for each in (engine, reference):
        each.backward(each(tokens(7)))
    whole_batch(engine, 0)
    reference.backward(reference(tokens(0)))
    reference.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 1)
    assert equal(masters(engine), masters(reference))


@pytest.mark.parametrize("how", ["the boundary is set", "boundaries are the user's"])
def test_gradients_that_are_dropped_within_a_step_are_named_whoever_counts(
    open_engine: Open, nvme_path: Path, how: str
) -> None:
    more = {"managed_gradient_accumulation": False} if how == "boundaries are the user's" else {}
    engine = open_engine(build("gpt"), config_of(nvme_path, 2, **more))
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(tokens(0)))
    with pytest.raises(StateError, match="micro-batches of this step have already been run"):
        whole_batch(engine, 0)
    with pytest.warns(UserWarning, match=r"zero_grad\(\) discards"):
        engine.zero_grad()
    engine.set_gradient_accumulation_boundary(True)
    by_hand(engine, 1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.zero_grad()
