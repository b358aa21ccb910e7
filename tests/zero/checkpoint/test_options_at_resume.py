"""What a job goes on with when its configuration has changed: nothing is lost, and nothing old is written anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train
from models import build, make_config
from snapshot_runs import config_of
from torch import nn

from offload.errors import ConfigError

Open = Callable[..., Any]
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
LION = {"type": "Lion", "params": {"lr": 1e-3}}
RMSPROP = {"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9, "centered": True}}
SGD = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"optimizer": LION}, {"optimizer": ADAM}),
        ({"optimizer": ADAM}, {"optimizer": LION}),
        ({"optimizer": SGD}, {"optimizer": ADAM}),
        ({"ema_decay": 0.9}, {}),
        ({}, {"ema_decay": 0.9}),
    ],
)
def test_a_snapshot_whose_states_are_others_is_refused_and_stays(
    open_engine: Open, nvme_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    train(open_engine(build("gpt"), config_of(nvme_path, **first)), 0, 1).close()
    with pytest.raises(ConfigError, match="another layout"):
        open_engine(build("gpt"), config_of(nvme_path, **second))
    engine = open_engine(build("gpt"), config_of(nvme_path, **first))
    assert engine.load_snapshot() == 2


def in_groups(model: nn.Module, apart: bool) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1 or not apart]
    others = [p for p in model.parameters() if p.ndim <= 1 and apart]
    return [{"params": params} for params in (decayed, others) if params]


def test_other_param_groups_are_refused_before_anything_is_read(open_engine: Open, nvme_path: Path) -> None:
    model = build("gpt")
    train(open_engine(model, config_of(nvme_path), model_parameters=in_groups(model, False)), 0, 1).close()
    model = build("gpt")
    engine = open_engine(model, config_of(nvme_path), model_parameters=in_groups(model, True))
    before = {name: value.clone() for name, value in engine.named_full_parameters()}
    with pytest.raises(ConfigError, match="load_snapshot: expected 1 param groups as in the snapshot, got 2"):
        engine.load_snapshot()
    assert all(torch.equal(value, before[name]) for name, value in engine.named_full_parameters())
    engine.close()
    model = build("gpt")
    engine = open_engine(model, config_of(nvme_path), model_parameters=in_groups(model, False))
    assert engine.load_snapshot() == 2


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        (
            {"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9, "centered": True}},
            {"type": "RMSprop"},
            "momentum",
        ),
        (SGD, {"type": "SGD", "params": {"lr": 1e-2}}, "momentum"),
        ({"type": "SGD", "params": {"lr": 1e-2}}, SGD, "momentum"),
        ({"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": True}}, ADAM, "amsgrad"),
        ({"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}, ADAM, "decoupled"),
    ],
)
def test_options_that_say_which_states_there_are_stay_the_configurations(
    open_engine: Open, tmp_path: Path, nvme_path: Path, first: dict[str, Any], second: dict[str, Any], key: str
) -> None:
    engine = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path, optimizer=first))
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "saves")
    engine.close()
    engine = open_engine(build("gpt"), make_config(("cpu", "cpu"), nvme_path, optimizer=second))
    before = engine.optimizer.param_groups[0].get(key)
    engine.load_checkpoint(tmp_path / "saves")
    assert engine.optimizer.param_groups[0].get(key) == before
    train(engine, 2, 3)
    engine.save_checkpoint(tmp_path / "again")


class Counting(nn.Module):
    """A weight that is not trained changes in each forward, as a teacher's or a codebook's does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("gpt")
        self.seen = nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(0.5)
        return self.inner(text)


@pytest.mark.parametrize("frozen", ["once", "reference", "always"])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_not_trained_is_saved_as_it_is_now(
    open_engine: Open, tmp_path: Path, nvme_path: Path, frozen: str, stage: int
) -> None:
    def started() -> Any:
        zero_block = {"stage": stage, "stage3_param_persistence_threshold": 1000}
        config = make_config(("none", "none"), nvme_path, zero=zero_block)
        return open_engine(Counting(), {**config, "checkpoint": {"frozen": frozen}})

    engine = started()
    for index in range(2):
        train(engine, index, index)
        engine.save_checkpoint(tmp_path / "saves", str(index))
    seen = engine.full_parameter("seen").clone()
    assert seen[0] > 0
    if frozen != "reference":
        engine.close()
        engine = started()
    engine.load_checkpoint(tmp_path / "saves", "1")  # refused if what it refers to is not what there is
    assert torch.equal(engine.full_parameter("seen"), seen)
