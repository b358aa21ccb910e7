"""More than one training in a process, and what users look at beside it, behind the alias."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from client_configs import zero_config
from comparing import EPSILON, gap, same_run
from tuning_checks import need

LIFE, MORE, TRAIN = "trainer_life_cases", "trainer_more_cases", "trainer_cases:train"
PLACES = [pytest.param(2, "cpu", None, marks=pytest.mark.slow), (3, "nvme", 0)]
everywhere = pytest.mark.parametrize(("stage", "device", "threshold"), PLACES)

Plain = Callable[..., Any]


@everywhere
def test_a_search_for_hyperparameters_finds_what_it_finds_without(
    clients: Any, plain: Plain, nvme_path: Path, stage: int, device: str, threshold: int | None
) -> None:
    """Each trial is another model and another engine; the Trainer lets the one before go without a word."""
    need("optuna")
    ours = clients.run(f"{LIFE}:searched", zero_config(stage, device, nvme_path, threshold=threshold))
    theirs = plain(f"{LIFE}:searched")
    assert len(theirs["losses"]) == 3 and ours["best"] == theirs["best"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=16 * EPSILON)


def test_trainers_one_after_another_train_as_in_processes_of_their_own(clients: Any, nvme_path: Path) -> None:
    """Stage 3, 2, none, 3 and 0; nobody closes an engine."""
    configs = [
        zero_config(3, "nvme", nvme_path, threshold=0),
        zero_config(2, "cpu"),
        None,
        zero_config(3, "none"),
        zero_config(0),
    ]
    together = clients.run(f"{LIFE}:one_after_another", None, configs)
    for config, ours in zip(configs, together, strict=True):
        alone = clients.run(TRAIN, config)
        assert ours["model"] == alone["model"]
        assert ours["loss"] == alone["loss"] and ours["grad_norm"] == alone["grad_norm"]
        assert gap(ours["weights"], alone["weights"]) == 0


@pytest.mark.parametrize(
    ("stage", "device", "threshold"), [(3, "nvme", 0), pytest.param(2, "cpu", None, marks=pytest.mark.slow)]
)
def test_a_trainer_resumes_beside_the_one_it_goes_on_from(
    clients: Any, tmp_path: Path, nvme_path: Path, stage: int, device: str, threshold: int | None
) -> None:
    config = zero_config(stage, device, nvme_path, threshold=threshold)
    told = clients.run(f"{LIFE}:resumed_beside", config, str(tmp_path / "out"))
    for column in ("loss", "grad_norm", "learning_rate"):
        assert told["resumed"][column] == told["whole"][column]
    assert gap(told["resumed"]["weights"], told["whole"]["weights"]) == 0


def test_what_the_files_have_not_gets_the_values_of_the_models_own_rule(
    clients: Any, plain: Plain, tmp_path: Path
) -> None:
    clients.run(f"{MORE}:write_model", None, str(tmp_path))
    folder = str(tmp_path / "body")
    ours = clients.run(f"{LIFE}:own_head", zero_config(3, "cpu", threshold=0), folder=folder)["weights"]
    theirs = plain(f"{LIFE}:own_head", folder=folder)["weights"]
    assert (ours["head.weight"] == -3).all() and (ours["head.bias"] == 7).all()
    assert gap(ours, theirs) == 0


def test_a_table_made_of_a_range_is_not_rounded_under_16_bits(clients: Any, plain: Plain) -> None:
    config = zero_config(3, "cpu", bf16={"enabled": True}, fp16={"enabled": False})
    ours, theirs = clients.run(f"{LIFE}:positions", config), plain(f"{LIFE}:positions")
    assert torch.equal(ours["table"], theirs["table"])


@everywhere
def test_single_values_and_a_forward_after_training_are_those_of_the_plain_model(
    clients: Any, plain: Plain, nvme_path: Path, stage: int, device: str, threshold: int | None
) -> None:
    """Of the model itself and of the engine."""
    ours = clients.run(f"{LIFE}:looked_at", zero_config(stage, device, nvme_path, threshold=threshold))
    theirs = plain(f"{LIFE}:looked_at")
    assert ours["item"] == pytest.approx(theirs["item"], rel=1e-6)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-6)
    assert torch.equal(ours["logits"], ours["wrapped"])
    assert (ours["logits"] - theirs["logits"]).abs().max() <= 64 * EPSILON * theirs["logits"].abs().max()


@pytest.mark.parametrize("optim", ["rmsprop", pytest.param("adagrad", marks=pytest.mark.slow)])
@everywhere
def test_another_optimizer_of_the_trainer_trains_and_its_best_checkpoint_is_loaded(
    clients: Any, plain: Plain, tmp_path: Path, nvme_path: Path, stage: int, device: str, threshold: int | None,
    optim: str,
) -> None:  # fmt: skip
    # accelerate puts DeepSpeed's Adagrad in the place of torch's, but its Adam in that of any other.
    forced = None if optim == "adagrad" else False
    config = zero_config(stage, device, nvme_path, threshold=threshold, zero_force_ds_cpu_optimizer=forced)
    case = f"{LIFE}:unusual"
    ours = clients.run(case, config, str(tmp_path / "ours"), optim)
    theirs = plain(case, folder=str(tmp_path / "theirs"), optim=optim)
    other = plain(case, folder=str(tmp_path / "other"), optim=optim, per_device_train_batch_size=4,
                  gradient_accumulation_steps=1)  # fmt: skip
    assert same_run(ours, theirs, gap(theirs["weights"], other["weights"])) == []


def test_checkpoints_that_are_not_there_are_an_error(clients: Any, tmp_path: Path) -> None:
    none, bogus = clients.run(f"{LIFE}:resumed_wrongly", zero_config(3, "cpu"), str(tmp_path))
    assert "No valid checkpoint found in output directory" in none
    assert "checkpoint-5-bogus" in bogus


def test_bf16_is_the_same_on_every_tier_and_near_fp32(clients: Any, plain: Plain, nvme_path: Path) -> None:
    """The Trainer's own argument, told of a device that can."""
    places = [(1, "none", None), (2, "cpu", None), (3, "none", None), (3, "nvme", 0)]
    configs = [zero_config(stage, device, nvme_path, threshold=value) for stage, device, value in places]
    runs = [clients.run(f"{LIFE}:in_bf16", config) for config in configs]
    for run in runs:
        assert run["loss"] == runs[0]["loss"] and run["grad_norm"] == runs[0]["grad_norm"]
        assert gap(run["weights"], runs[0]["weights"]) == 0
    epsilon = torch.finfo(torch.bfloat16).eps
    assert runs[0]["loss"] == pytest.approx(plain(TRAIN, dropout=0.0)["loss"], rel=epsilon)
    assert all(value.dtype == torch.bfloat16 for value in runs[0]["weights"].values())


def test_ranks_that_generate_different_lengths_each_get_their_own_tokens(clients: Any, nvme_path: Path) -> None:
    """`generate` of the model itself, as transformers synchronises it at stage 3."""
    whole = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 2, "fp16": None, "bf16": None}
    lengths = [3, 7]
    found = clients.run_ranks(2, f"{LIFE}:generated", zero_config(3, "nvme", nvme_path, threshold=0, **whole), lengths)
    for rank, length in enumerate(lengths):
        expected = clients.run(f"{LIFE}:generated_plainly", None, rank, length)
        assert torch.equal(found[rank]["tokens"], expected)
