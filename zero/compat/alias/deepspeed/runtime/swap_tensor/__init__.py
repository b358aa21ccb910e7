"""`deepspeed.runtime.swap_tensor`."""

from ..._names import attributes

MIN_SWAPPABLE_BYTES = 1024 * 1024
"""Of DeepSpeed's swappers; nothing depends on it here."""
__getattr__ = attributes(__name__)
