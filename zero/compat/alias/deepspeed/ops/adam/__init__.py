"""`deepspeed.ops.adam`."""

from zero.ops.adam import DeepSpeedCPUAdam, FusedAdam

from ..._names import attributes

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
__getattr__ = attributes(__name__)
