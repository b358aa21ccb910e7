"""`deepspeed.runtime.dataloader`: the loader that `initialize` returns is torch's."""

from __future__ import annotations

from torch.utils.data import DataLoader as DeepSpeedDataLoader

__all__ = ["DeepSpeedDataLoader"]
