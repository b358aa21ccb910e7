"""QLoRA with bitsandbytes itself: adapters on a base in 4 and 8 bits train and evaluate as without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from client_configs import zero_config
from tuning_checks import need

pytest.importorskip("peft", reason="peft is not installed")

QLORA = "quantised_cases:qlora"
USUAL = [(2, "cpu", None), (3, "nvme", 0)]
MORE = [(1, "none", None), (3, "none", 0), (3, "cpu", 0), (3, "cpu", None)]
PLACES = [*USUAL, *(pytest.param(*place, marks=pytest.mark.slow) for place in MORE)]
QUANTISED = 14
"""Linear layers in the blocks; transformers leaves the head as it is."""


@pytest.fixture(autouse=True)
def _library() -> None:
    need("bitsandbytes", "peft")


@pytest.mark.parametrize(("stage", "device", "threshold"), PLACES)
def test_adapters_on_a_4_bit_base_train_as_without_an_engine(
    tuned: Any, nvme_path: Path, stage: int, device: str, threshold: int | None
) -> None:
    """NF4 with double quantisation, gradient checkpointing, and the model prepared as the tutorial does."""
    told = tuned.check(QLORA, zero_config(stage, device, nvme_path, threshold=threshold))
    assert told["codes"] == QUANTISED and told["changed"] == []
    assert told["eval_loss"] == pytest.approx(tuned.plain(QLORA)["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "device"), [(3, "nvme"), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((2, "cpu"), (3, "none")))]
)
def test_adapters_on_an_8_bit_base_train_as_without_an_engine(
    tuned: Any, nvme_path: Path, stage: int, device: str
) -> None:
    told = tuned.check(QLORA, zero_config(stage, device, nvme_path, threshold=0), bits=8)
    assert told["codes"] == QUANTISED and told["changed"] == []


@pytest.mark.parametrize("storage", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_codes_that_are_stored_as_floats_keep_every_bit(tuned: Any, nvme_path: Path, storage: str) -> None:
    """`bnb_4bit_quant_storage`, which manuals of sharding ask for; some of the bytes are no numbers."""
    told = tuned.check(QLORA, zero_config(3, "nvme", nvme_path, threshold=0), storage=storage)
    assert told["codes"] == QUANTISED and told["changed"] == []


def test_codes_that_are_stored_as_floats_of_another_dtype_are_not_cast(tuned: Any, nvme_path: Path) -> None:
    """bf16 storage under fp16: a cast would decode other weights."""
    fp16 = {"enabled": "auto", "initial_scale_power": 8}
    places = [(2, "cpu", None), (3, "nvme", 0)]
    configs = [zero_config(stage, device, nvme_path, threshold=value, fp16=fp16) for stage, device, value in places]
    runs = [tuned.engine(QLORA, config, storage="bfloat16", fp16=True) for config in configs]
    expected = tuned.plain(QLORA, storage="bfloat16")["loss"]
    for run in runs:
        assert run["changed"] == [] and run["codes"] == QUANTISED
        assert run["loss"] == runs[0]["loss"] == pytest.approx(expected, rel=2 * 2.0**-10)
