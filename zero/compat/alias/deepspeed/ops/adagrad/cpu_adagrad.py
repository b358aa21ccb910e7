"""`deepspeed.ops.adagrad.cpu_adagrad`."""

from zero.ops.adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
