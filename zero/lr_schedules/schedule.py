"""The base class of all learning-rate schedules.

[Note: iterations] A schedule counts optimizer steps from -1. If it is made with -1, it writes its first value into the
param groups at once. The call of `step()` after optimizer step k (from 0) writes the value of iteration k, for step
k + 1. The float expressions have DeepSpeed's order of operations, so the values are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import ConfigError

PerGroup = float | Sequence[float]


class Schedule:
    """The base class of all schedules: it counts iterations, and writes values into the param groups.

    Args:
        optimizer: a torch optimizer, or a wrapper with one in its attribute `optimizer`.
        last_batch_iteration: the iteration after which to continue; -1 begins, and writes the first value at once.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = self.current_lrs()

    def write_initial(self, lrs: Sequence[float]) -> None:
        """Write the first values, unless the schedule continues after an iteration."""
        if self.last_batch_iteration == -1:
            self.write_lrs(lrs)

    def write_lrs(self, lrs: Sequence[float]) -> None:
        """Write one learning rate into each param group; a rate that is a tensor is changed in place.

        A group that was added after the schedule was made keeps its own rate, as in DeepSpeed.
        """
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr.squeeze() if isinstance(lr, torch.Tensor) else lr)
            else:
                group["lr"] = lr
        self._last_lr = self.current_lrs()

    def get_lr(self) -> list[float]:
        """Learning rate of each param group for `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The learning rates last written; before the first step, the initial ones."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to `last_batch_iteration`, and write its values into the param groups."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self.write_lrs(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Continue after that iteration. As in torch, the optimizer restores the param groups."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        self._last_lr = self.get_lr()

    def current_lrs(self) -> list[Any]:
        """The present learning rates of the param groups; a tensor is copied."""
        values = (group["lr"] for group in self.optimizer.param_groups)
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]

    def per_group(self, name: str, value: PerGroup) -> list[float]:
        """One value for each param group. Raises ConfigError: `value` is a list of another length."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * groups  # type: ignore[list-item]
        if len(value) != groups:
            raise ConfigError(
                f"{type(self).__name__}: {name}: expected {groups} values, one for each param group, got {value}"
            )
        return list(value)


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, or the one inside a wrapper. Raises TypeError: there is none."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise TypeError(f"schedule: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")


def check_integer(schedule: Schedule, name: str, value: object, *, least: int = 1) -> int:
    """The value, if it is an integer of at least `least`; else raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ConfigError(f"{type(schedule).__name__}: {name}: expected an integer of at least {least}, got {value!r}")
