"""`deepspeed.ops.adam.fused_adam`."""

from zero.compat.optimizers import FusedAdam

__all__ = ["FusedAdam"]
