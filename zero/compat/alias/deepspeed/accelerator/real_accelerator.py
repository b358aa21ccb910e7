"""`deepspeed.accelerator.real_accelerator`."""

from zero.compat.accelerator import get_accelerator, is_current_accelerator_supported

__all__ = ["get_accelerator", "is_current_accelerator_supported"]
