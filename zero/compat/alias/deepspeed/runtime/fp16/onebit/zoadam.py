"""`deepspeed.runtime.fp16.onebit.zoadam`."""

from zero.compat.unavailable import ZeroOneAdam

__all__ = ["ZeroOneAdam"]
