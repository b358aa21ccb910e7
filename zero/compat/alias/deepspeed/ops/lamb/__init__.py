"""`deepspeed.ops.lamb`."""

from zero.compat.unavailable import FusedLamb

from ..._names import attributes

__all__ = ["FusedLamb"]
__getattr__ = attributes(__name__)
