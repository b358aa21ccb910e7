"""`deepspeed.autotuning`."""

from zero.compat.unavailable import Autotuner

__all__ = ["Autotuner"]
