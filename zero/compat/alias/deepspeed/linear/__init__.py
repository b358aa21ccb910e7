"""`deepspeed.linear`."""

from zero.compat.unavailable import LoRAConfig, OptimizedLinear, QuantizationConfig

from .._names import attributes

__all__ = ["LoRAConfig", "OptimizedLinear", "QuantizationConfig"]
__getattr__ = attributes(__name__)
