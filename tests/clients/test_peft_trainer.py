"""PEFT under Trainer at stage 3, on each tier: the curves and adapters of the same scripts without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from client_configs import zero_config
from pairwise import each_once
from tuning_checks import check_weights

pytest.importorskip("peft", reason="peft is not installed")

KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "modules to save": {"modules_to_save": ["lm_head"]},
}


@each_once(
    kind=tuple(KINDS),
    device=("none", "cpu", "nvme"),
    threshold=(None, 0),
    recompute=(None, True, False),
)
def test_adapters_train_as_without_an_engine(
    tuned: Any, nvme_path: Path, kind: str, device: str, threshold: int | None, recompute: bool | None
) -> None:
    config = zero_config(3, device, nvme_path, threshold=threshold)
    told = tuned.check("peft_cases:lora", config, peft=KINDS[kind], recompute=recompute)
    assert all("lora_" in name or "modules_to_save" in name for name in told["trainable"])


@pytest.mark.parametrize("device", [pytest.param("none", marks=pytest.mark.slow), "nvme"])
def test_fp32_adapters_on_a_bf16_base_train_as_without_an_engine(tuned: Any, nvme_path: Path, device: str) -> None:
    tuned.check("peft_cases:lora", zero_config(3, device, nvme_path, threshold=0), bf16_base=True)


@pytest.mark.parametrize("device", ["none", pytest.param("cpu", marks=pytest.mark.slow), "nvme"])
def test_adapters_on_a_base_of_packed_bytes_train_as_without_an_engine(
    tuned: Any, nvme_path: Path, device: str
) -> None:
    told = tuned.check("peft_cases:qlora", zero_config(3, device, nvme_path, threshold=0))
    assert told["codes"] == 14 and told["changed"] == [], "the packed weights keep every bit"


@pytest.mark.parametrize(
    ("stage", "device"), [(2, "cpu"), pytest.param(3, "none", marks=pytest.mark.slow), (3, "nvme")]
)
def test_ranks_are_taken_away_by_the_gradients_as_without_an_engine(
    tuned: Any, nvme_path: Path, stage: int, device: str
) -> None:
    """AdaLoRA asks for whole gradients between backward and step, and zeroes singular values in place."""
    whole = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    config = zero_config(stage, device, nvme_path, threshold=0, **whole, gradient_clipping=0.0, fp16=None, bf16=None)
    told = tuned.engine("peft_cases:adalora", config)
    expected, moved = tuned.plain("peft_cases:adalora"), tuned.plain("peft_cases:adalora", ulps=1)
    assert told["ranks"] == expected["ranks"] and expected["ranks"][1] > expected["ranks"][-1] > 0
    check_weights(told, expected, moved)
    assert len(told["loss"]) == len(expected["loss"])
