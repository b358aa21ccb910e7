"""Which gradients are not finite: found from the counts of each block, so that only a few blocks are looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from offload.kernels import kernels
from offload.kernels.square_sums import nonfinite_of
from offload.planes.copies import read_plane
from offload.sizes import BLOCK_NUMEL
from zero.exchange.exchange import Exchange
from zero.optim.gradients import Gradients, UnitGradient
from zero.params.layout import Slot
from zero.store.storage import Storage

NAMES_MAX = 3
"""More would not help: what comes later in backward is made of what came before."""


def agree_on_nonfinite(
    exchange: Exchange, gradients: Gradients, storage: Storage, *, loss_is_finite: bool
) -> tuple[list[str], bool]:
    """Names of the first parameters whose gradient is inf or NaN on any rank; and was every loss finite?

    All ranks come here. First is what backward has reached first.

    Args:
        exchange: with the other ranks.
        gradients: at rest, before they are cleared.
        storage: of the gradients.
        loss_is_finite: of this rank, as far as it knows.

    Raises:
        StorageError: a gradient could not be read.
    """
    mine: list[tuple[int, str]] = []
    for position, state, slot in _in_order(gradients):
        if _is_nonfinite(state, slot, storage):
            mine.append((position, slot.name))
            if len(mine) == NAMES_MAX:
                break
    answers = exchange.agree("gradients that are not finite", json.dumps([mine, loss_is_finite]).encode())
    told = [json.loads(answer) for answer in answers]
    first: dict[str, int] = {}
    for position, name in sorted(pair for theirs, _ in told for pair in theirs):
        first.setdefault(name, position)
    return list(first)[:NAMES_MAX], all(finite for _, finite in told)


def _in_order(gradients: Gradients) -> Iterator[tuple[int, UnitGradient, Slot]]:
    """(rank in the order of arrival, unit, parameter) of what may be; what has come otherwise is last."""
    summed = (state for state in gradients.states() if state.summed)
    states = {state.unit.index: state for state in summed if nonfinite_of(state.sums).any()}
    known = list(gradients.order)
    rest = [(index, i) for index, state in reversed(states.items()) for i in range(len(state.unit.slots))]
    for position, (index, slot) in enumerate(dict.fromkeys([*known, *rest])):
        if index in states:
            yield position, states[index], states[index].unit.slots[slot]


def _is_nonfinite(state: UnitGradient, slot: Slot, storage: Storage) -> bool:
    """Does the part of a gradient that this rank keeps hold inf or NaN?"""
    unit = state.unit
    begin, end = (place - unit.begin for place in unit.within(slot))
    for block in range(begin // BLOCK_NUMEL, -(-end // BLOCK_NUMEL)):
        if not int(nonfinite_of(state.sums[block : block + 1])):
            continue
        first, last = block * BLOCK_NUMEL, min((block + 1) * BLOCK_NUMEL, unit.shard_numel)
        if begin <= first and last <= end:
            return True
        values = _values(state, storage, first, last)  # shared with a neighbour
        part = values[max(begin - first, 0) : min(end, last) - first]
        if not bool(torch.isfinite(part).all()):
            return True
    return False


def _values(state: UnitGradient, storage: Storage, first: int, last: int) -> torch.Tensor:
    """Elements [first, last) of this rank's slice, on the host."""
    lo, hi = state.unit.begin + first, state.unit.begin + last
    memory = state.plane.memory(lo, hi)
    if memory is None:
        memory = torch.empty(state.plane.nbytes(lo, hi), dtype=torch.uint8, device="cpu")
        job = read_plane(state.plane, lo, hi, memory, storage.arena)
        storage.mover.run(f"reading the gradient of {state.unit.name}", job)
    values = torch.empty(last - first, dtype=torch.float32, device=memory.device)
    kernels.cast(values, memory.view(state.dtype))
    return values.cpu()
