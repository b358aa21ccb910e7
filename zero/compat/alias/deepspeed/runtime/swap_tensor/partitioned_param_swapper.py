"""`deepspeed.runtime.swap_tensor.partitioned_param_swapper`."""

from zero.compat.unavailable import AsyncPartitionedParameterSwapper

__all__ = ["AsyncPartitionedParameterSwapper"]
