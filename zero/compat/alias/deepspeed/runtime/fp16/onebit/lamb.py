"""`deepspeed.runtime.fp16.onebit.lamb`."""

from zero.compat.unavailable import OnebitLamb

__all__ = ["OnebitLamb"]
