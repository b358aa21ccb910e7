"""`deepspeed.ops.lion.cpu_lion`."""

from zero.ops.lion import DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]
