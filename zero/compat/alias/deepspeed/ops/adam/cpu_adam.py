"""`deepspeed.ops.adam.cpu_adam`."""

from zero.ops.adam import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
