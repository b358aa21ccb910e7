"""`deepspeed.ops.lion.fused_lion`."""

from zero.ops.lion import FusedLion

__all__ = ["FusedLion"]
