"""What all learning-rate schedules have in common.

[Note: iterations] A schedule counts optimizer steps from -1. Made with -1 it writes its first value into the param
groups at once. The call of `step()` after optimizer step k (from 0) writes the value of iteration k, for step k + 1.
The float expressions are in DeepSpeed's order of operations: the values are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import ConfigError

PerGroup = float | Sequence[float]


class Schedule:
    """What all schedules have in common: the count of iterations, and writing values into the param groups.

    Args:
        optimizer: a torch optimizer, or a wrapper with one in its attribute `optimizer`.
        last_batch_iteration: the iteration to go on after; -1 begins, and writes the first value at once.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = self.current()

    def begin(self, lrs: Sequence[float]) -> None:
        """Write the first values, unless the schedule goes on after an iteration."""
        if self.last_batch_iteration == -1:
            self.write(lrs)

    def write(self, lrs: Sequence[float]) -> None:
        """Put one learning rate into each param group; one that is a tensor keeps its place.

        A group that has joined since the schedule was made keeps its own, as with DeepSpeed.
        """
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr.squeeze() if isinstance(lr, torch.Tensor) else lr)
            else:
                group["lr"] = lr
        self._last_lr = self.current()

    def get_lr(self) -> list[float]:
        """Learning rate of each param group for `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Learning rates as last written; before the first step those the schedule began with."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """The next iteration, or the one that is named: write its values into the param groups."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self.write(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Go on after that iteration. As with torch, the param groups are the optimizer's to restore."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        self._last_lr = self.get_lr()

    def current(self) -> list[Any]:
        """What the param groups have now; a tensor is copied."""
        values = (group["lr"] for group in self.optimizer.param_groups)
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]

    def per_group(self, name: str, value: PerGroup) -> list[float]:
        """One value for each param group. Raises ConfigError: a list of another length."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * groups  # type: ignore[list-item]
        if len(value) != groups:
            raise ConfigError(
                f"{type(self).__name__}: {name}: expected {groups} values, one a param group, got {value}"
            )
        return list(value)


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, or the one inside a wrapper. Raises TypeError: there is none."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise TypeError(f"schedule: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")


def integer(schedule: Schedule, name: str, value: object, *, least: int = 1) -> int:
    """The value, if it is an integer of at least `least`; else raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ConfigError(f"{type(schedule).__name__}: {name}: expected an integer of at least {least}, got {value!r}")
