"""DeepSpeed's `checkpointing`: drop a region's activations in forward, compute them again in backward.

torch.utils.checkpoint does the recomputation. We choose the place of a region's inputs between forward and backward:
they stay where they are, or go to the tier that `activation_checkpointing` names. A region returns its function's
result.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from offload.accelerator import synchronize
from offload.errors import ConfigError
from offload.streams import open_streams
from zero.assembly.log import NOTICE
from zero.config import Config, load_config
from zero.config.machine_block import ActivationCheckpointing
from zero.dist import world
from zero.plan.plan import NVME
from zero.plan.planner import activation_tier
from zero.store.activation_store import open_store
from zero.store.rng_tracker import (
    MODEL_PARALLEL,
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)
from zero.store.saved_tensors import Activations, current_activations, use_activations

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

logger = logging.getLogger("zero")

# Read by SwissArmyTransformer, which CogVLM and others train with.
_CUDA_RNG_STATE_TRACKER, _MODEL_PARALLEL_RNG_TRACKER_NAME = get_cuda_rng_tracker(), MODEL_PARALLEL


class _State:
    """Settings of the process, as in DeepSpeed: the last `configure` or `initialize` decides."""

    def __init__(self) -> None:
        self.block: ActivationCheckpointing | None = None
        """The settings of the last `configure` since `initialize`; None: the engine's settings are used."""
        self.is_configured = False
        self.of_engine: weakref.ref[Activations] | None = None
        """The `Activations` of the last engine."""
        self.own_stores: dict[tuple[str, torch.device], Activations] = {}
        """Stores for settings for which no engine has a store."""

    def engine_activations(self) -> Activations | None:
        return None if self.of_engine is None else self.of_engine()


_state = _State()


