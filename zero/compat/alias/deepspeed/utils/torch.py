"""`deepspeed.utils.torch`."""

from zero.compat.helpers import required_torch_version

__all__ = ["required_torch_version"]
