"""`deepspeed.ops.aio`."""

from zero.compat.operators import AsyncIOBuilder
from zero.compat.unavailable import aio_handle

__all__ = ["AsyncIOBuilder", "aio_handle"]
