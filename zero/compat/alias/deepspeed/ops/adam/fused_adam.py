"""`deepspeed.ops.adam.fused_adam`."""

from zero.ops.adam import FusedAdam

__all__ = ["FusedAdam"]
