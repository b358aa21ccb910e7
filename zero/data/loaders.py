"""Loaders of micro-batches: every rank gets its own part of each epoch, and all get the same number of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from offload.accelerator import is_accelerator
from offload.errors import ConfigError
from zero.config import Config
from zero.data.resumable import EpochSampler, ResumableLoader
from zero.dist import world

ROUTES = ("train", "eval", "predict")  # The use of a loader, in DeepSpeed's words; only training is in random order.


class LoaderSettings(Protocol):
    config: Config
    device: torch.device
    collate_fn: Callable[..., Any] | None  # For loaders that are made without one.


class Loaders:
    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
        *,
        place: tuple[int, int] | None = None,
    ) -> DataLoader[Any]:
        """See `ZeroEngine.deepspeed_io`."""
        config, (rank, world_size) = self._settings.config, place or (world.rank(), world.world_size())
        drop, shuffle = config.dataloader_drop_last, route == "train"
        _check(dataset, route, world_size)
        options: dict[str, Any] = {
            "batch_size": config.train_micro_batch_size_per_gpu if batch_size is None else batch_size,
            "pin_memory": pin_memory and is_accelerator(self._settings.device),
            "drop_last": drop,
            "collate_fn": collate_fn if collate_fn is not None else self._settings.collate_fn,
            "num_workers": num_local_io_workers or 0,
        }
        if isinstance(dataset, IterableDataset):
            return DataLoader(dataset, sampler=data_sampler, **options)
        if data_sampler is None and world_size == 1 and not shuffle:
            data_sampler = SequentialSampler(dataset)  # type: ignore[arg-type]
        elif data_sampler is None:
            # One rank takes its order from torch.manual_seed. Several ranks, whose seeds may differ, need the same
            # order, also those that read the same part of the data, as the stages of a pipeline do.
            seed = torch.initial_seed() % 2**62 if world.world_size() == 1 else 0
            data_sampler = EpochSampler(dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop)
        return ResumableLoader(dataset, data_sampler, rank=rank, world_size=world_size, **options)


def _check(data: Dataset[Any], route: str, world_size: int) -> None:
    """Raise ConfigError if there is no such route, or the data cannot be divided among the ranks."""
    if route not in ROUTES:
        raise ConfigError(f"loader: route: expected one of {', '.join(ROUTES)}, got {route!r}")
    iterable = isinstance(data, IterableDataset)
    if not iterable and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ConfigError(
            f"loader: expected a dataset with __getitem__ and __len__, or an IterableDataset, got {type(data).__name__}"
        )
    if iterable and world_size > 1:
        raise ConfigError(
            f"loader: an IterableDataset cannot be split over {world_size} ranks, because each would see all of it; "
            "make your own DataLoader over this rank's part"
        )
