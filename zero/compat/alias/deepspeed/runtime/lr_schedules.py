"""`deepspeed.runtime.lr_schedules`."""

from zero.compat.schedules import VALID_LR_SCHEDULES

__all__ = ["VALID_LR_SCHEDULES"]
