"""`deepspeed.ops.lamb`."""

from zero.compat.unavailable import FusedLamb

__all__ = ["FusedLamb"]
