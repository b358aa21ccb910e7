"""`deepspeed.profiling.flops_profiler.profiler`."""

from zero.compat.unavailable import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
