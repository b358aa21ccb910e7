"""`deepspeed.ops.lion`."""

from zero.ops.lion import DeepSpeedCPULion, FusedLion

from ..._names import attributes

__all__ = ["DeepSpeedCPULion", "FusedLion"]
__getattr__ = attributes(__name__)
