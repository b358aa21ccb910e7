"""Schedules that begin with a rising learning rate."""

from __future__ import annotations

import logging
import math
from typing import Any

from offload.errors import ConfigError
from zero.lr_schedules.schedule import PerGroup, Schedule, check_integer

logger = logging.getLogger("zero")

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
