"""`deepspeed.runtime.fp16.unfused_optimizer`."""

from zero.compat.unavailable import FP16_UnfusedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]
