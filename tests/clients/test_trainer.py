"""transformers' Trainer, unmodified, with deepspeed=...: it trains to what it trains to without, on every tier."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_configs import ADAMW, zero_config
from comparing import EPSILON, gap, same_run, trainer_spread

STAGES, DEVICES = (0, 1, 2, 3), ("none", "cpu", "nvme")
TRAIN = "trainer_cases:train"

Plain = Callable[..., Any]


@pytest.fixture(scope="module")
def tolerance(plain: Plain) -> float:
    """How far rounding takes the weights of this training."""
    return trainer_spread(plain)


def cells() -> list[Any]:
    """Every stage on every device that it can use; at stage 3 with the clients' own threshold and with 0."""
    return [
        pytest.param(stage, device, threshold, id=f"{stage}-{device}-{'auto' if threshold is None else threshold}")
        for stage in STAGES
        for device in DEVICES
        for threshold in ((None, 0) if stage == 3 else (None,))
        if stage or device == "none"
    ]


@pytest.mark.parametrize(("stage", "device", "threshold"), cells())
def test_training_evaluation_and_the_saved_model_are_those_of_the_plain_trainer(
    clients: Any, plain: Plain, tolerance: float, nvme_path: Path, stage: int, device: str, threshold: int | None
) -> None:
    config = zero_config(stage, device, nvme_path, threshold=threshold)
    ours, theirs = clients.run(TRAIN, config, evaluates=True), plain(TRAIN, evaluates=True)
    assert ours["model"] == "ZeroEngine"
    assert same_run(ours, theirs, tolerance) == []
    assert ours["learning_rate"] == theirs["learning_rate"]
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=16 * EPSILON)
    assert (ours["predictions"] - theirs["predictions"]).abs().max() < 64 * EPSILON * theirs["predictions"].abs().max()


def test_the_numbers_of_all_tiers_are_the_same_bits(clients: Any, nvme_path: Path) -> None:
    runs = [clients.run(TRAIN, zero_config(3, device, nvme_path, threshold=0)) for device in DEVICES]
    for run in runs[1:]:
        assert run["loss"] == runs[0]["loss"]
        assert run["grad_norm"] == runs[0]["grad_norm"]
        assert gap(run["weights"], runs[0]["weights"]) == 0


@pytest.mark.parametrize("clipping", (0.0, 0.1))
@pytest.mark.parametrize("accumulation", (1, 4))
def test_accumulation_and_clipping_are_those_of_the_plain_trainer(
    clients: Any, plain: Plain, tolerance: float, nvme_path: Path, accumulation: int, clipping: float
) -> None:
    more = {"gradient_accumulation_steps": accumulation, "max_grad_norm": clipping}
    ours = clients.run(TRAIN, zero_config(3, "nvme", nvme_path, threshold=0), **more)
    assert same_run(ours, plain(TRAIN, **more), tolerance) == []


def test_the_config_may_be_a_file(clients: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zero_config(2, "cpu")))
    assert gap(clients.run(TRAIN, str(path))["weights"], clients.run(TRAIN, zero_config(2, "cpu"))["weights"]) == 0


def test_an_optimizer_of_the_config_trains_as_the_trainers_own(clients: Any, plain: Plain, tolerance: float) -> None:
    """All values "auto": the Trainer fills them in; its learning-rate schedule is then stepped by the engine."""
    # The config has one param group: what the Trainer exempts from decay is decayed too, so there is no decay.
    ours = clients.run(TRAIN, zero_config(2, optimizer=ADAMW), weight_decay=0.0)
    theirs = plain(TRAIN, weight_decay=0.0)
    assert same_run(ours, theirs, tolerance) == []
    assert ours["learning_rate"] == [*theirs["learning_rate"][1:], 0.0]  # the log is written after the step


def test_evaluation_alone_at_stage_3_is_the_plain_trainers(clients: Any, plain: Plain, nvme_path: Path) -> None:
    ours = clients.run("trainer_cases:evaluate", zero_config(3, "nvme", nvme_path, threshold=0))
    assert ours == pytest.approx(plain("trainer_cases:evaluate"), rel=16 * EPSILON)


def test_without_deepspeed_the_alias_changes_nothing(plain: Plain) -> None:
    assert plain(TRAIN)["model"] == "GPT2LMHeadModel"
