"""A schedule to find a learning rate, and a schedule that rises and falls once."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from offload.errors import ConfigError
from zero.lr_schedules.schedule import PerGroup, Schedule, check_integer

logger = logging.getLogger("zero")

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
