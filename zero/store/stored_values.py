"""Reads the values in an engine's planes by parameter: weights, exact masters and states."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from offload.planes.copies import read_array
from offload.sizes import BLOCK_NUMEL, align_up
from offload.streams import MaybeEvent, Streams
from zero.params.layout import Layout, Slot, SubGroup, Unit
from zero.store.adoption import Piece
from zero.store.staging import StagedSubGroup
from zero.store.state_range import StateRange, state_range_of
from zero.store.storage import Storage

ParameterSlots = dict[int, list[tuple[Unit, Slot]]]
"""id(parameter) -> its places, one for each tile if it is in tiles."""


class StoredValues:
    """Reads the planes of an engine at rest; any thread but the storage's mover may.

    Args:
        layout: of the planes.
        storage: the storage of the planes.
        slots: of the parameters that it is asked for.
        reads_few: it is asked for few parameters: of a sub-group on the disk only what holds them is read. Else a sub-group
            is read as a whole, and kept for the next parameters.
    """

    def __init__(self, layout: Layout, storage: Storage, slots: ParameterSlots, *, reads_few: bool = False) -> None:
        self._layout, self._storage, self._slots, self._reads_few = layout, storage, slots, reads_few
        self._staged: StagedSubGroup | None = None

    def states_count(self, unit: Unit) -> int:
        """Number of the state planes that the unit's parameters have."""
        return len(self._storage.plan.states_of(unit))

    def has(self, parameter: nn.Parameter) -> bool:
        """True if the planes have the parameter's values."""
        return id(parameter) in self._slots

    def slots_of(self, parameter: nn.Parameter) -> list[tuple[Unit, Slot]]:
        """The parameter's places, one for each tile if it is in tiles."""
        return self._slots[id(parameter)]

    def pieces(self, parameter: nn.Parameter, begin: int, end: int, state: bool) -> Iterator[Piece]:
        """Elements [begin, end), with remainder and states if `state` and there are any.

        Each piece is valid until the next one is requested. Raises StorageError: a read failed.
        """
        for unit, slot in self._slots[id(parameter)]:
            first, last = max(begin, slot.first_numel), min(end, slot.first_numel + slot.numel)
            if first < last:
                yield from self.pieces_of_slot(unit, slot, first, last, state)

    def pieces_of_slot(self, unit: Unit, slot: Slot, begin: int, end: int, state: bool) -> Iterator[Piece]:
        """As `pieces`, for elements that are in one slot and in this rank's slice."""
        origin = unit.origin + slot.offset_numel - slot.first_numel  # the coordinate of the parameter's first element
        if not (state and unit.trainable):
            yield Piece(begin, self._weights(unit, origin + begin, origin + end))
            return
        for group in self._storage.plan.groups_over(self._layout.space_of(unit), origin + begin, origin + end):
            lo, hi = max(origin + begin, group.begin), min(origin + end, group.end)
            yield self._piece(unit, group, lo, hi, lo - origin)

    def close(self) -> None:
        """Give back the memory that the last sub-group was read into. Idempotent."""
        staged, self._staged = self._staged, None
        if staged is not None:
            read = self._storage.streams.record_event()  # the device may not have done the reader's queued reads yet
            self._storage.io_loop.run("releasing a state record", _free_staged(staged, self._storage.streams, read))

    def _weights(self, unit: Unit, lo: int, hi: int) -> torch.Tensor:
        plane = self._storage.weights[self._layout.space_of(unit)]
        memory = plane.memory(lo, hi)
        if memory is not None:
            return memory.view(unit.dtype)
        self.close()  # release the held block of the arena: a holder must not wait for another block
        begin, end = lo // BLOCK_NUMEL * BLOCK_NUMEL, min(align_up(hi, BLOCK_NUMEL), unit.end)
        out = torch.empty(plane.nbytes(begin, end), dtype=torch.uint8, device="cpu")
        job = read_array(plane, begin, end, out, self._storage.host_pool)
        self._storage.io_loop.run(f"reading {unit.name}", job)
        return out.view(unit.dtype)[lo - begin : hi - begin]

    def _piece(self, unit: Unit, group: SubGroup, lo: int, hi: int, first: int) -> Piece:
        held = self._staged is not None and self._staged.group == group
        part = state_range_of(self._storage, self._layout, group, lo, hi) if self._reads_few and not held else None
        if part is not None:
            self.close()  # as in `_weights`: a holder must not wait for another block
            own = self._weights(unit, lo, hi)
            remainder, states = self._storage.io_loop.run(f"reading {group.name}", _read_part(part, lo, hi))
            return Piece(first, own, remainder, states)
        if self._staged is None or self._staged.group != group:
            self.close()
            job = stage_group(self._storage, self._layout, group)
            self._staged = self._storage.io_loop.run(f"reading {group.name}", job)
        record, weight = self._staged.state_view(), self._staged.weights[unit.index]
        a, b = lo - group.begin, hi - group.begin
        return Piece(
            first,
            weight.bytes.view(unit.dtype)[lo - weight.begin : hi - weight.begin],
            None if record.remainder is None else record.remainder[a:b],
            record.states.load(a, b),
        )


async def stage_group(storage: Storage, layout: Layout, group: SubGroup) -> StagedSubGroup:
    """Read a sub-group's stored record and weights; runs on the mover's loop. Raises StorageError: a read failed."""
    staged, streams = StagedSubGroup(storage, layout, group), storage.streams
    await staged.lease("state record")
    try:
        await staged.read()
        await streams.synchronize(streams.record_event())  # the caller reads the values on other streams
    except BaseException:
        staged.free()
        raise
    return staged


async def _read_part(part: StateRange, lo: int, hi: int) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """Copies of the remainders and states at coordinates [lo, hi). Raises StorageError: a read failed."""
    await part.lease("state record")
    try:
        await part.read()
        record, begin, end = part.state_view(), lo - part.begin, hi - part.begin
        return None if record.remainder is None else record.remainder[begin:end].clone(), record.states.load(begin, end)
    finally:
        part.free()


async def _free_staged(staged: StagedSubGroup, streams: Streams, read: MaybeEvent) -> None:
    streams.wait_events(read)
    staged.free()
