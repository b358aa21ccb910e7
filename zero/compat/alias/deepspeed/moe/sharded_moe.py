"""`deepspeed.moe.sharded_moe`."""

from zero.compat.unavailable import MOELayer, TopKGate

__all__ = ["MOELayer", "TopKGate"]
