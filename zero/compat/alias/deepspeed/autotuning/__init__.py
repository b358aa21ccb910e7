"""`deepspeed.autotuning`."""

from zero.compat.unavailable import Autotuner

from .._names import attributes

__all__ = ["Autotuner"]
__getattr__ = attributes(__name__)
