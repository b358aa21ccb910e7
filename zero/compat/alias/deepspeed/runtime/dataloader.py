"""`deepspeed.runtime.dataloader`."""

from zero.compat.loaders import DeepSpeedDataLoader
from zero.resumable import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
