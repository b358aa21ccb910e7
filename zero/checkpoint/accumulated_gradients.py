"""Gradients of an incomplete step: each rank saves its own, and only the same ranks load them.

The gradients collected between two steps are no tensors of the model: below stage 2 each rank has a sum of its own, at
stages 2 and 3 it has shards of one common sum. So the same number of ranks, at a stage that collects in the same way,
continues exactly; any other combination is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.errors import ConfigError
from zero.assembly.engine_parts import EngineParts
from zero.checkpoint.dcp_format import PIECE_NUMEL
from zero.checkpoint.rank_data_file import Extents
from zero.checkpoint.source import Source
from zero.optim.gradients import UnitGradient
from zero.params.layout import Placement


def add_accumulated(extents: Extents, parts: EngineParts) -> dict[str, Any] | None:
    """Write the gradients that this rank has collected since the last step, if any.

    Returns the further information that `load_accumulated` needs; None if nothing has been collected.
    """
    gradients, rank = parts.gradients, parts.collectives.placement.rank
    unreduced_of = gradients.unreduced_gradients()
    units: dict[str, dict[str, Any]] = {}
    for state in gradients.states():
        unit = state.unit
        unreduced = unreduced_of.get(unit.index)
        if unreduced is not None:
            extents.add(_waiting_name(rank, unit.index), unreduced)
        if not state.is_empty:
            extents.add_array(_stored_name(rank, unit.index), state.dtype, state.array, unit)
        if unreduced is not None or any(state.contributions) or not state.is_empty:
            names = [slot.name for slot in unit.slots]
            entry = {"index": unit.index, "contributions": list(state.contributions), "slots": names}
            units[unit.name] = {
                **entry,
                "numel": unit.numel,
                "stored": not state.is_empty,
                "waiting": unreduced is not None,
            }
    if not units:
        return None
    return {"deferred": gradients.has_deferred, "units": units}


def check_accumulated(parts: EngineParts, saved: list[int], description: dict[str, Any] | None) -> None:
    """Raise ConfigError if the accumulation cannot continue here from the saved gradients.

    `saved`: `ranks_shape` when they were saved; `description`: the result of `add_accumulated` of the same rank then.
    """
    own = ranks_shape(parts.collectives.placement)
    if saved != own:
        raise ConfigError(
            "load_checkpoint: the checkpoint was saved in the middle of a gradient accumulation, and each rank has "
            f"its own sums: expected {_describe_ranks(saved)}, got {_describe_ranks(own)}; load it with the same "
            "ranks and stage, save after step(), or pass load_module_only=True"
        )
    own_units = {state.unit.name: state.unit for state in parts.gradients.states()}
    for name, unit in (description or {"units": {}})["units"].items():
        own_unit = own_units.get(name)
        if (
            own_unit is None
            or own_unit.numel != unit["numel"]
            or [slot.name for slot in own_unit.slots] != unit["slots"]
        ):
            raise ConfigError(
                "load_checkpoint: the checkpoint was saved in the middle of a gradient accumulation with other units "
                f"({name} differs); load it with the same model and the same zero_optimization sizes, save after "
                "step(), or pass load_module_only=True"
            )


def load_accumulated(parts: EngineParts, description: dict[str, Any], source: Source) -> None:
    """Load the gradients that `check_accumulated` has accepted; nothing must have been collected here yet."""
    here, rank = {state.unit.name: state for state in parts.gradients.states()}, parts.collectives.placement.rank
    for name, unit in description["units"].items():
        state, index = here[name], unit["index"]
        state.contributions = list(unit["contributions"])
        if unit["stored"]:
            _load_stored(parts, state, source, _stored_name(rank, index))
        if unit["waiting"]:
            waiting = _waiting_name(rank, index)
            saved = source.tensors[waiting]
            flat = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
            for lo in range(0, flat.numel(), PIECE_NUMEL):
                hi = min(lo + PIECE_NUMEL, flat.numel())
                flat[lo:hi].copy_(source.read(waiting, lo, hi))
            parts.gradients.restore_unreduced(index, flat)
    parts.gradients.has_deferred = description["deferred"]


def _load_stored(parts: EngineParts, state: UnitGradient, source: Source, name: str) -> None:
    unit = state.unit
    if source.tensors[name].dtype == torch.float32:
        parts.gradients.make_wide(state)
    parts.gradients.reclaim_memory(unit)  # updates may still use this memory for optimizer states
    for lo in range(0, unit.shard_numel, PIECE_NUMEL):
        hi = min(lo + PIECE_NUMEL, unit.shard_numel)
        chunk = source.read(name, lo, hi).to(state.dtype)
        parts.gradients.write_stored(state, unit.begin + lo, chunk)


def ranks_shape(placement: Placement) -> list[int]:
    return [placement.world_size, placement.shard_size, int(placement.gradients_deferred)]


def _describe_ranks(shape: list[int]) -> str:
    world_size, shard_size, deferred = shape
    stages = "stage 0 or 1" if deferred else "stage 2 or 3"
    return f"{world_size} ranks in groups of {shard_size} at {stages}" if world_size > 1 else f"one rank at {stages}"


def _stored_name(rank: int, unit: int) -> str:
    return f"accumulated.{rank}.{unit}"


def _waiting_name(rank: int, unit: int) -> str:
    return f"collected.{rank}.{unit}"
