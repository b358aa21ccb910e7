"""LLaMA-Factory's configs as it ships them, under its way to fine-tune: as the same run without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_checks import shipped

pytest.importorskip("peft", reason="peft is not installed")

SHIPPED = ("z0", "z2", "z2_offload", "z3", "z3_offload")
KINDS = ("lora", "full", "freeze")
USUAL = {("z0", "lora"), ("z2", "full"), ("z2_offload", "freeze"), ("z3", "full"), ("z3_offload", "lora")}


def marked() -> list[Any]:
    cases = [(name, kind) for name in SHIPPED for kind in KINDS]
    return [pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow) for case in cases]


@pytest.mark.broad
@pytest.mark.parametrize(("name", "kind"), marked())
def test_a_shipped_config_trains_as_without_an_engine(tuned: Any, name: str, kind: str) -> None:
    """Embeddings resized, checkpointing, a client's optimizer with two groups; then evaluation and generation."""
    told = tuned.check("factory_cases:sft", shipped(name), finetuning_type=kind)
    compare_what_follows(told, tuned.plain("factory_cases:sft", finetuning_type=kind))


@pytest.mark.parametrize(("device", "kind"), [("nvme", "full"), pytest.param("none", "lora", marks=pytest.mark.slow)])
def test_with_small_weights_in_parts_too_it_trains_as_without_an_engine(
    tuned: Any, nvme_path: Path, device: str, kind: str
) -> None:
    """The shipped stage 3 with a threshold of 0, and its offload moved to another tier."""
    config = json.loads(shipped("z3_offload").read_text())
    block = config["zero_optimization"]
    block["stage3_param_persistence_threshold"] = 0
    for part in ("offload_optimizer", "offload_param"):
        block[part] |= {"device": device, "nvme_path": str(nvme_path)}
    told = tuned.check("factory_cases:sft", config, finetuning_type=kind)
    compare_what_follows(told, tuned.plain("factory_cases:sft", finetuning_type=kind))


def compare_what_follows(told: Any, expected: Any) -> None:
    """The evaluation after training and the tokens that are generated."""
    assert told["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert torch.equal(told["predicted"], expected["predicted"])
