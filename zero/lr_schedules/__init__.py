"""Learning-rate schedules with DeepSpeed's names, parameters and values; usable with any torch optimizer."""

from __future__ import annotations

from zero.lr_schedules.cycle import LRRangeTest, OneCycle
from zero.lr_schedules.schedule import Schedule, torch_optimizer
from zero.lr_schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(SCHEDULES)

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
