"""The update of one sub-group: read, apply, write.

[Note: what an update touches] A sub-group is a run of a space. Its state record (remainder and state planes, adjacent)
is one sequential range of the record plane; its weights and gradients are ranges of theirs. Whatever lives in memory
the kernel can address is updated where it is; the rest passes through one leased block of the arena. Results do not
depend on the cutting.

[Note: delivery] Whoever waits for a unit's new weights gives the memory they are wanted in. Where the kernel can
address it, the old weights are read into it and updated there: one read serves the update and the forward. Elsewhere
they are copied there once updated.

[Note: order of writes] Weights are written at once: the memory they are in is wanted for other units. Records may wait;
see zero/optim/lent_gradients.py.

[Note: failure] A sub-group whose read fails is untouched and stays due. One whose write fails has been updated: the
planes keep its bytes until a later write succeeds, so memory still holds the truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import StateError
from offload.memory.pinned import aligned_copy
from offload.planes.planes import settle_all
from offload.streams import Fence
from offload.timeline import UPDATES
from zero.optim.gradients import Gradients
from zero.optim.lent_gradients import Places, SpareGradients
from zero.optim.rules import Rule, Run
from zero.params.layout import Layout, Slot, Space, SubGroup, Unit
from zero.store.staging import Staged, Staging
from zero.store.storage import Storage


@dataclass(frozen=True, slots=True)
class StepArguments:
    """Fixed when `step()` is called; an update started later uses the same."""

    values: Mapping[int, Any]
    """Parameter index -> what the rule has fixed of it; one that is missing had no gradient and is skipped."""
    grad_scale: float
    number: int
    """Of the step, counted from 1: errors name it, and moments that are not fp32 are rounded by it."""
    fence: Fence = None
    """Behind the last use of the old weights and the gradients on the device."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where a unit's weights are wanted."""

    into: torch.Tensor
    """uint8, the flat unit."""
    fences: tuple[Fence, ...]
    """Behind the last uses of that memory."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What one update reads and writes."""

    group: SubGroup
    space: Space
    units: list[Unit]
    record: Staged
    weights: list[Staged]
    """One per unit."""
    gradients: list[Staged]

    @property
    def host_nbytes(self) -> int:
        """Host memory that it passes through."""
        return sum(part.host_nbytes for part in self.parts)

    @property
    def parts(self) -> list[Staged]:
        return [self.record, *self.weights, *self.gradients]


@dataclass(frozen=True, slots=True)
class Told:
    """What an update calls on its way."""

    turn: Callable[[], None]
    """It could begin; may raise: then nothing happens."""
    applied: Callable[[frozenset[int]], None]
    """It is done, and these units' weights were delivered; nothing of it is stored yet."""
    returned: Callable[[], None]
    """Nothing reads memory of the caller's any more."""
    stored: Callable[[], None]
    """Its weights are where they live."""


