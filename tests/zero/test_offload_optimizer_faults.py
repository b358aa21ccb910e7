"""A disk that fails under `zero.OffloadOptimizer`: a step is finished by the next call or refused."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_runs import backward, both, offloaded, same, state_differences, train
from probe import is_waited_for, storages_behind
from recovery import HELD, descriptors, failing, interrupted_when, movers
from tiled_optimizers import patchy

import zero
from offload.errors import ConfigError, StateError, StorageError
from offload.io.aio import AioFault
from zero.optim import parameter_states
from zero.optim.rules import TiledRule


def inject(optimizer: Any, fault: AioFault | None) -> None:
    (storage,) = storages_behind(optimizer)
    storage.disk.aio.inject(fault)


def test_faults_that_pass_are_absorbed_without_a_changed_bit(nvme_path: Path) -> None:
    with both("nvme", nvme_path, lr=1e-2) as (expected, plain, model, ours):
        inject(ours, AioFault(errno=errno.EINTR, fail_rate=0.25, short_rate=0.25, seed=2))
        train(expected, plain, range(5))
        train(model, ours, range(5))
        assert same(expected, model) == []
        done = storages_behind(ours)[0].disk.aio.stats()
        assert done.retried > 0 and done.resumed > 0


@pytest.mark.parametrize("skip", [0, 1, 3, 5])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_step_that_failed_is_finished_by_the_next_call_and_counts_once(
    nvme_path: Path, operation: str, skip: int
) -> None:
    with both("nvme", nvme_path, lr=1e-2) as (expected, plain, model, ours):
        train(expected, plain, range(3))
        train(model, ours, range(3))
        backward(expected, 3)
        backward(model, 3)
        plain.step()
        inject(ours, failing(operation, skip=skip))
        for _ in range(3):
            with pytest.raises(StorageError, match="update of step 4"):
                ours.step()
        for use in (ours.state_dict, lambda: ours.state[model.gain]):
            with pytest.raises(StateError, match=r"call step\(\) again"):
                use()
        inject(ours, None)
        ours.step()
        assert same(expected, model) == []
        assert state_differences(plain.state_dict(), ours.state_dict()) == []
        for net, optimizer in ((expected, plain), (model, ours)):
            optimizer.zero_grad()
            train(net, optimizer, range(4, 7))
        assert same(expected, model) == []


@pytest.mark.parametrize("change", ["none", "zeroed", "added to"])
def test_a_failed_step_without_its_gradients_is_refused_until_states_are_loaded(nvme_path: Path, change: str) -> None:
    with both("nvme", nvme_path, lr=1e-2) as (expected, plain, model, ours):
        train(expected, plain, range(3))
        train(model, ours, range(3))
        weights, states = {k: v.clone() for k, v in model.state_dict().items()}, ours.state_dict()
        backward(model, 3)
        inject(ours, failing("read", skip=2))
        with pytest.raises(StorageError):
            ours.step()
        inject(ours, None)
        if change == "added to":
            backward(model, 4)
        else:
            ours.zero_grad(set_to_none=change == "none")
        for _ in range(2):
            with pytest.raises(StateError, match="load weights and states from a checkpoint"):
                ours.step()
        ours.zero_grad()
        model.load_state_dict(weights)
        ours.load_state_dict(states)
        train(expected, plain, range(3, 6))
        train(model, ours, range(3, 6))
        assert same(expected, model) == []


def test_states_that_could_not_be_read_or_stored_are_asked_for_again(nvme_path: Path) -> None:
    with both("nvme", nvme_path, lr=1e-2) as (expected, plain, model, ours):
        train(expected, plain, range(3))
        train(model, ours, range(2))
        inject(ours, failing("read"))
        with pytest.raises(StorageError):
            ours.state_dict()
        inject(ours, failing("write"))
        with pytest.raises(StorageError):
            ours.load_state_dict(plain.state_dict())
        inject(ours, None)
        for use in (ours.step, ours.state_dict):
            with pytest.raises(StateError, match="only a part of the states was loaded"):
                use()
        model.load_state_dict(expected.state_dict())
        ours.load_state_dict(plain.state_dict())
        assert state_differences(plain.state_dict(), ours.state_dict()) == []
        train(expected, plain, range(3, 5))
        train(model, ours, range(3, 5))
        assert same(expected, model) == []


def test_an_interrupted_step_is_finished_by_the_next_call(nvme_path: Path) -> None:
    with both("nvme", nvme_path, lr=1e-2) as (expected, plain, model, ours):
        for net, optimizer in ((expected, plain), (model, ours)):
            train(net, optimizer, range(2))
            backward(net, 2)
        plain.step()
        inject(ours, HELD)
        (storage,) = storages_behind(ours)
        with interrupted_when(lambda: is_waited_for(storage)):
            ours.step()
        inject(ours, None)
        ours.step()
        assert same(expected, model) == []
        assert state_differences(plain.state_dict(), ours.state_dict()) == []


def test_a_killed_job_leaves_no_byte_and_no_name(nvme_path: Path) -> None:
    script = f"""
