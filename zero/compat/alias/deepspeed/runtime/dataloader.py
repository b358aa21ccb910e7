"""`deepspeed.runtime.dataloader`."""

from zero.resumable import RepeatingLoader

__all__ = ["RepeatingLoader"]
