"""`deepspeed.comm.reduce_op`."""

from zero.compat.comm import ReduceOp

__all__ = ["ReduceOp"]
