"""The Trainer's checkpoints behind the alias: resumed in the middle of an epoch, the best one loaded, exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_configs import ADAMW, zero_config
from comparing import gap

TRAIN = "trainer_cases:train"
STEPS, CUT = 6, 2
"""Of the run, and after how many of them it is resumed: an epoch has 4."""
RUNS = [(0, "none", None), (1, "cpu", None), (2, "nvme", None), (3, "none", None), (3, "cpu", 0), (3, "nvme", 0)]

Plain = Callable[..., Any]


@pytest.mark.parametrize(("stage", "device", "threshold"), RUNS)
def test_a_run_resumed_in_the_middle_of_an_epoch_is_the_uninterrupted_one(
    clients: Any, tmp_path: Path, nvme_path: Path, stage: int, device: str, threshold: int | None
) -> None:
    config = zero_config(stage, device, nvme_path, threshold=threshold)
    more = {"output_dir": str(tmp_path / "out"), "max_steps": STEPS, "save_strategy": "steps", "save_steps": CUT}
    whole = clients.run(TRAIN, config, **more)
    folder = tmp_path / "out" / f"checkpoint-{CUT}"
    assert (folder / f"global_step{CUT}").is_dir()
    resumed = clients.run(TRAIN, config, **more, resume=str(folder))
    assert resumed["global_step"] == STEPS
    for column in ("loss", "grad_norm", "learning_rate"):
        assert resumed[column] == whole[column]  # the log of before is in the Trainer's own state
    assert gap(resumed["weights"], whole["weights"]) == 0


def test_an_optimizer_of_the_config_resumes_too(clients: Any, tmp_path: Path, nvme_path: Path) -> None:
    """The learning-rate schedule is the engine's then, and so is its state."""
    config = zero_config(3, "nvme", nvme_path, threshold=0, optimizer=ADAMW)
    more = {"output_dir": str(tmp_path / "out"), "max_steps": STEPS, "save_strategy": "steps", "save_steps": CUT}
    whole = clients.run(TRAIN, config, **more)
    resumed = clients.run(TRAIN, config, **more, resume=str(tmp_path / "out" / f"checkpoint-{CUT}"))
    assert resumed["learning_rate"] == whole["learning_rate"]
    assert gap(resumed["weights"], whole["weights"]) == 0


@pytest.mark.parametrize(("stage", "device", "threshold"), RUNS)
def test_the_best_checkpoint_is_loaded_at_the_end(
    clients: Any, plain: Plain, tmp_path: Path, nvme_path: Path, stage: int, device: str, threshold: int | None
) -> None:
    place = tmp_path / "ours"
    ours = clients.run(
        "trainer_more_cases:best", zero_config(stage, device, nvme_path, threshold=threshold), str(place)
    )
    theirs = plain("trainer_more_cases:best", folder="best")
    assert ours["best"] == theirs["best"] != f"checkpoint-{STEPS}"
    assert ours["eval_loss"] == min(ours["eval_losses"])
    assert gap(ours["weights"], clients.run("trainer_more_cases:saved", str(place / ours["best"]))) == 0


def test_a_checkpoint_is_exported_by_deepspeeds_recipe(clients: Any, tmp_path: Path, nvme_path: Path) -> None:
    more = {"output_dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 4}
    run = clients.run(TRAIN, zero_config(3, "nvme", nvme_path, threshold=0), **more)
    exported = clients.run("trainer_more_cases:exported", str(tmp_path / "out" / "checkpoint-4"))
    assert gap(exported, run["weights"]) == 0
