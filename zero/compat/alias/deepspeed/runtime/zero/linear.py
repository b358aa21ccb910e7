"""`deepspeed.runtime.zero.linear`."""

from zero.compat.unavailable import LinearModuleForZeroStage3, zero3_linear_wrap

__all__ = ["LinearModuleForZeroStage3", "zero3_linear_wrap"]
