"""TRL on two ranks, reference models that follow, and generation by an engine that trains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from client_configs import zero_config
from tuning_checks import check_weights, same

pytest.importorskip("trl", reason="trl is not installed")

RANKS = "tuning_rank_cases"
ALONE = {"gradient_accumulation_steps": 1}
"""Micro-batches go round: two ranks with one each are one rank with two."""


@pytest.mark.broad
@pytest.mark.parametrize(
    ("case", "stage", "device"),
    [
        ("sft", 3, "nvme"),
        *(
            pytest.param(*c, marks=pytest.mark.slow)
            for c in (("sft", 2, "cpu"), ("sft", 3, "none"), ("dpo", 3, "nvme"))
        ),
    ],
)
def test_two_ranks_train_as_one_without_an_engine(
    tuned: Any, nvme_path: Path, case: str, stage: int, device: str
) -> None:
    config = zero_config(stage, device, nvme_path, threshold=0)
    first, second = tuned.ranks(2, f"{RANKS}:{case}_rank", config, **ALONE)
    expected, moved = tuned.plain(f"tuning_cases:{case}"), tuned.plain(f"tuning_cases:{case}", ulps=1)
    assert first["engine"] == second["engine"] == "zero"
    for name in ("loss", "grad_norm"):
        same(name, *(torch.tensor(run[name], dtype=torch.float64) for run in (first, expected, moved)))
        assert first[name] == second[name]
    check_weights(first, expected, moved)


@pytest.mark.slow
def test_two_ranks_generate_and_train_on_what_they_wrote(tuned: Any, nvme_path: Path) -> None:
    """Each draws tokens of its own, so there is no plain run to compare with: the ranks have to agree."""
    first, second = tuned.ranks(2, f"{RANKS}:grpo_rank", zero_config(3, "nvme", nvme_path, threshold=0), **ALONE)
    assert len(first["rewards"]) == 4 and first["rewards"] == second["rewards"]
    assert first["grad_norm"] == second["grad_norm"] and min(first["grad_norm"]) > 0


@pytest.mark.parametrize(
    ("case", "stage", "device"),
    [("dpo", 3, "nvme"), *(pytest.param(*c, marks=pytest.mark.slow) for c in (("dpo", 2, "cpu"), ("grpo", 3, "nvme")))],
)
def test_a_reference_model_follows_as_without_an_engine(
    tuned: Any, nvme_path: Path, case: str, stage: int, device: str
) -> None:
    """`sync_ref_model`: the weights of an engine that only looks are changed in place at each step."""
    config = zero_config(stage, device, nvme_path, threshold=0)
    told = tuned.check(f"tuning_cases:{case}", config, sync_ref_model=True, ref_model_sync_steps=1)
    with pytest.raises(AssertionError, match="weights: "):  # the reference has moved
        check_weights(told, tuned.plain(f"tuning_cases:{case}"), tuned.plain(f"tuning_cases:{case}", ulps=1))


@pytest.mark.parametrize(("stage", "device"), [(3, "nvme")])
def test_an_engine_that_trains_nothing_generates_as_without(
    tuned: Any, nvme_path: Path, stage: int, device: str
) -> None:
    """GRPO's evaluation alone: TRL takes the hooks off by the engine's optimizer, and there is none."""
    told = tuned.engine(f"{RANKS}:grpo_evaluated", zero_config(stage, device, nvme_path, threshold=0))
    expected = tuned.plain(f"{RANKS}:grpo_evaluated")
    assert told["engine"] == "zero"
    assert told["eval_reward"] == expected["eval_reward"]
