"""`deepspeed.profiling.flops_profiler`."""

from zero.flops_profiler import get_model_profile
from zero.forward_profiler import FlopsProfiler

from ..._names import attributes

__all__ = ["FlopsProfiler", "get_model_profile"]
__getattr__ = attributes(__name__)
