"""`deepspeed.ops.adagrad`."""

from zero.ops.adagrad import DeepSpeedCPUAdagrad

from ..._names import attributes

__all__ = ["DeepSpeedCPUAdagrad"]
__getattr__ = attributes(__name__)
