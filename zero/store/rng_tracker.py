"""Named random states, as in DeepSpeed's `checkpointing`, for model-parallel regions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.accelerator import compute_device, rng_state, seed_generator, set_rng_state
from offload.errors import StateError

MODEL_PARALLEL = "model-parallel-rng"
SEED_OFFSET = 2718  # Added to the default generator's seed for the model-parallel state, as in DeepSpeed.


class CudaRNGStatesTracker:
    """Named states of the device's default generator: of the GPU, or of the CPU if there is no GPU."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Name -> present state."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state made from `seed`; the generator is unchanged. Raises StateError: name or seed is in use."""
        if seed in self.seeds_ or name in self.states_:
            raise StateError(
                f"random state {name}: the name or the seed {seed} is already in use; call reset() first, or "
                "choose others"
            )
        before = _get()
        _seed(seed)
        self.states_[name] = _get()
        self.seeds_.add(seed)
        _set(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, the generator has the named state; draws advance that state, and the generator's own is restored.

        Raises StateError: no state has this name.
        """
        if name not in self.states_:
            raise StateError(
                f"random state {name}: expected one of {sorted(self.states_)}; add it with add(name, seed)"
            )
        before = _get()
        _set(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _get()
            _set(before)


def _get() -> torch.Tensor:
    return rng_state(compute_device())


def _seed(seed: int) -> None:
    seed_generator(seed, compute_device())


def _set(state: torch.Tensor) -> None:
    set_rng_state(state, compute_device())


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator, and reset the tracker to the model-parallel state alone."""
    _tracker.reset()
    _seed(seed)
    _tracker.add(MODEL_PARALLEL, seed + SEED_OFFSET)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    with _tracker.fork():
        _seed(seed + SEED_OFFSET)
