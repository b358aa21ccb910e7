"""Gradients that have been accumulated, moved from one set of planes to another."""

from __future__ import annotations

import torch

from offload.kernels import kernels
from offload.kernels.square_sums import rows_of
from offload.planes.copies import read_plane, write_plane
from offload.sizes import BLOCK_NUMEL, align_up
from zero.optim.contributions import CHUNK_NUMEL
from zero.optim.gradients import Gradients, UnitGradient
from zero.params.layout import Slot
from zero.store.storage import Storage

Place = tuple[UnitGradient, Slot, int]
"""Where the gradient of a parameter, or of a tile of it, lies, and how many contributions it holds."""


class GradientCarrier:
    """Moves what has been accumulated since the last step; both sides are at rest.

    Args:
        given: (gradients, their storage) to read.
        taking: (gradients, their storage) to write; empty so far.
    """

    def __init__(self, given: tuple[Gradients, Storage], taking: tuple[Gradients, Storage]) -> None:
        self._given, self._from = given
        self._taking, self._to = taking

    def run(self, new_index_of: dict[int, int]) -> None:
        """Move every gradient that has a place on the other side.

        Args:
            new_index_of: parameter index in the given layout -> index in the taking one.

        Raises:
            StorageError: nothing of the given side has changed.
        """
        sources: dict[int, list[Place]] = {}
        for state in self._given.states():
            for slot, count in zip(state.unit.slots, state.contributions, strict=True):
                if count and slot.index in new_index_of:
                    sources.setdefault(new_index_of[slot.index], []).append((state, slot, count))
        for state in self._taking.states():
            held = [[p for p in sources.get(s.index, []) if _common(p[1], s) or not s.numel] for s in state.unit.slots]
            if any(held):
                self._fill(state, held)

    def _fill(self, state: UnitGradient, held: list[list[Place]]) -> None:
        if any(place[0].dtype == torch.float32 for places in held for place in places):
            self._taking.make_wide(state)
        unit = state.unit
        for lo in range(0, unit.numel, CHUNK_NUMEL):
            hi = min(lo + CHUNK_NUMEL, unit.numel)
            chunk = torch.zeros(hi - lo, dtype=state.dtype)
            for slot, places in zip(unit.slots, held, strict=True):
                origin = slot.offset_numel - slot.first_numel  # where the parameter's first element would be
                for place in places:
                    common = _common(place[1], slot)
                    first, last = max(lo - origin, common.start), min(hi - origin, common.stop)
                    if first < last:
                        chunk[first + origin - lo : last + origin - lo].copy_(self._read(place, first, last))
            kernels.block_sumsq(chunk, into=rows_of(state.sums, lo, hi))
            job = write_plane(state.plane, unit.begin + lo, unit.begin + hi, chunk.view(torch.uint8), self._to.arena)
            self._to.mover.run(f"storing the gradient of {unit.name}", job)
        state.contributions = [max((place[2] for place in places), default=0) for places in held]
        state.summed = True

    def _read(self, place: Place, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of one parameter's gradient, all of which the place has."""
        state, slot, _ = place
        lo, hi = slot.offset_numel - slot.first_numel + begin, slot.offset_numel - slot.first_numel + end
        first, last = lo // BLOCK_NUMEL * BLOCK_NUMEL, min(align_up(hi, BLOCK_NUMEL), state.unit.numel)
        out = torch.empty((last - first) * state.dtype.itemsize, dtype=torch.uint8)
        origin = state.unit.begin
        job = read_plane(state.plane, origin + first, origin + last, out, self._from.arena)
        self._from.mover.run(f"reading the gradient of {state.unit.name}", job)
        return out.view(state.dtype)[lo - first : hi - first]


def _common(one: Slot, other: Slot) -> range:
    """Elements of a parameter that both slots have."""
    begin = max(one.first_numel, other.first_numel)
    return range(begin, min(one.first_numel + one.numel, other.first_numel + other.numel))
