"""What a model's forward is told about how far training is: a curriculum's difficulty, the odds of keeping a layer.

Both are functions of the number of steps, so a resumed run is told what the uninterrupted one was.
[Source: DeepSpeed's CurriculumScheduler and ProgressiveLayerDrop, whose numbers these are]
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
    """The difficulty of a step, as `curriculum_learning` says.

    Args:
        config: the block, as an object of JSON or checked.

    Attributes:
        state: `current_difficulty`, `min_difficulty`, `max_difficulty`, `schedule_type`, as in DeepSpeed.

    Raises ConfigError: the block cannot be.
    """

    def __init__(self, config: Mapping[str, Any] | CurriculumLearning) -> None:
        if isinstance(config, CurriculumLearning):
            block = config
        else:
            checked = load_config({"curriculum_learning": {**config, "enabled": True}}).curriculum_learning
            block = CurriculumLearning() if checked is None else checked
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
        """Of schedule_type "custom": step, counted from 1 -> difficulty."""
        self._custom = schedule_function

    def get_difficulty(self, global_steps: int) -> int:
        """Of the step with this number, counted from 1. Raises StateError: it is custom, and no function is set."""
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
        """`get_difficulty`, kept as the current one. A custom one that has reached the largest stays there."""
        at_end = self.state["current_difficulty"] >= self._largest
        if not (at_end and self._block.schedule_type == "custom"):  # the others may go back, with a checkpoint
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.get_current_difficulty()

    def get_current_difficulty(self) -> int:
        """That of the last update; before it the smallest."""
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        self.state["current_difficulty"] = difficulty

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


class ProgressiveLayerDrop:
    """The probability that a layer stays, from 1 down to `theta`.

    Args:
        theta: what it falls to, 0 < theta <= 1.
        gamma: how fast.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        if not 0 < theta <= 1:
            raise ConfigError(f"ProgressiveLayerDrop: theta: expected more than 0 and at most 1, got {theta}")
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_theta(self) -> float:
        return self.current_theta

    def get_state(self) -> dict[str, Any]:
        """What a forward is given."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def update_state(self, global_step: int) -> None:
        """After `global_step` steps, counted from 0."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta


class ForwardSchedules:
    """Of one engine: what its model's forward is told in training.

    Attributes:
        curriculum_scheduler_legacy: of `curriculum_learning`, by DeepSpeed's name; None: it is off.
        progressive_layer_drop: None: it is off.
    """

    def __init__(self, config: Config) -> None:
        curriculum, drop = config.curriculum_learning, config.progressive_layer_drop
        on = curriculum is not None and curriculum.enabled
        self.curriculum_scheduler_legacy = CurriculumScheduler(curriculum) if curriculum is not None and on else None
        self._tells_length = on and curriculum is not None and curriculum.curriculum_type == "seqlen"
        self.progressive_layer_drop: ProgressiveLayerDrop | None = None
        if drop is not None and drop.enabled:
            self.progressive_layer_drop = ProgressiveLayerDrop(drop.theta, drop.gamma)

    def told(self, global_steps: int) -> dict[str, Any]:
        """Keyword arguments of a forward in training, after so many steps."""
        arguments: dict[str, Any] = {}
        if self.progressive_layer_drop is not None:
            # The probability of DeepSpeed's engine is that of the step before.
            self.progressive_layer_drop.update_state(max(global_steps - 1, 0))
            arguments.update(self.progressive_layer_drop.get_state())
        if self.curriculum_scheduler_legacy is not None:
            difficulty = self.curriculum_scheduler_legacy.update_difficulty(global_steps + 1)
            if self._tells_length:
                arguments["curriculum_seqlen"] = difficulty
        return arguments