def configure(
    mpu_: Any,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how `checkpoint` works from now on; `zero.initialize` does the same from its configuration.

    Args:
        mpu_: None, or an object whose model-parallel world size is 1.
        deepspeed_config: its `activation_checkpointing` block is used; the arguments below override it.
        partition_activations: no effect: there is one model-parallel rank.
        contiguous_checkpointing: `contiguous_memory_optimization`.
        num_checkpoints: `number_checkpoints`.
        checkpoint_in_cpu: `cpu_checkpointing`.
        synchronize: `synchronize_checkpoint_boundary`.
        profile: `profile`.

    Raises:
        ConfigError: a configuration that cannot work, or several model-parallel ranks.
    """
    world.check_mpu(mpu_, "checkpointing.configure", world.TENSOR_SIZES)
    block = ActivationCheckpointing()
    if deepspeed_config is not None:
        # `initialize` judges the other keys.
        block = load_config(deepspeed_config, unknown_top_level="warn").activation_checkpointing
    overrides = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    _change_settings(block, {key: value for key, value in overrides.items() if value is not None})


def is_configured() -> bool:
    """True once `configure` or `zero.initialize` was called."""
    return _state.is_configured


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` and drop its activations; backward runs it again.

    The checkpoint is reentrant, as in DeepSpeed. If no argument requires a gradient, a reentrant one would lose the
    gradients of the parameters inside, so the non-reentrant kind is used.

    Args:
        function: run twice, with the same random numbers.
        *args: tensors among them are kept on the configured tier. Only those at this level get gradients.
        **kwargs: as `args`.

    Returns:
        The result of `function`: a tensor, or a tuple or list of tensors and other values.

    Raises:
        BudgetError: the tier is full; names the setting to change.
        StorageError: an input could not be stored, or could not be read in backward.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return _checkpoint(function, args, kwargs, reentrant=any(tensor.requires_grad for tensor in tensors))


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `checkpoint`, but non-reentrant: arguments and results of any structure, and `torch.autograd.grad` works."""
    return _checkpoint(function, args, kwargs, reentrant=False)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Accepted for compatibility with DeepSpeed; no effect, because there is one model-parallel rank."""
    _change_settings(_settings(), {"partition_activations": partition_activation})


def set_num_layers(nlayers: int | None) -> None:
    """Set `number_checkpoints`: with contiguous memory, the number of inputs for which it is allocated at once."""
    _change_settings(_settings(), {"number_checkpoints": nlayers})


def reset() -> None:
    """Free memory that holds no saved input, for example between training and evaluation."""
    scopes = [*_state.own_stores.values(), current_activations(), _state.engine_activations()]
    for scope in scopes:
        if scope is not None and scope.store is not None:
            scope.store.trim()


def use_engine_activations(activations: Activations, *, configured: bool) -> None:
    """Let checkpoints outside of the forward of a new engine use its store too.

    Args:
        activations: the engine's `Activations`.
        configured: the engine's configuration has its own block, which replaces the settings of an earlier `configure`.
    """
    if configured:
        _state.block = None
    _state.is_configured = True
    _state.of_engine = weakref.ref(activations)


def _settings() -> ActivationCheckpointing:
    if _state.block is not None:
        return _state.block
    scope = current_activations() or _state.engine_activations()
    return ActivationCheckpointing() if scope is None else scope.settings


def _change_settings(block: ActivationCheckpointing, changes: dict[str, Any]) -> None:
    """Change the settings, with the checks of a configuration."""
    if changes.get("cpu_checkpointing") is not None:
        changes = {"activation_device": "cpu" if changes["cpu_checkpointing"] else "none", **changes}
    changed = {**block.model_dump(exclude_none=True), **changes}
    if changed.get("activation_device") == "none":
        changed["activation_offloading"] = False
    _state.block = load_config({"activation_checkpointing": changed}).activation_checkpointing
    _state.is_configured = True
    if changed.get("partition_activations"):
        logger.info("partition_activations: no effect, because there is only one model-parallel rank")


def _checkpoint(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, reentrant: bool) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    settings = _settings()
    values = (*args, *kwargs.values())
    scope = _scope(settings, values)
    region = _Region(function, len(args), tuple(kwargs), settings, scope)
    if scope is None:
        return torch_checkpoint(region, *values, use_reentrant=reentrant)
    with scope.offload_saved_tensors():
        return torch_checkpoint(region, *values, use_reentrant=reentrant)


def _scope(settings: ActivationCheckpointing, args: tuple[Any, ...]) -> Activations | None:
    """The `Activations` for these settings: of the running engine, of the last one, or our own; None: no tier."""
    tier = activation_tier(settings)
    if tier is None:
        return None
    for scope in (current_activations(), _state.engine_activations()):
        if scope is not None and scope.store is not None and activation_tier(scope.settings) == tier:
            return scope
    if tier == NVME:
        raise ConfigError(
            'activation_device "nvme": expected an engine whose config has it, because the engine owns the swap '
            "space; set activation_checkpointing.activation_device in the config of zero.initialize"
        )
    device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
    if (tier, device) not in _state.own_stores:
        _state.own_stores[tier, device] = Activations(settings, open_store(tier, device, open_streams(device)))
    return _state.own_stores[tier, device]


@dataclass(eq=False)
class _Region:
    """A function that is run twice: in forward, and again in backward."""

    function: Callable[..., Any]
    positional: int  # Number of positional arguments.
    keywords: tuple[str, ...]  # Names of the arguments after them.
    settings: ActivationCheckpointing
    scope: Activations | None  # Keeps the inputs of nested checkpoints when the function runs again.
    states: dict[str, torch.Tensor] | None = None  # Named random states in forward.

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        positional, keyword_values = args[: self.positional], args[self.positional :]
        kwargs = dict(zip(self.keywords, keyword_values, strict=True))
        if self.states is None:
            self.states = get_cuda_rng_tracker().get_states()
            with self._log_time("forward"):
                return self.function(*positional, **kwargs)
        with self._log_time("recomputation"), self._replay_random_states(self.states):
            return self.function(*positional, **kwargs)

    @contextmanager
    def _replay_random_states(self, states: dict[str, torch.Tensor]) -> Iterator[None]:
        """Inside, named random states are as they were in forward; torch restores the default generators."""
        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        tracker.set_states(states)
        try:
            with use_activations(self.scope):
                yield
        finally:
            tracker.set_states(now)

    @contextmanager
    def _log_time(self, what: str) -> Iterator[None]:
        settings = self.settings
        if settings.synchronize_checkpoint_boundary:
            synchronize()
        begin = time.perf_counter()
        try:
            yield
        finally:
            if settings.synchronize_checkpoint_boundary:
                synchronize()
            if settings.profile:
                name = getattr(self.function, "__qualname__", type(self.function).__name__)
                logger.log(NOTICE, "checkpoint of %s: %s took %.6f s", name, what, time.perf_counter() - begin)
