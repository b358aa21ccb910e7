"""`deepspeed.runtime.bf16_optimizer`."""

from zero.compat.unavailable import BF16_Optimizer

__all__ = ["BF16_Optimizer"]
