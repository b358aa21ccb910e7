"""Reads the values that an engine stores by parameter: weights, exact masters and states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from offload.array.copies import load_array
from offload.kernels import masters
from offload.streams import MaybeEvent, Streams
from zero.params.layout import Layout, Slot, SubGroup, Unit
from zero.store.staging import StagedSubGroup
from zero.store.storage import Storage

ParameterSlots = dict[int, list[tuple[Unit, Slot]]]
"""id(parameter) -> its units and slots, one for each tile if it is in tiles."""


class Piece(NamedTuple):
    """A run of one parameter's values, 1-D tensors of equal length, on the CPU or the device."""

    first: int
    """Element of the parameter."""
    weight: torch.Tensor
    """Of any floating dtype; fp32 values of a 16-bit parameter keep their bits in its master."""
    remainder: torch.Tensor | None = None
    """What a 16-bit weight lacks of its fp32 master (`offload.kernels.masters`); None: derived from `weight`."""
    states: tuple[torch.Tensor, ...] | None = None
    """The optimizer's states, in the plan's order, fp32; None: zero."""

    def copy_into(self, out: torch.Tensor, begin: int = 0, state: int | None = None) -> None:
        """Write the piece to its place in `out`, values on the host from element `begin` of the parameter on.

        `state`: number of the state to write; None: the fp32 masters if they are here, else the weights.
        """
        part = out[self.first - begin : self.first - begin + self.weight.numel()]
        if state is not None:
            part.copy_(self.states[state]) if self.states is not None else part.zero_()
        elif self.remainder is None:
            part.copy_(self.weight)  # not by way of another copy on the host
        else:
            masters.join(part, self.weight.cpu(), self.remainder.cpu())


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
        staged, weights = self._staged, None
        if staged is None or staged.group != group or staged.is_part:
            self.close()  # as in `_weights`: nothing may wait for a block while it has one
            part = None
            if self._reads_few:
                part = StagedSubGroup.part_of_state(self._storage, self._layout, group, lo, hi, to_write=False)
            if part is not None:
                weights = self._weights(unit, lo, hi)
            staged = part or StagedSubGroup(self._storage, self._layout, group)
            self._storage.io_loop.run(f"reading {group.name}", staged.stage("optimizer state"))
            self._staged = staged
        if weights is None:
            weight = staged.weights[unit.index]
            weights = weight.bytes.view(unit.dtype)[lo - weight.begin : hi - weight.begin]
        state, begin, end = staged.state_view(), lo - staged.begin, hi - staged.begin
        remainder = None if state.remainder is None else state.remainder[begin:end]
        return Piece(first, weights, remainder, state.states.load(begin, end))


async def _free_staged(staged: StagedSubGroup, streams: Streams, event: MaybeEvent) -> None:
    streams.wait_events(event)
    staged.free()
