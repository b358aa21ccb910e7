"""Learning-rate schedules with DeepSpeed's names, parameters and values; usable with any torch optimizer.

[Note: iterations] A schedule counts optimizer steps from -1. If it is made with -1, it writes its first value into the
param groups at once. The call of `step()` after optimizer step k (from 0) writes the value of iteration k, for step
k + 1. The float expressions have DeepSpeed's order of operations, so the values are equal bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import ConfigError

__all__ = [
    "SCHEDULES",
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "torch_optimizer",
]


logger = logging.getLogger("zero")

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


# ---- warmup --------------------------------------------------------------------------------------------------------
# Schedules that begin with a rising learning rate.


LOG, LINEAR = "log", "linear"
LEAST_STEPS = 2


class _Warmup(Schedule):
    """The rising part of schedules with a warmup. Fewer than two iterations count as two; DeepSpeed refuses 0."""

    def __init__(self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_type not in (LOG, LINEAR):
            raise ConfigError(f'{type(self).__name__}: warmup_type: expected "log" or "linear", got {warmup_type!r}')
        self.warmup_type = warmup_type
        self.warmup_num_steps = max(LEAST_STEPS, check_integer(self, "warmup_num_steps", warmup_num_steps, least=0))
        if warmup_num_steps == 0:
            logger.warning(
                "%s: warmup_num_steps is 0 and counts as %s, so the first steps have lower learning rates; to train "
                "without a warmup, leave the scheduler out",
                type(self).__name__,
                LEAST_STEPS,
            )
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)

    def _warmup_share(self) -> float | None:
        """Share of the rise; None when the warmup is over."""
        if self.last_batch_iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == LINEAR:
            return self.last_batch_iteration / self.warmup_num_steps
        return self.inverse_log_warm_up * math.log(self.last_batch_iteration + 1)

    def _warn_short_total(self, total_num_steps: int) -> None:
        if total_num_steps < self.warmup_num_steps:
            logger.warning(
                "%s: total_num_steps %s is less than warmup_num_steps %s, so training ends before it reaches the "
                "largest learning rate",
                type(self).__name__,
                total_num_steps,
                self.warmup_num_steps,
            )


class WarmupLR(_Warmup):
    """A rise from the smallest learning rate to the largest, which then stays.

    Args:
        optimizer: a torch optimizer.
        warmup_min_lr: smallest rate; one number, or one for each param group.
        warmup_max_lr: largest rate, likewise; None: the present rates of the param groups.
        warmup_num_steps: number of iterations of the rise; 0 and 1 count as 2.
        warmup_type: "log" (iteration i: log(i + 1) / log(warmup_num_steps) of the rise) or "linear".
        last_batch_iteration: the iteration after which to continue; -1 begins.

    Raises:
        ConfigError: a wrong value.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = LOG,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.min_lrs = self.per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self.current_lrs() if warmup_max_lr is None else self.per_group("warmup_max_lr", warmup_max_lr)
        self.delta_lrs = [most - least for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]
        self.write_initial(self.min_lrs)

    def get_lr(self) -> list[float]:
        """Rates between smallest and largest; before the first iteration the smallest."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        rise = self._warmup_share()
        share = self._share_after_warmup() if rise is None else rise
        return [least + delta * share for least, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]

    def _share_after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Like `WarmupLR`, followed by a linear decay to the smallest learning rate, which is reached at `total_num_steps`.

    Args:
        optimizer: a torch optimizer.
        total_num_steps: number of iterations of the whole training.
        warmup_min_lr: one number, or one for each param group.
        warmup_max_lr: likewise.
        warmup_num_steps: number of iterations of the warmup; 0 and 1 count as 2.
        warmup_type: "log" or "linear".
        last_batch_iteration: the iteration after which to continue; -1 begins.

    Raises:
        ConfigError: a wrong value.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = LOG,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self._warn_short_total(total_num_steps)

    def _share_after_warmup(self) -> float:
        remaining = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, remaining / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(_Warmup):
    """Shares of the param groups' learning rates: a warmup to the full rates, then a decay along a cosine.

    Args:
        optimizer: a torch optimizer.
        total_num_steps: number of iterations of the whole training.
        warmup_min_ratio: share at the begin of the warmup (the very first step, as in DeepSpeed, has 0).
        warmup_num_steps: number of iterations of the warmup; 0 and 1 count as 2.
        cos_min_ratio: share at the end of the cosine, which then stays.
        warmup_type: "log" or "linear".
        last_batch_iteration: the iteration after which to continue; -1 begins.

    Raises:
        ConfigError: a wrong value.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = LOG,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = self.current_lrs()
        self._warn_short_total(total_num_steps)
        self.write_initial(self.get_lr())

    def get_lr_ratio(self) -> float:
        """Share of the groups' learning rates for `last_batch_iteration`."""
        if self.last_batch_iteration < 0:
            return 0.0
        rise = self._warmup_share()
        if rise is not None:
            return self.warmup_min_ratio + rise * (1.0 - self.warmup_min_ratio)
        done = (self.last_batch_iteration - self.warmup_num_steps + 1) / max(
            1, self.total_num_steps - self.warmup_num_steps
        )
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


