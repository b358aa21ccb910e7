"""accelerate, unmodified, with a DeepSpeedPlugin: a script trains, saves and resumes as it does without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from client_configs import WARMUP_DECAY, zero_config
from comparing import EPSILON, MARGIN, gap, same_run, spread

CASES = "accelerate_cases"
RUNS = [
    (1, "cpu", None),
    (2, "nvme", None),
    (3, "none", None),
    (3, "nvme", 0),
    *(pytest.param(*run, marks=pytest.mark.slow) for run in ((1, "none", None), (2, "none", None))),
    *(pytest.param(*run, marks=pytest.mark.slow) for run in ((3, "cpu", 0), (3, "nvme", None))),
]

Plain = Callable[..., Any]


@pytest.fixture(scope="module")
def tolerance(plain: Plain) -> float:
    """How far rounding takes the weights of the loop."""
    return spread(plain, f"{CASES}:train", {"fused": True})


@pytest.fixture
def make(nvme_path: Path) -> Callable[..., dict[str, Any]]:
    """The clients' config of a stage, a device and a threshold."""

    def config(stage: int, device: str, threshold: int | None, **more: Any) -> dict[str, Any]:
        return zero_config(stage, device, nvme_path, threshold=threshold, **more)

    return config


@pytest.mark.broad
@pytest.mark.parametrize(("stage", "device", "threshold"), RUNS)
def test_the_loop_trains_and_saves_what_it_does_without(
    clients: Any, plain: Plain, tolerance: float, make: Any, stage: int, device: str, threshold: int | None
) -> None:
    """The engine clips inside backward: accelerate takes the value from the config."""
    config = make(stage, device, threshold, gradient_clipping=0.5)
    ours, theirs = clients.run(f"{CASES}:train", config), plain(f"{CASES}:train")
    assert ours["kind"] == "ZeroEngine" and ours["unwrapped"] == "GPT2LMHeadModel"
    assert same_run(ours, theirs, tolerance) == []
    assert ours["learning_rate"] == theirs["learning_rate"]
    assert ours["state_dict"].keys() == ours["weights"].keys()
    assert gap(ours["state_dict"], ours["weights"]) == 0
    missing = ours["weights"].keys() - ours["save_model"].keys()
    assert len(missing) <= 1 and missing <= {"transformer.wte.weight", "lm_head.weight"}  # tied: one is enough
    assert gap(ours["save_model"], {name: ours["weights"][name] for name in ours["save_model"]}) == 0


@pytest.mark.parametrize(("stage", "device", "threshold"), RUNS)
def test_a_saved_state_is_where_the_run_goes_on(
    clients: Any, tmp_path: Path, make: Any, stage: int, device: str, threshold: int | None
) -> None:
    config = make(stage, device, threshold)
    whole = clients.run(f"{CASES}:save", config, str(tmp_path / "state"))
    resumed = clients.run(f"{CASES}:load", config, str(tmp_path / "state"))
    for column in ("loss", "learning_rate", "grad_norm"):
        assert resumed["after"][column] == whole["after"][column]
    assert gap(resumed["weights"], whole["weights"]) == 0


def test_an_optimizer_that_may_not_be_replaced_trains_on_every_tier(
    clients: Any, plain: Plain, tolerance: float, make: Any
) -> None:
    """accelerate puts DeepSpeed's Adam for the CPU in the place of torch's where states are offloaded, or does not."""
    config = make(3, "nvme", 0, gradient_clipping=0.5, zero_force_ds_cpu_optimizer=False)
    assert same_run(clients.run(f"{CASES}:train", config), plain(f"{CASES}:train"), tolerance) == []


@pytest.mark.parametrize(("stage", "device", "threshold"), [(1, "none", None), (2, "cpu", None), (3, "nvme", 0)])
def test_dummies_stand_for_the_optimizer_and_the_schedule_of_the_config(
    clients: Any, plain: Plain, make: Any, stage: int, device: str, threshold: int | None
) -> None:
    """All "auto" that accelerate lets be: it takes the values from the dummies, and knows of no betas and no eps."""
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    config = make(stage, device, threshold, gradient_clipping=0.5, optimizer=optimizer, scheduler=WARMUP_DECAY)
    ours = clients.run(f"{CASES}:by_config", config)
    rates = [0.0, 0.0, 0.5e-3, 1e-3]  # the least before the first iteration, then up in two
    theirs = plain(f"{CASES}:by_config", rates=rates)
    tolerance = spread(plain, f"{CASES}:by_config", {"fused": True}, rates=rates)
    assert same_run(ours, theirs, tolerance) == []
    assert ours["learning_rate"][:-1] == pytest.approx(theirs["learning_rate"][:-1])


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize(("stage", "device", "threshold"), [(2, "none", None), (3, "nvme", 0)])
def test_mixed_precision_is_weights_in_16_bits_under_an_fp32_master(
    clients: Any, plain: Plain, make: Any, stage: int, device: str, threshold: int | None, dtype: str
) -> None:
    """Beside the same in torch alone, with the same scale of the loss."""

    precision = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    more = {"fp16": {"enabled": True, "initial_scale_power": 8}} if precision == "fp16" else {}
    scale = 2.0**8 if more else 1.0
    config = make(stage, device, threshold, gradient_clipping=0.5, **more)
    ours = clients.run(f"{CASES}:half", config, precision)
    theirs = plain(f"{CASES}:half_by_hand", dtype=dtype, scale=scale)
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    assert ours["skipped"] == 0
    assert all(value.dtype == getattr(torch, dtype) for value in ours["weights"].values())
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=epsilon)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=epsilon)
    largest = max(value.abs().max().item() for value in theirs["weights"].values())
    assert gap(ours["weights"], theirs["weights"]) <= 2 * epsilon * largest


def test_a_second_model_has_a_plugin_and_an_engine_of_its_own(clients: Any, plain: Plain, make: Any) -> None:
    common = {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    ours = clients.run(f"{CASES}:two_models", make(3, "nvme", 0, **common), make(3, "cpu", None, **common))
    assert ours["engines"] == ["ZeroEngine", "ZeroEngine"]
    tolerance = spread(plain, f"{CASES}:two_models", {"fused": True})
    assert same_run(ours, plain(f"{CASES}:two_models"), tolerance) == []


def test_two_models_train_side_by_side(clients: Any, plain: Plain, make: Any) -> None:
    common = {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    ours = clients.run(f"{CASES}:two_that_train", make(2, "nvme", None, **common), make(3, "cpu", 0, **common))
    tolerance = spread(plain, f"{CASES}:two_that_train", {"fused": True})
    assert same_run(ours, plain(f"{CASES}:two_that_train"), tolerance) == []


@pytest.mark.broad
@pytest.mark.parametrize(("stage", "device"), [(2, "cpu"), (3, "nvme")])
def test_two_ranks_train_as_one_with_their_batches(
    clients: Any, plain: Plain, tolerance: float, make: Any, stage: int, device: str
) -> None:
    """Micro-batches go round: two ranks with one each are one rank with two."""
    config = make(stage, device, 0, gradient_clipping=0.5)
    first, second = clients.run_ranks(2, f"{CASES}:train", config)
    theirs = plain(f"{CASES}:train", accumulation=4)
    assert first["ranks"] == second["ranks"] == 2
    assert first["loss"] == second["loss"]
    assert first["grad_norm"] == second["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=16 * EPSILON)
    assert sum(first["loss"]) / 8 == pytest.approx(sum(theirs["loss"]) / 16, rel=16 * EPSILON)
    assert gap(first["weights"], theirs["weights"]) <= MARGIN * tolerance
