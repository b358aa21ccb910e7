"""A DataLoader that knows the position of the training loop, and continues from there.

[Note: position] The order of an epoch is decided when it begins, by its number and the sampler's state then. A position
consists of these and the number of samples that the loop has got; samples prefetched by workers do not count. To
continue, the loader draws the indices of the samples used before once more, without fetching the samples.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, SequentialSampler

from offload.errors import ConfigError

logger = logging.getLogger("zero")

COUNTS = ("epoch", "batches", "samples", "world_size", "batch_size", "dataset_samples")  # Whole numbers of a state.


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler that advances to the next epoch by itself, so each iteration has a new order.

    `set_epoch` before an iteration overrides this.
    """

    def __iter__(self) -> Iterator[Any]:
        with torch.device("cpu"):  # its generator is on the CPU, even if the default device is another
            indices = super().__iter__()
        self.epoch += 1
        return indices


class _SkippingSampler(Sampler[Any]):
    """The sampler, from a position on. It is placed between the sampler and the batch sampler.

    Args:
        sampler: the wrapped sampler.
        batch_samples: number of samples in a batch.
        batches_ahead: number of batches that are drawn before the loop gets the first of them.
    """

    def __init__(self, sampler: Any, batch_samples: int, batches_ahead: int) -> None:
        self._sampler, self._batch_samples = sampler, batch_samples
        self._first = self._skip = 0
        self._random: torch.Tensor | None = None
        # (samples drawn, the sampler's state then), of the last batches.
        self.states: deque[tuple[int, Any]] = deque(maxlen=batches_ahead + 2)
        # True: the sampler itself knows its position.
        self.has_states = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self.generator: torch.Generator | None = None  # Decides its order, unless its epoch or its state does.
        if not self.has_states and not isinstance(sampler, (DistributedSampler, SequentialSampler)):
            generator = getattr(sampler, "generator", None)
            self.generator = generator if isinstance(generator, torch.Generator) else torch.default_generator

    def set_start(self, first: int, skip: int, random: torch.Tensor | None) -> None:
        """Set the start of the next iteration.

        Args:
            first: number of samples used before.
            skip: how many of them the sampler's own state does not include; they are drawn once more.
            random: the global generator's state with which its order was drawn; None: the order is drawn now.
        """
        self._first, self._skip, self._random = first, skip, random
        self.states.clear()

    def load_sampler_state(self, state: Any) -> bool:
        """Load the sampler's state, if it has states. Returns True if it was loaded."""
        self.states.clear()
        if state is None or not self.has_states:
            return False
        self._sampler.load_state_dict(state)
        return True

    def state_after(self, samples: int) -> Any:
        """The state of a sampler that has states, after `samples`; its present state, if no iteration has got there."""
        for drawn, state in self.states:
            if drawn == samples:
                return state
        return self._sampler.state_dict()

    def __iter__(self) -> Iterator[Any]:
        skip, random, self._skip, self._random = self._skip, self._random, 0, None
        indices = iter(self._sampler) if random is None else _draw_indices(self._sampler, random)
        indices = itertools.islice(indices, skip, None)
        return self._record_states(indices) if self.has_states else indices

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def epoch_samples(self) -> int:
        """Number of this rank's samples in an epoch; a huge number if the sampler has no length."""
        try:
            return len(self._sampler)
        except (TypeError, NotImplementedError):
            return 2**62

    def _record_states(self, indices: Iterator[Any]) -> Iterator[Any]:
        for drawn, index in enumerate(indices, 1):
            if drawn % self._batch_samples == 0 or self._first + drawn == self.epoch_samples:
                self.states.append((self._first + drawn, self._sampler.state_dict()))
            yield index


def _draw_indices(sampler: Any, random: torch.Tensor) -> Iterator[Any]:
    """The sampler's indices for this state of the global generator, whose present state is kept.

    torch's samplers use the generator only for their first index, so it is restored after that.
    """
    state = torch.get_rng_state()
    torch.set_rng_state(random)
    try:
        indices = iter(sampler)
        first = list(itertools.islice(indices, 1))
    finally:
        torch.set_rng_state(state)
    return itertools.chain(first, indices)


@dataclass(slots=True)
class _Progress:
    epoch: int
    first: int = 0  # Samples of this rank's part of the epoch that were used before this iteration.
    batches: int = 0  # Batches of this epoch, also those of earlier runs.
    iteration_batches: int = 0  # Batches of this iteration.
    random: torch.Tensor | None = field(default=None, repr=False)  # The generator's state when the epoch began.
    is_placed: bool = False  # The sampler's own state is already after `first`.
    is_ended: bool = False