# ---- cycle ---------------------------------------------------------------------------------------------------------
# A schedule to find a learning rate, and a schedule that rises and falls once.


SECOND_BETA = 0.99  # OneCycle cycles the first beta, and sets the second to this.


class LRRangeTest(Schedule):
    """A learning rate that grows without limit, to find the largest one with which a model trains.

    Iteration i has `min_lr * (1 + step_rate * (i + 1) / step_size)`.

    Args:
        optimizer: a torch optimizer.
        lr_range_test_min_lr: the first rate; one number, or one for each param group.
        lr_range_test_step_size: number of iterations in which it grows by `step_rate` times `min_lr`.
        lr_range_test_step_rate: see above.
        lr_range_test_staircase: grow once every `step_size` iterations instead of in each.
        last_batch_iteration: the iteration after which to continue; -1 begins.

    Raises:
        ConfigError: a wrong value.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self.per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = check_integer(self, "lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        self.write_initial(self.min_lr)

    def get_lr(self) -> list[float]:
        interval = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lr]


class OneCycle(Schedule):
    """One cycle from the smallest learning rate to the largest and back, then decay; momentum moves the other way.

    Momentum is the first of a group's `betas`; the second is set to 0.99. An optimizer without betas keeps its
    momentum, with a warning. As in DeepSpeed, the very first iteration has `cycle_min_mom`.

    Args:
        optimizer: a torch optimizer.
        cycle_min_lr: learning rate at both ends of the cycle; one number, or one for each param group.
        cycle_max_lr: learning rate at its top.
        decay_lr_rate: j iterations after the cycle the rate is `cycle_min_lr / (1 + rate * j / decay_step_size)`.
        cycle_first_step_size: number of iterations of the rising half.
        cycle_second_step_size: the same for the falling half; None: equal to the first.
        cycle_first_stair_count: number of stairs in the rising half; 0: it rises in each iteration.
        cycle_second_stair_count: the same for the falling half; None: equal to the first.
        decay_step_size: see `decay_lr_rate`; 0: no decay.
        cycle_momentum: cycle momentum too.
        cycle_min_mom: momentum at the top of the cycle.
        cycle_max_mom: momentum at both ends.
        decay_mom_rate: like `decay_lr_rate`, but momentum is multiplied by the factor.
        last_batch_iteration: the iteration after which to continue; -1 begins.

    Raises:
        ConfigError: a wrong value.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.first_step_size = float(cycle_first_step_size)
        self.second_step_size = (
            self.first_step_size if cycle_second_step_size is None else float(cycle_second_step_size)
        )
        if self.first_step_size <= 0 or self.second_step_size < 0:
            raise ConfigError(
                "OneCycle: expected cycle_first_step_size above 0 and cycle_second_step_size of at least 0, got "
                f"{self.first_step_size} and {self.second_step_size}"
            )
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self.per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self.per_group("cycle_max_lr", cycle_max_lr)
        self.min_moms = self.per_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self.per_group("cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and self._has_betas()
        self.write_initial(self.min_lrs)
        if self.cycle_momentum and last_batch_iteration == -1:
            self._write_momentum(self.min_moms)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [least + (most - least) * scale for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]
        factor = self._decay(self.decay_lr_rate)
        return self.min_lrs if factor is None else [lr / factor for lr in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """`betas` of each param group for `last_batch_iteration`; None if momentum is not cycled."""
        return [(mom, SECOND_BETA) for mom in self._momentum()] if self.cycle_momentum else None

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to `batch_iteration`."""
        super().step(batch_iteration)
        if self.cycle_momentum:
            self._write_momentum(self._momentum())

    def _momentum(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [most - (most - least) * scale for least, most in zip(self.min_moms, self.max_moms, strict=True)]
        factor = self._decay(self.decay_mom_rate)
        return self.max_moms if factor is None else [mom * factor for mom in self.max_moms]

    def _write_momentum(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=False):
            group["betas"] = (momentum, SECOND_BETA)

    def _has_betas(self) -> bool:
        if all("betas" in group for group in self.optimizer.param_groups):
            return True
        name = type(self.optimizer).__name__
        logger.warning(
            "OneCycle: cycle_momentum has no effect, because %s has no betas; its momentum stays as it is", name
        )
        return False

    def _decay(self, rate: float) -> float | None:
        """1 + rate * (intervals since the cycle); None if there is no decay."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return None
        return 1 + rate * ((self.last_batch_iteration - self.total_size + 1) / self.decay_step_size)

    def _scale(self) -> float:
        """The position in the cycle: 0 at its ends, 1 at its top."""
        position = self.last_batch_iteration + 1
        cycle = math.floor(1 + position / self.total_size)
        share = 1.0 + position / self.total_size - cycle
        rising = share <= self.step_ratio
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs <= 0:
            return share / self.step_ratio if rising else (share - 1) / (self.step_ratio - 1)
        # Computed from numbers of iterations, since rounding may put the shares above just below a stair.
        position_in_cycle = position % self.total_size
        if position_in_cycle <= self.first_step_size:
            return math.floor(position_in_cycle * stairs / self.first_step_size) / stairs
        return math.floor((self.total_size - position_in_cycle) * stairs / self.second_step_size) / stairs


SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(SCHEDULES)
