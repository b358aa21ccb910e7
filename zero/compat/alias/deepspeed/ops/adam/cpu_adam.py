"""`deepspeed.ops.adam.cpu_adam`."""

from zero.compat.optimizers import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
