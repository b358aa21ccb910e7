"""`deepspeed.moe.experts`."""

from zero.compat.unavailable import Experts

__all__ = ["Experts"]
