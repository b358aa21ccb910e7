"""`deepspeed.ops.adam`."""

from zero.compat.optimizers import DeepSpeedCPUAdam, FusedAdam

from ..._names import attributes

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
__getattr__ = attributes(__name__)
