"""`deepspeed.sequence.layer`."""

from zero.compat.unavailable import DistributedAttention

__all__ = ["DistributedAttention"]
