"""`deepspeed.accelerator`."""

from zero.compat.accelerator import get_accelerator, is_current_accelerator_supported

from .._names import attributes

__all__ = ["get_accelerator", "is_current_accelerator_supported"]
__getattr__ = attributes(__name__)
