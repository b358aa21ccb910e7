"""The update of one sub-group: read, apply, write.

[Note: what an update touches] A sub-group is a range of an address space. Its optimizer state (remainder and array
states, adjacent) is one sequential range of the array of states; its weights and gradients are ranges of their arrays.
Values in memory that the kernel can address are updated in place; other values pass through one leased block of the
host pool. Results do not depend on the cut into sub-groups.

[Note: delivery] A caller that waits for a unit's new weights passes the memory for them. If the kernel can address it,
the old weights are read into it and updated there: one read serves the update and the forward. Otherwise the weights
are copied there after the update.

[Note: order of writes] Weights are written at once, because other units need the memory that they are in. Writes of
optimizer states may wait; see zero/optim/spare_memory.py.

[Note: failure] If its read fails, a sub-group is untouched and stays due. If its write fails, it has been updated: the
arrays keep its bytes until a later write succeeds, so memory still holds the true values.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from offload.array.tiered_array import TieredArray, await_all
from offload.memory.pool import Block
from offload.streams import MaybeEvent
from offload.timeline import UPDATES
from zero.optim.gradients import Gradients
from zero.optim.rules import NO_SMALL, Rules, UpdateRun
from zero.optim.small_states import SmallStates, SmallTensors
from zero.optim.spare_memory import SpareGradientMemory, UpdateAdmission
from zero.params.layout import Layout, Slot, SubGroup, Unit
from zero.store.staging import StagedSubGroup
from zero.store.storage import Storage

NewSmallStates = Mapping[int, SmallTensors]  # Parameter index -> small states after an update.


@dataclass(frozen=True, slots=True)
class StepArguments:
    """Fixed when `step()` is called; an update started later uses the same."""

    # Parameter index -> the values that the rule has fixed; a missing parameter had no gradient and is skipped.
    values: Mapping[int, Any]
    grad_scale: float
    number: int  # Of the step, from 1: errors name it, and the rounding of moments that are not fp32 depends on it.
    event: MaybeEvent = None  # After the last use of the old weights and the gradients on the device.
    # Parameter index -> the object with its small states, for rules that have some.
    small: Mapping[int, SmallStates] = field(default_factory=dict)

    def store_small_states(self, small: NewSmallStates) -> None:
        """An update counts: store its new small states."""
        for index, tensors in small.items():
            self.small[index].tensors = tensors


@dataclass(frozen=True, slots=True)
class Delivery:
    """Memory to which a unit's weights are delivered."""

    into: torch.Tensor  # uint8, this rank's shard of a flat buffer.
    events: tuple[MaybeEvent, ...]  # After the last uses of that memory.


@dataclass(slots=True)
class SubGroupUpdate:
    """One update that is running: `compute`, then `store_weights`, then `store_state`, once each."""

    work: StagedSubGroup
    arguments: StepArguments
    deliveries: Mapping[int, Delivery]
    spare_block: Block | None
    state_tasks: list[asyncio.Task[None]] = field(default_factory=list)
    weight_errors: list[BaseException | None] = field(default_factory=list)


class OldValuesReader(Protocol):
    """Reads the values of sub-groups before an update changes them: a checkpoint in progress."""

    async def before_update(self, group: SubGroup, arguments: StepArguments) -> None: ...


