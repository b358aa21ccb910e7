"""`deepspeed.profiling.flops_profiler`."""

from zero.compat.unavailable import FlopsProfiler
from zero.flops_profiler import get_model_profile

from ..._names import attributes

__all__ = ["FlopsProfiler", "get_model_profile"]
__getattr__ = attributes(__name__)
