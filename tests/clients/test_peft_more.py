"""More of PEFT under Trainer: other kinds of adapters, adapters that come later, merging, loading again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from client_configs import zero_config

pytest.importorskip("peft", reason="peft is not installed")

CASES = "peft_more_cases"
KINDS = ["PromptTuningConfig", "AdaLoraConfig"]
MORE = ["PrefixTuningConfig", "IA3Config", "VeraConfig"]
PLACES = [pytest.param(2, "cpu", marks=pytest.mark.slow), (3, "nvme")]


@pytest.mark.broad
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_other_kinds_train_as_without_an_engine(tuned: Any, nvme_path: Path, kind: str) -> None:
    """Prompts and prefixes that are learnt, ranks that are shared out, vectors that scale."""
    tuned.check(f"{CASES}:other_kinds", zero_config(3, "nvme", nvme_path, threshold=0), kind=kind)


@pytest.mark.parametrize(("stage", "device"), PLACES)
def test_an_adapter_that_comes_later_trains_and_leaves_the_first_as_it_is(
    tuned: Any, nvme_path: Path, stage: int, device: str
) -> None:
    """On the same model, with a Trainer of its own, while nobody has closed the first one's engine."""
    told = tuned.check(f"{CASES}:second_adapter", zero_config(stage, device, nvme_path, threshold=0))
    assert told["changed"] == []
    assert told["trainable"] and all(".later." in name for name in told["trainable"])
    assert any(name.startswith("later ") for name in told["weights"])


@pytest.mark.parametrize(("stage", "device"), PLACES)
def test_merged_weights_are_those_without_an_engine(tuned: Any, nvme_path: Path, stage: int, device: str) -> None:
    """`merge_and_unload` inside `GatheredParameters`: a model that needs no PEFT."""
    told = tuned.check(f"{CASES}:merged", zero_config(stage, device, nvme_path, threshold=0))
    assert told["weights"] and not any("lora" in name for name in told["weights"])


@pytest.mark.parametrize(("stage", "device"), PLACES)
def test_an_adapter_that_was_saved_trains_on_over_a_base_that_is_loaded_again(
    tuned: Any, nvme_path: Path, stage: int, device: str
) -> None:
    tuned.check(f"{CASES}:loaded_again", zero_config(stage, device, nvme_path, threshold=0))
