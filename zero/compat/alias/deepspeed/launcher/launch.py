"""`deepspeed.launcher.launch`."""

from zero.compat.launcher import main

__all__ = ["main"]