class SubGroupPipeline:
    """Updates sub-groups, one call each."""

    def __init__(self, layout: Layout, storage: Storage, gradients: Gradients, rule: Rule) -> None:
        self._layout, self._storage, self._gradients, self._rule = layout, storage, gradients, rule
        self.spare = SpareGradients(layout, storage)
        self.places = Places(storage.plan.records_in_flight, self.spare)
        self.before: Callable[[SubGroup, StepArguments], Awaitable[None]] | None = None
        """Awaited before a sub-group changes: whoever still wants its old values takes them."""

    def trained_units(self, group: SubGroup, arguments: StepArguments) -> list[Unit]:
        """Units that have elements in the sub-group that this step changes."""
        return [
            unit
            for unit in self._layout.spaces[group.space].overlapping(group.begin, group.end)
            if any(slot.index in arguments.values and _overlap(unit, slot, group) for slot in unit.slots)
        ]

    def at_once(self, group: SubGroup, arguments: StepArguments) -> bool:
        """True when the update needs neither the disk nor another device than the forward's.

        Behind the step it would take the processor from the forward and gain nothing.
        """
        if self._storage.compute(group) != self._storage.device:
            return False
        planes = [self._storage.records[group.space], self._storage.weights[group.space]]
        runs = [(plane, group.begin, group.end) for plane in planes if plane is not None]
        for unit in self.trained_units(group, arguments):
            begin, end = max(unit.begin, group.begin), min(unit.end, group.end)
            runs.append((self._gradients.taken(unit.index).plane, begin, end))
        return all(plane.swap_bytes(begin, end) == 0 for plane, begin, end in runs)

    async def update(
        self, group: SubGroup, arguments: StepArguments, wanted: Mapping[int, Delivery], told: Told, threads: int
    ) -> None:
        """Update a sub-group and store the result.

        Args:
            group: has at least one trained unit.
            arguments: the step's.
            wanted: unit index -> where its part of the new weights goes; written from there too, so that
                memory has to stay as it is until `told.returned` is called, or this returns.
            told: called on the way.
            threads: of the CPU kernel.

        Raises:
            StorageError: before `told.applied` was called nothing has changed; afterwards the planes hold the new
                values in memory.
        """
        if self.before is not None:
            await self.before(group, arguments)
        units = self.trained_units(group, arguments)
        work, streams = self._work(group, units, wanted, other=False), self._storage.streams
        async with self.places.take(work.host_nbytes) as lent:
            told.turn()
            streams.wait(arguments.fence)
            if self._storage.compute(group) != self._storage.device:
                # The host writes over weights that a forward's copies may still read.
                await streams.reached(arguments.fence)
            staging = await Staging.lease(self._storage, work.parts, "sub-group", lent)
            error: BaseException | None = None
            kept = False
            try:
                await self._compute_into(work, arguments, threads)
                await self._deliver(work, wanted)
                told.applied(frozenset(unit.index for unit in units) & wanted.keys())
                self.spare.give(group, units)
                kept, error = await self._write_back(work, staging, told, lent is not None)
            finally:
                if not kept:
                    staging.release()
        if error is not None:
            raise error

    async def update_aside(self, group: SubGroup, arguments: StepArguments, threads: int) -> None:
        """Write what an update would give to the sub-group's other slot; the state stays as it is.

        Raises:
            StorageError: nothing has changed.
        """
        work = self._work(group, self.trained_units(group, arguments), {}, other=True)
        staging = await Staging.lease(self._storage, work.parts, "sub-group")
        try:
            await self._compute_into(work, arguments, threads)
            await settle_all([part.write() for part in (work.record, *work.weights)])
        finally:
            staging.release()

    def _work(self, group: SubGroup, units: list[Unit], wanted: Mapping[int, Delivery], *, other: bool) -> _Work:
        records, weights = self._storage.records[group.space], self._storage.weights[group.space]
        streams = self._storage.streams
        targets = self._storage.other_slots[group.space] if other else None
        compute = self._storage.compute(group)
        if records is None:
            raise StateError(f"sub-group {group}: its space is not trained")

        def weight_of(unit: Unit) -> Staged:
            begin, end = max(unit.begin, group.begin), min(unit.end, group.end)
            given = _part(unit, wanted[unit.index].into, begin, end) if unit.index in wanted else None
            return Staged(weights, begin, end, compute, streams, given, targets.weights if targets else None)

        def gradient_of(unit: Unit) -> Staged:
            plane = self._gradients.taken(unit.index).plane
            return Staged(plane, max(unit.begin, group.begin), min(unit.end, group.end), compute, streams)

        target = targets.records if targets else None
        record = Staged(records, group.begin, group.end, compute, streams, target=target)
        space = self._layout.spaces[group.space]
        return _Work(group, space, units, record, [*map(weight_of, units)], [*map(gradient_of, units)])

    async def _compute_into(self, work: _Work, arguments: StepArguments, threads: int) -> None:
        def compute() -> None:
            for unit, weight, gradient in zip(work.units, work.weights, work.gradients, strict=True):
                with self._storage.timeline.span(UPDATES, f"{unit.name} in {work.group.name}", weight.bytes.numel()):
                    self._apply(work, unit, weight, gradient, arguments, threads)

        await settle_all([part.read() for part in work.parts])
        if self._storage.compute(work.group).type == "cpu":
            await self._storage.streams.compute_on_host(compute)
        else:
            compute()  # the device is only told what to do

    async def _deliver(self, work: _Work, wanted: Mapping[int, Delivery]) -> None:
        """Copy new weights to where they are wanted or live, if they were not updated there."""
        streams = self._storage.streams
        for unit, weight in zip(work.units, work.weights, strict=True):
            if unit.index in wanted and not weight.borrowed:
                delivery = wanted[unit.index]
                target = _part(unit, delivery.into, weight.begin, weight.end)
                streams.wait(streams.copy_in(target, weight.bytes, *delivery.fences, streams.fence()))
        # Who uses weights on the device where they live has no other way to see them.
        await settle_all([weight.write() for weight in work.weights if weight.copied_home])

    async def _write_back(
        self, work: _Work, staging: Staging, told: Told, lent: bool
    ) -> tuple[bool, BaseException | None]:
        """Store the results: (is `staging` still needed, first error).

        A part that cannot be stored stays in it, or in a copy if it lies in memory that others want; its plane
        reads it from there until a write succeeds.
        """

        async def write_record() -> None:
            async with self.places.writes:
                await work.record.write()

        record = asyncio.create_task(write_record())
        weights = [weight for weight in work.weights if not weight.copied_home]
        results = list(await asyncio.gather(*(weight.write() for weight in weights), return_exceptions=True))
        failed = [(part, r) for part, r in zip(weights, results, strict=True) if isinstance(r, BaseException)]
        for part, _ in failed:
            if part.borrowed:
                part.plane.strand(part.begin, part.end, aligned_copy(part.host_bytes), _nothing)
        told.returned()
        if not failed:
            told.stored()
        for result in await asyncio.gather(record, return_exceptions=True):
            if isinstance(result, BaseException):
                failed.append((work.record, result))
        staged = [part for part, _ in failed if not part.borrowed]
        return self._strand(staged, staging, lent), failed[0][1] if failed else None

    def _strand(self, failed: list[Staged], staging: Staging, lent: bool) -> bool:
        """What could not be written is the truth. True if it stays in `staging`, which is released later."""
        holders = len(failed)

        def written() -> None:
            nonlocal holders
            holders -= 1
            if holders == 0:
                staging.release()

        for part in failed:
            if lent:
                part.plane.strand(part.begin, part.end, aligned_copy(part.host_bytes), _nothing)
            else:
                part.plane.strand(part.begin, part.end, part.host_bytes, written)
        return bool(failed) and not lent

    def _apply(
        self, work: _Work, unit: Unit, weight: Staged, gradient: Staged, arguments: StepArguments, threads: int
    ) -> None:
        """Update the part of a unit that lies in a sub-group."""
        space, record = work.space, work.record
        layout = self._storage.plan.record_format(space)
        state = layout.over(record.bytes, record.begin, record.end, arguments.number)
        lo, hi = weight.begin - record.begin, weight.end - record.begin
        first = weight.begin - unit.origin
        segments = [
            segment
            for slot in unit.slots
            if (segment := _segment(slot, first, weight.end - weight.begin, arguments)) is not None
        ]
        run = Run(
            weight.bytes.view(space.dtype),
            None if state.remainder is None else state.remainder[lo:hi],
            state.states.part(lo, hi),
            gradient.bytes.view(self._gradients.taken(unit.index).dtype),
            segments,
        )
        self._rule.update(run, arguments.grad_scale, threads)


def _part(unit: Unit, flat: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Coordinates [begin, end) of a flat unit in bytes."""
    width = unit.dtype.itemsize
    return flat[(begin - unit.begin) * width : (end - unit.begin) * width]


def _nothing() -> None:
    """A stranded copy of its own needs nobody to be told."""


def _overlap(unit: Unit, slot: Slot, group: SubGroup) -> bool:
    begin, end = unit.within(slot)
    return begin < end and begin < group.end and group.begin < end


def _segment(slot: Slot, first: int, numel: int, arguments: StepArguments) -> tuple[int, int, Any] | None:
    """(begin, end, values) of the slot in a run that starts at element `first` of the unit; None if it has none."""
    values = arguments.values.get(slot.index)
    begin, end = max(slot.offset_numel - first, 0), min(slot.end_numel - first, numel)
    return None if values is None or begin >= end else (begin, end, values)
