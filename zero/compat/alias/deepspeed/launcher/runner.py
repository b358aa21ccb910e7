"""`deepspeed.launcher.runner`."""

from zero.compat.launcher import DEEPSPEED_ENVIRONMENT_NAME, main

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main"]
