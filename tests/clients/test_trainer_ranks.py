"""The Trainer on two ranks behind the alias: together they train as one with all the batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_configs import zero_config
from comparing import same_run, trainer_spread

TRAIN = "trainer_cases:train"
Plain = Callable[..., Any]


@pytest.mark.parametrize(("stage", "device", "threshold"), [(2, "cpu", None), (3, "none", None), (3, "nvme", 0)])
def test_two_ranks_train_as_one_plain_trainer_with_their_batches(
    clients: Any, plain: Plain, nvme_path: Path, stage: int, device: str, threshold: int | None
) -> None:
    config = zero_config(stage, device, nvme_path, threshold=threshold)
    ours, beside = clients.run_ranks(2, "trainer_more_cases:ranks", config, gradient_accumulation_steps=1)
    assert ours["ranks"] == beside["ranks"] == 2
    theirs = plain(TRAIN, evaluates=True, dropout=0.0)  # micro-batches of 2 go round: one to each rank
    assert same_run(ours, theirs, trainer_spread(plain)) == []
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-6)
