"""`deepspeed.ops.adam`."""

from zero.compat.optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
