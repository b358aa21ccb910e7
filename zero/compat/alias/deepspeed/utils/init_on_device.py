"""`deepspeed.utils.init_on_device`."""

from zero.compat.on_device import OnDevice

__all__ = ["OnDevice"]
