"""`deepspeed.linear`."""

from zero.compat.unavailable import LoRAConfig, OptimizedLinear, QuantizationConfig

__all__ = ["LoRAConfig", "OptimizedLinear", "QuantizationConfig"]
