"""`deepspeed.checkpoint.ds_to_universal`."""

from zero.compat.unavailable import ds_to_universal as main

__all__ = ["main"]
