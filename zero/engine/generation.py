"""While a model generates, the units that fit stay on the device from token to token: `generate`, `generation()`.

With `hybrid_engine` units may also use the device memory that is free at that moment, beyond the plan: between training
steps nothing else needs it. It is released before the next training forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from offload.accelerator import is_accelerator
from offload.sizes import format_bytes
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.run import Run
from zero.dist import world
from zero.engine.fused_adapters import FusedAdapters
from zero.plan.machine import read_machine
from zero.plan.plan import DEVICE
from zero.store.broadcasts import agree_on_machine

logger = logging.getLogger("zero")

RESERVED_SHARE = 5
"""A fifth of the free memory is left for activations and others, as in the plan."""


class Generation:
    """Args: `run`: the state that the collaborators share; `steps`: the engine's steps."""

    def __init__(self, run: Run, steps: EngineSteps) -> None:
        self._run, self._steps, self._fused_adapters = run, steps, FusedAdapters(run)

    @property
    def generate(self) -> Callable[..., Any]:
        """See `ZeroEngine.generate`."""
        generate: Any = self._run.module.generate
        block = self._run.config.hybrid_engine

        def inside(*args: Any, **kwargs: Any) -> Any:
            if block is None or not block.enabled:
                with self.generation():
                    return generate(*args, **kwargs)
            room_bytes = self._room_bytes(block.max_out_tokens, sequences_of(args, kwargs))
            rests = not block.release_inference_cache
            with self._generation(room_bytes, keep_for_next=rests), self._fused_adapters.fuse_all(keep_for_next=rests):
                return generate(*args, **kwargs)

        return inside

    @contextmanager
    def generation(self) -> Iterator[None]:
        """See `ZeroEngine.generation`."""
        with self._generation(0, keep_for_next=False):
            yield

    @contextmanager
    def _generation(self, room_bytes: int, *, keep_for_next: bool) -> Iterator[None]:
        run = self._run
        self._steps.make_ready_to_run("generation")
        if not run.generations:
            run.parts.coordinator.begin_generation(room_bytes)
        run.generations += 1
        try:
            with run.calling_model():
                yield
        except BaseException:
            keep_for_next = False
            raise
        finally:
            run.generations -= 1
            if not run.generations:
                coordinator = run.parts.coordinator
                coordinator.pause_generation() if keep_for_next else coordinator.end_generation()

    def _room_bytes(self, tokens: int, sequences: int) -> int:
        """Device memory that units may take now in addition to the plan; equal on ranks that fetch together."""
        run, device = self._run, self._run.device
        placement, on_cpu = run.collectives.placement, not is_accelerator(device)
        machine = read_machine(device)
        if placement.fetches_collectively:
            machine = agree_on_machine(run.collectives, machine, on_cpu=on_cpu)
        elif on_cpu and machine.device_bytes is not None:
            machine = replace(machine, device_bytes=machine.device_bytes // (world.ranks_per_node() or 1))
        free_bytes = machine.device_bytes or 0
        room_bytes = free_bytes - free_bytes // RESERVED_SHARE - cache_bytes(run.module, tokens, sequences)
        budget = run.config.memory_budget.device
        if isinstance(budget, int):
            room_bytes = min(room_bytes, budget - run.parts.plan.tier_bytes(DEVICE))
        logger.debug("generation: %s more for weights", format_bytes(max(room_bytes, 0)))
        return max(room_bytes, 0)


def sequences_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Number of sequences that a call of `generate` makes at once."""
    prompts = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim() > 1), None)
    each = [kwargs.get(name) or 1 for name in ("num_beams", "num_return_sequences")]
    return (1 if prompts is None else len(prompts)) * max(each)


def cache_bytes(model: Any, tokens: int, sequences: int) -> int:
    """Bytes of the keys and values, computed from a transformers config; 0: the config lacks the sizes."""
    config = _text_config(getattr(model, "config", None))

    def first_of(*names: str) -> int:
        """The first of these names that the config has as an int; 0: none."""
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)

    layers, heads = first_of("num_hidden_layers"), first_of("num_attention_heads")
    if not (layers and heads):
        return 0
    numel = first_of("num_key_value_heads", "num_attention_heads") * (
        first_of("head_dim") or first_of("hidden_size") // heads
    )
    dtype = getattr(config, "dtype", None)
    return 2 * layers * numel * tokens * sequences * (dtype.itemsize if isinstance(dtype, torch.dtype) else 4)


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config
