"""`deepspeed.runtime.fp16.fused_optimizer`."""

from zero.compat.unavailable import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