class SubGroupPipeline:
    """Updates sub-groups, one call each."""

    def __init__(self, layout: Layout, storage: Storage, gradients: Gradients, rules: Rules) -> None:
        self._layout = layout
        self._storage = storage
        self._gradients = gradients
        self._rules = rules
        self.spare_memory = SpareGradientMemory(layout, storage)
        self._admission = UpdateAdmission(storage.plan.sub_groups_in_flight, self.spare_memory)
        self.old_values_reader: OldValuesReader | None = None

    def trained_units(self, group: SubGroup, arguments: StepArguments) -> list[Unit]:
        """Units with elements in the sub-group that this step changes."""
        return [
            unit
            for unit in self._layout.units_in(group)
            if any(slot.index in arguments.values and _overlap(unit, slot, group) for slot in unit.slots)
        ]

    def can_update_now(self, group: SubGroup, arguments: StepArguments) -> bool:
        """True if the update needs neither the disk nor another device than the forward's.

        After the step it would take the processor from the forward and gain nothing.
        """
        if self._storage.update_device(group) != self._storage.device:
            return False
        arrays = [self._storage.state_arrays[group.space], self._storage.weights[group.space]]
        ranges = [(array, group.begin, group.end) for array in arrays if array is not None]
        for unit in self.trained_units(group, arguments):
            ranges.append((self._gradients.step_gradient(unit.index).array, *group.range_in(unit)))
        return all(array.swap_bytes(begin, end) == 0 for array, begin, end in ranges)

    @asynccontextmanager
    async def begin_update(
        self, group: SubGroup, arguments: StepArguments, deliveries: Mapping[int, Delivery]
    ) -> AsyncIterator[SubGroupUpdate]:
        """Context of one update; entered when there is memory for it.

        Args:
            group: has at least one trained unit.
            arguments: the step's.
            deliveries: unit index -> memory for its part of the new weights. They are written to the disk from there
                too, so this memory must not change until `store_weights` has returned.
        """
        if self.old_values_reader is not None:
            await self.old_values_reader.before_update(group, arguments)
        units = self.trained_units(group, arguments)
        caller_memory = {
            unit.index: _bytes_of(unit, deliveries[unit.index].into, *group.range_in(unit))
            for unit in units
            if unit.index in deliveries
        }
        work = StagedSubGroup(self._storage, self._layout, group, units, caller_memory, self._gradient_array)
        async with self._admission.admit(work.host_nbytes) as spare_block:
            try:
                yield SubGroupUpdate(work, arguments, deliveries, spare_block)
            finally:
                work.free()

    async def compute(self, update: SubGroupUpdate, threads: int) -> frozenset[int]:
        """Read the sub-group and update it. When this returns, the update counts, and nothing is stored yet.

        Returns the units whose new weights were delivered. Raises StorageError: nothing has changed.

        `threads`: of the CPU kernel.
        """
        work, arguments, streams = update.work, update.arguments, self._storage.streams
        streams.wait_events(arguments.event)
        if self._storage.update_device(work.group) != self._storage.device:
            # The host overwrites weights that a forward's copies may still read.
            await streams.synchronize(arguments.event)
        await work.lease("sub-group", update.spare_block)
        new_small = await self._compute_into(work, arguments, threads)
        await self._deliver(work, update.deliveries)
        arguments.store_small_states(new_small)
        return frozenset(unit.index for unit in work.units) & update.deliveries.keys()

    async def store_weights(self, update: SubGroupUpdate) -> bool:
        """Store the new weights, and begin to store the state. True: the weights are stored in their home.

        When this returns, the update does not read the caller's memory any more. See `StagedRange.write_or_strand`.
        """
        work, streams = update.work, self._storage.streams
        if update.spare_block is not None or (
            self._storage.update_device(work.group) == self._storage.device and not work.in_place
        ):
            # A GPU may still read gradients in host memory, or copy new weights out of spare memory.
            await streams.synchronize(streams.record_event())
        self.spare_memory.offer(work.group, work.units)

        async def write_state() -> None:
            async with self._admission.write_semaphore:
                await work.state.write_or_strand()

        update.state_tasks = [] if work.state.in_place else [asyncio.create_task(write_state())]
        weights = [weight for weight in work.weights.values() if not (weight.has_memory_home or weight.in_place)]
        # When they have ended the owner may overwrite its memory, and store newer weights of its own: weights that are
        # stranded later would replace them.
        errors = await asyncio.gather(*(weight.write_or_strand() for weight in weights), return_exceptions=True)
        update.weight_errors = list(errors)
        return not any(errors)

    async def store_state(self, update: SubGroupUpdate) -> BaseException | None:
        """Wait until the state is stored. Returns the first error of the update: arrays hold its values in memory."""
        state_errors = await asyncio.gather(*update.state_tasks, return_exceptions=True)
        return next((error for error in (*update.weight_errors, *state_errors) if error is not None), None)

    def _gradient_array(self, unit: Unit) -> TieredArray:
        """The array of the gradient that an update of the unit uses."""
        return self._gradients.step_gradient(unit.index).array

    async def _compute_into(self, work: StagedSubGroup, arguments: StepArguments, threads: int) -> NewSmallStates:
        new_small: dict[int, SmallTensors] = {}

        def compute() -> None:
            for unit in work.units:
                nbytes = work.weights[unit.index].bytes.numel()
                with self._storage.timeline.span(UPDATES, f"{unit.name} in {work.group.name}", nbytes):
                    new_small.update(self._apply_rule(work, unit, arguments, threads))

        await work.read()
        with self._storage.io_loop.computing():
            await work.compute(compute)
        return new_small

    async def _deliver(self, work: StagedSubGroup, deliveries: Mapping[int, Delivery]) -> None:
        """Copy new weights to the caller's memory and to their home, if they were not updated there."""
        streams = self._storage.streams
        for unit in work.units:
            weight = work.weights[unit.index]
            if unit.index in deliveries and not weight.uses_caller_memory:
                delivery = deliveries[unit.index]
                target = _bytes_of(unit, delivery.into, weight.begin, weight.end)
                streams.wait_events(
                    streams.copy_to_device(target, weight.bytes, *delivery.events, streams.record_event())
                )
        # Weights that are used in their home on the device must be there before the update counts.
        await await_all([weight.write() for weight in work.weights.values() if weight.has_memory_home])

    def _apply_rule(self, work: StagedSubGroup, unit: Unit, arguments: StepArguments, threads: int) -> NewSmallStates:
        """Update the part of a unit that is in a sub-group; returns the new small states."""
        weight, gradient = work.weights[unit.index], work.gradients[unit.index]
        state = work.state_view(arguments.number)
        lo, hi = weight.begin - work.group.begin, weight.end - work.group.begin
        first = weight.begin - unit.origin
        pairs = ((slot, _segment(slot, first, weight.end - weight.begin, arguments)) for slot in unit.slots)
        segments = [(slot, segment) for slot, segment in pairs if segment is not None]
        small_states = [arguments.small.get(slot.index) for slot, _ in segments]
        run = UpdateRun(
            weight.bytes.view(work.space.dtype),
            None if state.remainder is None else state.remainder[lo:hi],
            state.states.part(lo, hi),
            gradient.bytes.view(self._gradients.step_gradient(unit.index).dtype),
            [segment for _, segment in segments],
            [tuple(slot.shape) for slot, _ in segments],
            [NO_SMALL if small is None else small.tensors for small in small_states],
        )
        new_small = self._rules.each[unit.rule].update_run(run, arguments.grad_scale, threads)
        pairs_of_small = zip(segments, new_small or (), strict=bool(new_small))
        return {slot.index: tensors for (slot, _), tensors in pairs_of_small if tensors}


def _bytes_of(unit: Unit, flat: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """The bytes of coordinates [begin, end) in `flat`, this rank's shard of a flat buffer."""
    width = unit.dtype.itemsize
    return flat[(begin - unit.begin) * width : (end - unit.begin) * width]


def _overlap(unit: Unit, slot: Slot, group: SubGroup) -> bool:
    begin, end = unit.shard_range(slot)
    return begin < end and begin < group.end and group.begin < end


def _segment(slot: Slot, first: int, numel: int, arguments: StepArguments) -> tuple[int, int, Any] | None:
    """(begin, end, values) of the slot in a run that starts at element `first` of the unit; None if it has none."""
    values = arguments.values.get(slot.index)
    begin, end = max(slot.offset_numel - first, 0), min(slot.end_numel - first, numel)
    return None if values is None or begin >= end else (begin, end, values)