import time, torch, zero
weight = torch.nn.Parameter(torch.ones(100_000))
optimizer = zero.OffloadOptimizer([weight], offload={{"device": "nvme", "nvme_path": {str(nvme_path)!r}}})
weight.grad = torch.ones_like(weight)
optimizer.step()
print("stepped", flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "stepped\n"
        files = [os.readlink(f"/proc/{child.pid}/fd/{name}") for name in os.listdir(f"/proc/{child.pid}/fd")]
        assert any(file.startswith(str(nvme_path)) and file.endswith("(deleted)") for file in files)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert os.listdir(nvme_path) == []


def test_a_step_is_refused_whole_where_options_cannot_be(nvme_path: Path) -> None:
    with both("nvme", nvme_path, torch.optim.SGD, lr=1e-2) as (expected, plain, model, ours):
        train(expected, plain, range(2))
        train(model, ours, range(2))
        backward(model, 2)
        ours.param_groups[1]["momentum"] = 0.9
        with pytest.raises(ConfigError, match="momentum_buffer"):
            ours.step()
        assert same(expected, model) == []


def test_an_update_that_ends_amid_its_elements_is_not_made_again(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with both("nvme", nvme_path, lr=1e-2) as (expected, plain, model, ours):
        train(expected, plain, range(2))
        train(model, ours, range(2))
        backward(model, 2)
        calls, step = [], TiledRule.step_tile

        def fails(*given: Any) -> Any:
            calls.append(given)
            if len(calls) == 5:
                raise MemoryError("no room for a tile")
            return step(*given)

        monkeypatch.setattr(TiledRule, "step_tile", fails)
        with pytest.raises(MemoryError):
            ours.step()
        for _ in range(2):
            with pytest.raises(StateError, match="in the middle of its elements"):
                ours.step()
        model.load_state_dict(expected.state_dict())
        ours.load_state_dict(plain.state_dict())
        ours.zero_grad()
        train(expected, plain, range(2, 4))
        train(model, ours, range(2, 4))
        assert same(expected, model) == []


def test_what_cannot_be_made_leaves_nothing_behind(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = movers(), descriptors()
    model, made = patchy(), []

    def second_fails(*given: Any) -> Any:
        if made:
            raise StorageError("reserving", errno=errno.ENOSPC, path="nvme", offset=0, free_bytes=0)
        made.append(parameter_states.ParameterStates(*given))
        return made[0]

    monkeypatch.setattr("zero.optim.offload_optimizer.ParameterStates", second_fails)
    weights = [p for p in model.parameters() if p is not model.gain]
    with zero.OffloadOptimizer(weights, lr=1e-2, offload=offloaded("nvme", nvme_path)) as ours:
        between = movers(), descriptors()
        with pytest.raises(StorageError):
            ours.add_param_group({"params": [model.gain]})
        assert (movers(), descriptors()) == between and len(ours.param_groups) == 1
        train(model, ours, range(2))
    assert (movers(), descriptors()) == before
    assert os.listdir(nvme_path) == []
