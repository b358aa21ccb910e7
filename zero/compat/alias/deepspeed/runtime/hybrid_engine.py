"""`deepspeed.runtime.hybrid_engine`."""

from zero.compat.unavailable import DeepSpeedHybridEngine

__all__ = ["DeepSpeedHybridEngine"]
