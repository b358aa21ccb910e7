"""`deepspeed.profiling.flops_profiler.profiler`."""

from zero.flops_profiler import get_model_profile
from zero.forward_profiler import FlopsProfiler

__all__ = ["FlopsProfiler", "get_model_profile"]
