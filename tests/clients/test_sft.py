"""TRL under DeepSpeed's configs: the curves and weights of the same scripts without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from client_configs import ADAMW, AUTO, DEVICES, zero_config
from pairwise import each_once
from tuning_cases import old_trl

pytest.importorskip("trl", reason="trl is not installed")

WARMUP_LR = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
}


USUAL = {(0, "none", None), (2, "cpu", None), (3, "none", 0), (3, "cpu", None), (3, "nvme", 0)}


def everywhere() -> list[Any]:
    """(stage, device, threshold): every place, and at stage 3 also with small weights in parts."""
    low = [(stage, device, None) for stage in (1, 2) for device in DEVICES]
    high = [(3, device, threshold) for device in DEVICES for threshold in (None, 0)]
    cases = [(0, "none", None), *low, *high]
    return [pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("stage", "device", "threshold"), everywhere())
def test_the_script_of_the_tutorials_trains_as_without_an_engine(
    tuned: Any, nvme_path: Path, stage: int, device: str, threshold: int | None
) -> None:
    """AdamW and WarmupLR, every value "auto", and a callback that looks at the memory."""
    config = zero_config(stage, device, nvme_path, threshold=threshold, optimizer=ADAMW, scheduler=WARMUP_LR)
    told = tuned.check("tuning_cases:sft", config, plainly={"own_schedule": "WarmupLR"})
    assert len(told["memory_bytes"]) == 4 and min(told["memory_bytes"]) > 0


@each_once(tied=(True, False), device=("none", "nvme"))
def test_its_own_optimizer_and_scheduler_train_as_without_an_engine(
    tuned: Any, nvme_path: Path, tied: bool, device: str
) -> None:
    tuned.check("tuning_cases:sft", zero_config(3, device, nvme_path, threshold=0), tied=tied)


@pytest.mark.parametrize(
    "peft",
    [
        {"r": 4},
        {"r": 4, "use_dora": True},
        pytest.param({"r": 4, "modules_to_save": ["lm_head"]}, marks=pytest.mark.slow),
    ],
    ids=["LoRA", "DoRA", "LoRA and a whole head"],
)
def test_adapters_under_the_trainer_train_as_without_an_engine(tuned: Any, nvme_path: Path, peft: Any) -> None:
    tuned.check("tuning_cases:sft", zero_config(3, "nvme", nvme_path, threshold=0), peft=peft)


@each_once(device=("none", "nvme"), precomputed=(False, True))
def test_preferences_train_as_without_an_engine(tuned: Any, nvme_path: Path, device: str, precomputed: bool) -> None:
    """A second engine that only evaluates; or one for the model that is trained later, by another."""
    stage = 2 if precomputed and old_trl() else 3
    config = zero_config(stage, device, nvme_path, threshold=0)
    tuned.check("tuning_cases:dpo", config, precompute_ref_log_probs=precomputed)


@pytest.mark.parametrize(
    ("stage", "device"),
    [(3, "nvme"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, "none"), (2, "cpu")))],
)
def test_what_is_generated_and_learnt_from_it_is_as_without_an_engine(
    tuned: Any, nvme_path: Path, stage: int, device: str
) -> None:
    """TRL takes the hooks off, generates from gathered weights, and puts them on again."""
    told = tuned.check("tuning_cases:grpo", zero_config(stage, device, nvme_path))
    assert told["rewards"] == tuned.plain("tuning_cases:grpo")["rewards"]
