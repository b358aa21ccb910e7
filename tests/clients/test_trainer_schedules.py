"""The Trainer with the config's optimizer and schedule, or with one of them, and with fp16: what is used and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from client_configs import ADAMW, WARMUP_DECAY, zero_config
from comparing import gap, same_run, spread

SCHEDULED = "trainer_more_cases:scheduled"
STEPS, RATE = 6, 1e-3

Plain = Callable[..., Any]


def warmup_decay(warmup: int = 2) -> list[float]:
    """The rate of each step: least before the first iteration, then up in `warmup`, then down to the last.

    The Trainer asks for a warm-up of one iteration at least; DeepSpeed makes two of it.
    """
    rates = [0.0]
    for iteration in range(STEPS - 1):
        rising = iteration / warmup
        falling = (STEPS - iteration) / (STEPS - warmup)
        rates.append(RATE * (rising if iteration < warmup else falling))
    return rates


@pytest.mark.parametrize("optimizer", (None, ADAMW), ids=("trainers", "configs"))
@pytest.mark.parametrize(("stage", "device", "threshold"), [(2, "none", None), (2, "cpu", None), (3, "nvme", 0)])
def test_the_configs_schedule_drives_either_optimizer(
    clients: Any, plain: Plain, nvme_path: Path, stage: int, device: str, threshold: int | None, optimizer: Any
) -> None:
    config = zero_config(stage, device, nvme_path, threshold=threshold, optimizer=optimizer, scheduler=WARMUP_DECAY)
    ours = clients.run(SCHEDULED, config)
    rates = warmup_decay()
    assert ours["rates"] == pytest.approx(rates)
    theirs = plain(SCHEDULED, rates=rates)
    assert same_run(ours, theirs, spread(plain, SCHEDULED, {"optim": "adamw_torch"}, rates=rates)) == []


@pytest.mark.parametrize("optimizer", (None, ADAMW), ids=("trainers", "configs"))
def test_the_trainers_schedule_drives_either_optimizer(clients: Any, plain: Plain, optimizer: Any) -> None:
    ours, theirs = clients.run(SCHEDULED, zero_config(3, "cpu", threshold=0, optimizer=optimizer)), plain(SCHEDULED)
    assert ours["rates"] == theirs["rates"]
    assert same_run(ours, theirs, spread(plain, SCHEDULED, {"optim": "adamw_torch"})) == []


def test_fp16_is_the_same_on_every_tier_and_near_fp32(clients: Any, plain: Plain, nvme_path: Path) -> None:
    fp16 = {"enabled": "auto", "initial_scale_power": 8}
    places = [(1, "none", None), (2, "nvme", None), (3, "cpu", None), (3, "nvme", None), (3, "cpu", 0)]
    configs = [zero_config(stage, device, nvme_path, threshold=value, fp16=fp16) for stage, device, value in places]
    runs = [clients.run(SCHEDULED, config, fp16=True) for config in configs]
    for run in runs:
        assert run["skipped"] == 0
        assert run["loss"] == runs[0]["loss"]
        assert run["grad_norm"] == runs[0]["grad_norm"]
        assert gap(run["weights"], runs[0]["weights"]) == 0
    epsilon = torch.finfo(torch.float16).eps
    assert runs[0]["loss"] == pytest.approx(plain(SCHEDULED)["loss"], rel=2 * epsilon)
    assert all(value.dtype == torch.float16 for value in runs[0]["weights"].values())


def test_the_trainers_schedule_waits_for_a_step_that_overflow_has_skipped(clients: Any) -> None:
    """A scale of 2**30 is too much for fp16: it is halved until gradients fit."""
    fp16 = {"enabled": "auto", "initial_scale_power": 30, "hysteresis": 1}
    ours = clients.run(SCHEDULED, zero_config(2, "cpu", fp16=fp16), fp16=True)
    assert 0 < ours["skipped"] <= STEPS
    before = [RATE * (1 - step / STEPS) for step in range(STEPS)]
    waited = [before[max(step - ours["skipped"], 0)] for step in range(STEPS)]
    assert ours["rates"] == pytest.approx(waited)
