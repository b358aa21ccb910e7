"""accelerate, unmodified: batch sizes that fit, plugins, param groups, schedules that go on, exact types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_configs import WARMUP_DECAY, zero_config
from comparing import MARGIN, gap, spread

CASES = "accelerate_more_cases"
WHOLE = {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
RATES_AUTO = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
PLACES = [pytest.param(2, "cpu", marks=pytest.mark.slow), (3, "nvme")]

Plain = Callable[..., Any]


def warmup(rates: list[float] | str) -> dict[str, Any]:
    """The config's schedule: to these rates in so many steps as the client says."""
    params = {"warmup_min_lr": "auto", "warmup_max_lr": rates, "warmup_num_steps": "auto", "warmup_type": "linear"}
    return {"type": "WarmupLR", "params": params}


@pytest.mark.parametrize(("stage", "device"), PLACES)
def test_a_batch_size_that_fits_is_found_at_stage_3_too(
    clients: Any, plain: Plain, nvme_path: Path, stage: int, device: str
) -> None:
    """`find_executable_batch_size`: ten models are prepared, and the engines of nine are freed after a forward."""
    config = zero_config(stage, device, nvme_path, threshold=0, **{**WHOLE, "train_micro_batch_size_per_gpu": "auto"})
    ours, theirs = clients.run(f"{CASES}:batch_that_fits", config), plain(f"{CASES}:batch_that_fits")
    assert ours["tried"] == theirs["tried"] and ours["tried"][-1] == 4 < ours["tried"][0]
    other = plain(f"{CASES}:batch_that_fits", fused=True)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert gap(ours["weights"], theirs["weights"]) <= MARGIN * gap(theirs["weights"], other["weights"])


def test_plugins_change_and_the_first_engine_stays_the_accelerators(clients: Any, nvme_path: Path) -> None:
    told = clients.run(
        f"{CASES}:plugins", zero_config(2, "cpu", **WHOLE), zero_config(3, "nvme", nvme_path, threshold=0, **WHOLE)
    )
    assert told["active"] == [True, True, True] and told["stage 3"] == [False, True, False]
    assert told["first engine"] and told["evaluates"]


def test_types_are_those_that_accelerate_compares_and_its_config_is_filled_in(clients: Any, nvme_path: Path) -> None:
    config = zero_config(3, "nvme", nvme_path, optimizer=RATES_AUTO, scheduler=WARMUP_DECAY)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    told = clients.run(f"{CASES}:kinds", config)
    assert told["engine"] and told["wrapped"]
    assert (told["optimizer"], told["scheduler"]) == ("DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper")
    filled = told["config"]
    assert filled["optimizer"]["params"] == {"lr": 1e-3, "weight_decay": 1e-4}
    scheduler = filled["scheduler"]["params"]
    assert (scheduler["warmup_max_lr"], scheduler["warmup_num_steps"], scheduler["total_num_steps"]) == (1e-3, 10, 1000)
    assert filled["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert filled["train_batch_size"] == 2 * 2
    assert "stage3_gather_16bit_weights_on_model_save" in told["refused"]


@pytest.mark.parametrize(("stage", "device"), PLACES)
def test_param_groups_rise_to_rates_of_their_own(
    clients: Any, plain: Plain, nvme_path: Path, stage: int, device: str
) -> None:
    schedule = warmup([2e-3, 1e-5])
    config = zero_config(stage, device, nvme_path, threshold=0, scheduler=schedule, **WHOLE)
    ours, theirs = clients.run(f"{CASES}:grouped", config), plain(f"{CASES}:grouped")
    assert [rate for step in ours["rates"] for rate in step] == pytest.approx(
        [rate for step in theirs["rates"] for rate in step]
    )
    tolerance = spread(plain, f"{CASES}:grouped", {"fused": True})
    assert gap(ours["weights"], theirs["weights"]) <= MARGIN * tolerance


@pytest.mark.parametrize(("stage", "device"), PLACES)
def test_a_schedule_of_the_config_goes_on_in_another_process(
    clients: Any, tmp_path: Path, nvme_path: Path, stage: int, device: str
) -> None:
    more = {"optimizer": RATES_AUTO, "scheduler": warmup("auto"), **WHOLE}
    config = zero_config(stage, device, nvme_path, threshold=0, **more)
    folder = str(tmp_path / "state")
    whole = clients.run(f"{CASES}:schedule_saved", config, folder)
    resumed = clients.run(f"{CASES}:schedule_saved", config, folder, resume=True)
    assert whole["rates"][:4] == pytest.approx([0.0, 1e-3 / 3, 2e-3 / 3, 1e-3])
    assert resumed["rates"] == whole["rates"][4:] and resumed["loss"] == whole["loss"][4:]
    assert {"latest", "pytorch_model", "zero_to_fp32.py"} <= set(whole["files"])
