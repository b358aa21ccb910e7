"""`deepspeed.moe.layer`."""

from zero.compat.unavailable import MoE

__all__ = ["MoE"]
