"""`deepspeed.runtime.fp16.onebit.adam`."""

from zero.compat.unavailable import OnebitAdam

__all__ = ["OnebitAdam"]
