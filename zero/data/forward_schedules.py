"""Arguments of a model's forward that depend on the step: a curriculum's difficulty, the probability to keep a layer.

Both are functions of the number of steps, so a resumed run gets the same values as an uninterrupted one.
[Source: DeepSpeed's CurriculumScheduler and ProgressiveLayerDrop, with equal values]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from offload.errors import ConfigError, StateError
from zero.config import Config
from zero.config.forward_block import CurriculumLearning
from zero.config.loading import load_config


class CurriculumScheduler:
    """The difficulty of a step, from the block `curriculum_learning`.

    Args:
        config: the block, as a JSON object, or already checked.

    Attributes:
        state: `current_difficulty`, `min_difficulty`, `max_difficulty`, `schedule_type`, as in DeepSpeed.

    Raises ConfigError: the block is wrong.
    """

    def __init__(self, config: Mapping[str, Any] | CurriculumLearning) -> None:
        if isinstance(config, CurriculumLearning):
            block = config
        else:
            loaded = load_config({"curriculum_learning": {**config, "enabled": True}}).curriculum_learning
            block = CurriculumLearning() if loaded is None else loaded
        self._block = block
        self._smallest, self._largest = block.min_difficulty or 1, block.max_difficulty or 1
        self._custom: Callable[[int], int] | None = None
        self.state: dict[str, Any] = {
            "current_difficulty": self._smallest,
            "min_difficulty": self._smallest,
            "max_difficulty": self._largest,
            "schedule_type": block.schedule_type,
        }

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of schedule_type "custom": step, counted from 1 -> difficulty."""
        self._custom = schedule_function

    def get_difficulty(self, global_steps: int) -> int:
        """Difficulty of a step, counted from 1. Raises StateError: the type is custom, and no function is set."""
        kind, steps = self._block.schedule_type, self._block.schedule_config
        if kind == "custom":
            if self._custom is None:
                raise StateError(
                    'curriculum_learning: schedule_type "custom" has no function; call '
                    "engine.curriculum_scheduler_legacy.set_custom_get_difficulty(function) before the first forward"
                )
            return self._custom(global_steps)
        if kind == "fixed_discrete":
            ends, difficulties = steps.max_step or (), steps.difficulty or ()
            return next(
                (d for d, end in zip(difficulties, ends, strict=False) if global_steps <= end), difficulties[-1]
            )
        degree = steps.root_degree if kind == "fixed_root" else 1
        share: float = (float(global_steps) / (steps.total_curriculum_step or 1)) ** (1.0 / (degree or 1))
        difficulty = math.floor(share * (self._largest - self._smallest) + self._smallest)
        return min(difficulty - difficulty % (steps.difficulty_step or 1), self._largest)

    def update_difficulty(self, global_steps: int) -> int:
        """Store the result of `get_difficulty` as current. A custom schedule at the largest difficulty stays there."""
        at_end = self.state["current_difficulty"] >= self._largest
        if not (at_end and self._block.schedule_type == "custom"):  # others may fall again, after a checkpoint's load
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.get_current_difficulty()

    def get_current_difficulty(self) -> int:
        """The difficulty of the last update; the smallest one before the first."""
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        self.state["current_difficulty"] = difficulty

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


class ProgressiveLayerDrop:
    """The probability to keep a layer, which falls from 1 to `theta`.

    Args:
        theta: its limit, 0 <= theta <= 1.
        gamma: rate of the fall.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        if not 0 <= theta <= 1:
            raise ConfigError(f"ProgressiveLayerDrop: theta: expected at least 0 and at most 1, got {theta}")
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_theta(self) -> float:
        return self.current_theta

    def get_state(self) -> dict[str, Any]:
        """The keyword arguments of a forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def update_state(self, global_step: int) -> None:
        """Set the probability after `global_step` steps; 0: before the first step."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta


class ForwardSchedules:
    """The step-dependent arguments of an engine's forward in training.

    Attributes:
        curriculum_scheduler_legacy: for `curriculum_learning`, with DeepSpeed's name; None: it is off.
        progressive_layer_drop: None: it is off.
    """

    def __init__(self, config: Config) -> None:
        curriculum, drop = config.curriculum_learning, config.progressive_layer_drop
        is_enabled = curriculum is not None and curriculum.enabled
        self.curriculum_scheduler_legacy = (
            CurriculumScheduler(curriculum) if curriculum is not None and is_enabled else None
        )
        self._passes_length = is_enabled and curriculum is not None and curriculum.curriculum_type == "seqlen"
        self.progressive_layer_drop: ProgressiveLayerDrop | None = None
        if drop is not None and drop.enabled:
            self.progressive_layer_drop = ProgressiveLayerDrop(drop.theta, drop.gamma)

    def forward_arguments(self, global_steps: int) -> dict[str, Any]:
        """Keyword arguments of a forward in training, after `global_steps` steps."""
        arguments: dict[str, Any] = {}
        if self.progressive_layer_drop is not None:
            # DeepSpeed's engine uses the probability of the previous step.
            self.progressive_layer_drop.update_state(max(global_steps - 1, 0))
            arguments.update(self.progressive_layer_drop.get_state())
        if self.curriculum_scheduler_legacy is not None:
            difficulty = self.curriculum_scheduler_legacy.update_difficulty(global_steps + 1)
            if self._passes_length:
                arguments["curriculum_seqlen"] = difficulty
        return arguments
