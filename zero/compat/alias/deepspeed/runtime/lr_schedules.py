"""`deepspeed.runtime.lr_schedules`: the schedules, and everything of `zero.compat.schedule_arguments`."""

from zero.compat import schedule_arguments as _arguments
from zero.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    torch_optimizer,
)

get_torch_optimizer = torch_optimizer
__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "get_torch_optimizer",
]


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_arguments, name)
