"""`deepspeed.ops.aio`."""

from zero.compat.operators import AsyncIOBuilder
from zero.compat.unavailable import aio_handle

from ..._names import attributes

__all__ = ["AsyncIOBuilder", "aio_handle"]
__getattr__ = attributes(__name__)
