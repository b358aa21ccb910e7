"""`curriculum_learning` and `progressive_layer_drop`: a model's forward is told DeepSpeed's numbers, resumed or not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from offload.errors import ConfigError, StateError
from zero.data.forward_schedules import CurriculumScheduler, ProgressiveLayerDrop

LINEAR = {
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}
ROOT = {**LINEAR, "schedule_type": "fixed_root", "schedule_config": {**LINEAR["schedule_config"], "root_degree": 2}}
DISCRETE = {
    **LINEAR,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [8, 16, 64], "max_step": [2, 5]},
}


class Listens(nn.Module):
    """Keeps what its forward was told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.heard: list[dict[str, Any]] = []

    def forward(self, x: Tensor, **told: Any) -> Tensor:
        self.heard.append(told)
        return self.linear(x).sum()


def engine_of(blocks: dict[str, Any]) -> Any:
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **blocks}
    return zero.initialize(model=Listens(), config=config)[0]


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 4)))
        engine.step()


def heard(engine: Any) -> list[dict[str, Any]]:
    return list(engine.module.heard)


# What DeepSpeed 0.19.8's scheduler gives for steps 1, 2, ...
LENGTHS = {
    "linear": (LINEAR, [8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64]),
    "root": (ROOT, [24, 32, 32, 40, 40, 48, 48, 56, 56, 64, 64, 64]),
    "discrete": (DISCRETE, [8, 8, 16, 16, 16, 64, 64, 64, 64, 64, 64, 64]),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_the_forward_of_each_step_is_told_its_sequence_length(kind: str) -> None:
    block, lengths = LENGTHS[kind]
    with engine_of({"curriculum_learning": {"enabled": True, **block}}) as engine:
        train(engine, len(lengths))
        assert heard(engine) == [{"curriculum_seqlen": length} for length in lengths]
        assert engine.curriculum_scheduler_legacy.get_current_difficulty() == lengths[-1]


def test_all_micro_batches_of_a_step_are_told_the_same() -> None:
    block = {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 1}
    with engine_of({**block, "curriculum_learning": {"enabled": True, **LINEAR}}) as engine:
        train(engine, 6)
        assert [told["curriculum_seqlen"] for told in heard(engine)] == [8] * 3 + [16] * 3


def test_a_custom_schedule_is_asked_with_the_step_and_without_one_says_how_to_set_it() -> None:
    block = {**LINEAR, "schedule_type": "custom", "schedule_config": {}}
    with engine_of({"curriculum_learning": {"enabled": True, **block}}) as engine:
        with pytest.raises(StateError, match="set_custom_get_difficulty"):
            train(engine, 1)
        engine.curriculum_scheduler_legacy.set_custom_get_difficulty(lambda step: 10 * step)
        train(engine, 3)
        assert [told["curriculum_seqlen"] for told in heard(engine)] == [10, 20, 30]


@pytest.mark.parametrize("theta", [0, 0.25, 1])
def test_layers_stay_with_deepspeeds_probability(theta: float) -> None:
    with engine_of({"pld": {"enabled": True, "theta": theta, "gamma": 0.5}}) as engine:
        train(engine, 5)
        decayed = [(1 - theta) * math.exp(-0.5 * step) + theta for step in (0, 0, 1, 2, 3)]
        assert heard(engine) == [{"progressive_layer_drop": True, "pld_theta": theta} for theta in decayed]


def test_evaluation_and_what_is_off_are_told_nothing() -> None:
    blocks = {"curriculum_learning": {"enabled": True, **LINEAR}, "progressive_layer_drop": {"enabled": True}}
    with engine_of(blocks) as engine:
        engine.eval()
        engine(torch.ones(1, 4))
        assert heard(engine) == [{}]
    with engine_of({"curriculum_learning": {**LINEAR, "enabled": False}}) as engine:
        train(engine, 1)
        assert heard(engine) == [{}]
        assert engine.curriculum_scheduler_legacy is engine.progressive_layer_drop is None


@pytest.mark.parametrize("back", [False, True])
def test_a_loaded_run_goes_on_where_it_was_saved(tmp_path: Path, back: bool) -> None:
    """Also where the engine that loads has been further: at the end of the curriculum."""
    blocks = {"curriculum_learning": {"enabled": True, **LINEAR}, "pld": {"enabled": True, "theta": 0.5, "gamma": 0.1}}
    with engine_of(blocks) as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
        train(engine, 12 if back else 2)
        expected = heard(engine)[3:5]
        if back:
            engine.load_checkpoint(tmp_path)
            train(engine, 2)
            assert heard(engine)[-2:] == expected
            return
    with engine_of(blocks) as engine:
        engine.load_checkpoint(tmp_path)
        train(engine, 2)
        assert heard(engine) == expected


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"max_difficulty": None}, "max_difficulty"),
        ({"schedule_config": {"total_curriculum_step": 10}}, "schedule_config.difficulty_step"),
        ({"schedule_type": "fixed_root"}, "schedule_config.root_degree"),
        ({"schedule_type": "fixed_discrete"}, "schedule_config.difficulty"),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1, 2], "max_step": [3, 4]}},
            "schedule_config.max_step",
        ),
    ],
)
def test_a_curriculum_that_cannot_be_names_the_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"curriculum_learning.{key}"):
        engine_of({"curriculum_learning": {"enabled": True, **LINEAR, **change}})


def test_the_classes_work_without_an_engine() -> None:
    scheduler = CurriculumScheduler(LINEAR)
    assert [scheduler.update_difficulty(step) for step in (1, 5, 99)] == [8, 32, 64]
    scheduler.set_state({**scheduler.get_state(), "current_difficulty": 16})
    assert scheduler.get_current_difficulty() == 16
    with pytest.raises(ConfigError, match="theta"):
        ProgressiveLayerDrop(theta=-0.1)
