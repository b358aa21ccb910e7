"""Reads the values that an engine stores by parameter: weights, exact masters and states."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from offload.planes.copies import load_array
from offload.streams import MaybeEvent, Streams
from zero.params.layout import Layout, Slot, SubGroup, Unit
from zero.store.adoption import Piece
from zero.store.staging import StagedSubGroup
from zero.store.state_range import StateRange, state_range_of
from zero.store.storage import Storage

ParameterSlots = dict[int, list[tuple[Unit, Slot]]]
"""id(parameter) -> its units and slots, one for each tile if it is in tiles."""


class StoredValues:
    """Reads the tiered arrays of an engine at rest, on any thread but the storage's I/O loop.

    Args:
        layout: of the storage.
        storage: the storage to read.
        slots: of the parameters that may be read.
        reads_few: few parameters will be read: of a sub-group on the disk only their blocks are read. Else a sub-group
            is read as a whole, and stays staged for the next parameters.
    """

    def __init__(self, layout: Layout, storage: Storage, slots: ParameterSlots, *, reads_few: bool = False) -> None:
        self._layout = layout
        self._storage = storage
        self._slots = slots
        self._reads_few = reads_few
        self._staged: StagedSubGroup | None = None

    def states_count(self, unit: Unit) -> int:
        """Number of optimizer states that the unit's parameters have."""
        return len(self._storage.plan.states_of(unit))

    def has(self, parameter: nn.Parameter) -> bool:
        """True if the parameter's values are stored."""
        return id(parameter) in self._slots

    def slots_of(self, parameter: nn.Parameter) -> list[tuple[Unit, Slot]]:
        """The parameter's units and slots, one for each tile if it is in tiles."""
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
        """As `pieces`, for elements that are in one slot and in this rank's shard."""
        origin = unit.origin + slot.offset_numel - slot.first_numel  # the coordinate of the parameter's first element
        if not (state and unit.trainable):
            yield Piece(begin, self._weights(unit, origin + begin, origin + end))
            return
        for group in self._storage.plan.groups_over(self._layout.space_of(unit), origin + begin, origin + end):
            lo, hi = max(origin + begin, group.begin), min(origin + end, group.end)
            yield self._piece(unit, group, lo, hi, lo - origin)

    def close(self) -> None:
        """Free the memory that the last sub-group was read into. Idempotent."""
        staged, self._staged = self._staged, None
        if staged is not None:
            event = self._storage.streams.record_event()  # the device may not have done the reader's queued reads yet
            self._storage.io_loop.run("freeing a staged sub-group", _free_staged(staged, self._storage.streams, event))

    def _weights(self, unit: Unit, lo: int, hi: int) -> torch.Tensor:
        array = self._storage.weights[self._layout.space_of(unit)]
        memory = array.memory(lo, hi)
        if memory is not None:
            return memory.view(unit.dtype)
        self.close()  # free the block of the host pool first: nothing may wait for a block while it has one
        job = load_array(array, lo, hi, self._storage.host_pool)
        return self._storage.io_loop.run(f"reading {unit.name}", job).view(unit.dtype)

    def _piece(self, unit: Unit, group: SubGroup, lo: int, hi: int, first: int) -> Piece:
        is_staged = self._staged is not None and self._staged.group == group
        state_range = None
        if self._reads_few and not is_staged:
            state_range = state_range_of(self._storage, self._layout, group, lo, hi)
        if state_range is not None:
            self.close()  # as in `_weights`: nothing may wait for a block while it has one
            weights = self._weights(unit, lo, hi)
            remainder, states = self._storage.io_loop.run(f"reading {group.name}", _read_part(state_range, lo, hi))
            return Piece(first, weights, remainder, states)
        if self._staged is None or self._staged.group != group:
            self.close()
            job = stage_group(self._storage, self._layout, group)
            self._staged = self._storage.io_loop.run(f"reading {group.name}", job)
        state, weight = self._staged.state_view(), self._staged.weights[unit.index]
        first_in_group, end_in_group = lo - group.begin, hi - group.begin
        return Piece(
            first,
            weight.bytes.view(unit.dtype)[lo - weight.begin : hi - weight.begin],
            None if state.remainder is None else state.remainder[first_in_group:end_in_group],
            state.states.load(first_in_group, end_in_group),
        )


async def stage_group(storage: Storage, layout: Layout, group: SubGroup) -> StagedSubGroup:
    """Read a sub-group's optimizer state and weights, on the I/O loop. Raises StorageError: a read failed."""
    staged, streams = StagedSubGroup(storage, layout, group), storage.streams
    await staged.lease("optimizer state")
    try:
        await staged.read()
        await streams.synchronize(streams.record_event())  # the caller reads the values on other streams
    except BaseException:
        staged.free()
        raise
    return staged


async def _read_part(state_range: StateRange, lo: int, hi: int) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """Copies of the remainders and states at coordinates [lo, hi). Raises StorageError: a read failed."""
    await state_range.lease("optimizer state")
    try:
        await state_range.read()
        state, begin, end = state_range.state_view(), lo - state_range.begin, hi - state_range.begin
        return None if state.remainder is None else state.remainder[begin:end].clone(), state.states.load(begin, end)
    finally:
        state_range.free()


async def _free_staged(staged: StagedSubGroup, streams: Streams, event: MaybeEvent) -> None:
    streams.wait_events(event)
    staged.free()