class _LoaderIterator:
    """An iterator of a loader. It begins only with its first batch, so a state may be loaded until then."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._iteration: tuple[Iterator[Any], _Progress] | None = None
        self._failed_batches = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iteration is None:
            self._iteration = self._loader._begin_epoch()
        batches, progress = self._iteration
        try:
            batch = next(batches)
        except StopIteration:
            progress.is_ended = True
            raise
        except Exception:
            self._failed_batches += 1  # counted as skipped if a next batch follows
            raise
        progress.batches += 1 + self._failed_batches
        progress.iteration_batches += 1 + self._failed_batches
        self._failed_batches = 0
        return batch

    def __len__(self) -> int:
        return len(self._loader)


class ResumableLoader(DataLoader[Any]):
    """Batches of a dataset with `__getitem__`; `state_dict` and `load_state_dict` as in torchdata's StatefulDataLoader.

    The state belongs to the last iteration begun; one that was left early keeps its position until another begins. A
    state loads with other batch sizes and numbers of ranks: the position is counted in samples of the epoch.

    Random numbers in a dataset are resumed if the training loop loads (the global generators are in a checkpoint).
    Workers are seeded from torch's seed, the rank and the position, so the rest of an interrupted epoch has other
    seeds; the next epochs have the same.

    Args:
        data: with `__getitem__` and `__len__`.
        sampler: gives this rank's samples.
        rank: of the caller.
        world_size: number of ranks that share an epoch.
        options: of the DataLoader.

    Attributes:
        load_count: number of loaded states.
    """

    def __init__(self, data: Dataset[Any], sampler: Any, *, rank: int, world_size: int, **options: Any) -> None:
        # Each new iterator draws a seed, and a resumed loop makes one more iterator. A separate generator for these
        # seeds keeps all other random numbers unchanged.
        super().__init__(data, sampler=sampler, generator=torch.Generator(), **options)
        self._rank, self._world_size = rank, world_size
        self._samples = self.batch_size or 1
        ahead = self.num_workers * (self.prefetch_factor or 0)
        self._skipping_sampler = _SkippingSampler(self.sampler, self._samples, ahead)
        self.batch_sampler.sampler = self._skipping_sampler  # type: ignore[union-attr]
        self._epochs = 0
        self._loaded_progress: _Progress | None = None
        self._progress: _Progress | None = None
        self.load_count = 0

    def __iter__(self) -> Any:
        """An iterator over the remaining batches of the loaded epoch, or over a new epoch."""
        return _LoaderIterator(self)

    def state_dict(self) -> dict[str, Any]:
        """The loop's position: the epoch, and the numbers of batches and samples (of all ranks) that it has got.

        Returns numbers, tensors, and the state of a sampler that has one.
        """
        skipping, has_own_generator = self._skipping_sampler, self._has_own_generator
        progress = self._loaded_progress if self._loaded_progress is not None else self._progress
        if (
            progress is None
            or progress.is_ended
            or (progress is self._loaded_progress and progress.epoch != self._next_epoch)
        ):
            random = skipping.generator.get_state() if skipping.generator is not None and has_own_generator else None
            progress = _Progress(self._next_epoch, random=random)
        used = min(progress.first + progress.iteration_batches * self._samples, self._skipping_sampler.epoch_samples)
        return {
            "epoch": progress.epoch,
            "batches": progress.batches,
            "samples": used * self._world_size,
            "world_size": self._world_size,
            "batch_size": self._samples,
            "dataset_samples": len(self.dataset),  # type: ignore[arg-type]
            "seed": self._seed,
            "sampler": skipping.state_after(used) if skipping.has_states else None,
            "random": progress.random,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration continues where the state was taken; iterators that have begun are not changed.

        It begins after the samples used before, even with another batch size or number of ranks. Differences that
        cannot be avoided are logged. Raises ConfigError: it is no state of such a loader.
        """
        wrong = [key for key in COUNTS if not isinstance(state.get(key), int)]
        if wrong:
            raise ConfigError(
                "loader: load_state_dict: expected the state of a loader made by deepspeed_io, got one without "
                f"{', '.join(wrong)}; make the same loader as when the state was saved"
            )
        epoch, batches, samples, ranks, batch_samples, dataset_samples = (state[key] for key in COUNTS)
        first = min(-(-samples // self._world_size), self._skipping_sampler.epoch_samples)
        random = state.get("random")
        for note in self._differences(state, samples, ranks, batch_samples, dataset_samples):
            logger.warning("loader: %s", note)
        if isinstance(self.sampler, EpochSampler) and state.get("seed") is not None:
            self.sampler.seed = int(state["seed"])
        if hasattr(self.sampler, "set_epoch") and hasattr(self.sampler, "epoch"):
            self.sampler.set_epoch(epoch)
        self._epochs = epoch
        if ranks != self._world_size:
            random = None
        is_placed = ranks == self._world_size and self._skipping_sampler.load_sampler_state(state.get("sampler"))
        if random is not None and self._skipping_sampler.generator is not None and self._has_own_generator:
            self._skipping_sampler.generator.set_state(random)
        self._loaded_progress = _Progress(epoch, first, batches, random=random, is_placed=is_placed)
        self._progress = None
        self.load_count += 1

    def _begin_epoch(self) -> tuple[Iterator[Any], _Progress]:
        loaded, self._loaded_progress = self._loaded_progress, None
        epoch, skipping = self._next_epoch, self._skipping_sampler
        if loaded is not None and loaded.epoch == epoch:
            progress, random = loaded, None if self._has_own_generator else loaded.random
        else:
            progress, random = _Progress(epoch), None
        if progress.random is None and skipping.generator is not None:
            progress.random = skipping.generator.get_state()
        self._progress, self._epochs = progress, epoch + 1
        seed = torch.initial_seed() % 2**64
        worker_seed = np.random.SeedSequence([seed, self._rank, epoch, progress.first]).generate_state(1, np.uint64)
        if self.generator is not None:
            self.generator.manual_seed(int(worker_seed[0]))
        skipping.set_start(progress.first, 0 if progress.is_placed else progress.first, random)
        with torch.device("cpu"):  # the generator is on the CPU
            return super().__iter__(), progress

    @property
    def _next_epoch(self) -> int:
        epoch = getattr(self.sampler, "epoch", None)
        return epoch if isinstance(epoch, int) else self._epochs

    @property
    def _seed(self) -> int | None:
        """The seed, which decides the order together with the epoch; None if a sampler of the user decides it."""
        return self.sampler.seed if isinstance(self.sampler, EpochSampler) and self.sampler.shuffle else None

    @property
    def _has_own_generator(self) -> bool:
        return self._skipping_sampler.generator is not torch.default_generator

    def _differences(
        self, state: Mapping[str, Any], samples: int, ranks: int, batch_samples: int, dataset_samples: int
    ) -> Iterator[str]:
        """The differences from the run in which the state was taken."""
        present = len(self.dataset)  # type: ignore[arg-type]
        if present != dataset_samples:
            yield (
                f"the dataset had {dataset_samples:,} samples when this was saved and has {present:,} now: their "
                "order is different"
            )
        if samples and batch_samples != self._samples:
            yield (
                f"batches had {batch_samples:,} samples and have {self._samples:,} now; the loader continues at "
                "the same sample"
            )
        if samples and (state.get("seed") is None) != (self._seed is None):
            yield (
                "it was saved with another kind of sampler; the samples that are skipped are not those that were "
                "used before"
            )
        if ranks == self._world_size:
            return
        if samples % self._world_size and samples < present:
            skipped = self._world_size - samples % self._world_size
            yield (
                f"{samples:,} samples of the epoch were used, which {self._world_size} ranks cannot divide evenly; "
                f"{skipped} more are skipped"
            )
        if state.get("sampler") is not None or state.get("random") is not None:
            yield (
                f"the sampler's own state was saved with {ranks} ranks; with {self._world_size} ranks it is not "
                "restored"
            )


class RepeatingLoader:
    """An endless iterator over a loader, which restarts at its end; DeepSpeed's name.

    Args:
        loader: anything that can be iterated over more than once.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] | None = None
        self._loads = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch; after the end of an epoch, of the next one. StopIteration only if the loader is empty."""
        loads = getattr(self.loader, "load_count", 0)
        if self.data_iter is None or loads != self._loads:
            self.data_iter, self._loads = iter(self.loader), loads
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)

    def state_dict(self) -> Any:
        """The loader's state; None if it has none."""
        return self.loader.state_dict() if hasattr(self.loader, "state_dict") else None

    def load_state_dict(self, state: Any) -> None:
        """Continue after the batches that the state's loop has got. Raises the same errors as the loader."""
        if hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state)
            self.data_iter = None
