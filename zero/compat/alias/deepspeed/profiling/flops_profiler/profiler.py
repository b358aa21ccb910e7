"""`deepspeed.profiling.flops_profiler.profiler`."""

from zero.compat.unavailable import FlopsProfiler
from zero.flops_profiler import get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
