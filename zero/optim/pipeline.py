"""The sub-group pipeline: read, update, write, several sub-groups in flight.

[Note: what an update touches] A sub-group is a run of a space. Its state record (remainder, exp_avg,
exp_avg_sq, adjacent) is one sequential range of the record plane; its weights and gradients are
ranges of theirs. Whatever lives in memory the kernel can address is updated where it is; the rest
passes through one leased block of the arena. Results do not depend on the cutting.

[Note: failure] A sub-group whose read fails is untouched and stays due. One whose write fails has
been updated: the planes keep its block until a later write succeeds, so memory still holds the truth. In
both cases the error is raised and the next attempt goes on with what is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offload import kernels
from offload.arena import Block
from offload.mover import Transfer
from offload.planes import settle_all
from zero.optim.gradients import Gradients
from zero.params.layout import Layout, Slot, Space, SubGroup, Unit
from zero.staging import Record, Staged
from zero.storage import Storage


@dataclass(frozen=True, slots=True)
class AdamValues:
    """Hyper-parameters of one parameter in one step; Python doubles."""

    step_size: float
    bias2_sqrt: float
    decay: float
    l2: float
    beta1: float
    beta2: float
    eps: float


@dataclass(frozen=True, slots=True)
class StepArguments:
    """Fixed when `step()` is called; an update started later uses the same."""

    values: Mapping[int, AdamValues]
    """Parameter index -> values; a parameter that is missing had no gradient and is skipped."""
    grad_scale: float


class SubGroupPipeline:
    """Updates every sub-group once per step.

    Args:
        compute: where the update runs: the device when the states live there, else the CPU.
        threads: of the CPU kernel.
    """

    def __init__(
        self, layout: Layout, storage: Storage, gradients: Gradients, compute: torch.device, threads: int
    ) -> None:
        self._layout, self._storage, self._gradients = layout, storage, gradients
        self._compute, self._threads = compute, threads
        self._in_flight = storage.plan.records_in_flight

    def start(self, due: list[SubGroup], arguments: StepArguments) -> Transfer[None]:
        """Begin to update every sub-group in `due`; each leaves the list once its new state is held safely.

        The transfer fails with the first StorageError; `due` then holds what still has to be done.
        """
        return self._storage.mover.post("optimizer step", self._run(due, arguments))

    async def _run(self, due: list[SubGroup], arguments: StepArguments) -> None:
        # What could not be written last time occupies blocks that the sub-groups below need.
        await self._storage.rewrite_stranded()
        slots = asyncio.Semaphore(self._in_flight)
        failed = False

        async def guarded(group: SubGroup) -> None:
            nonlocal failed
            async with slots:
                if failed:
                    return  # stays due: on a disk that fails, every further update would strand a block
                try:
                    await self._update(group, arguments, due)
                except BaseException:
                    failed = True
                    raise

        await settle_all([guarded(group) for group in list(due)])

    async def _update(self, group: SubGroup, arguments: StepArguments, due: list[SubGroup]) -> None:
        space = self._layout.spaces[group.space]
        units = [
            unit
            for unit in space.overlapping(group.begin, group.end)
            if any(_overlap(unit, slot, group) and slot.index in arguments.values for slot in unit.slots)
        ]
        records = self._storage.records[group.space]
        if not units or records is None:
            due.remove(group)  # nothing here had a gradient: no byte of it has to move
            return
        record = Staged(records, group.begin, group.end, self._compute)
        runs = [self._run_of(unit, group) for unit in units]
        parts = [record, *(part for run in runs for part in run)]
        block = await self._storage.arena.lease_when_free(sum(part.nbytes for part in parts), "sub-group")
        error: BaseException | None = None
        kept = False
        try:
            offset = 0
            for part in parts:
                offset = part.stage(block, offset)
            await settle_all([part.read() for part in parts])
            for unit, (weight, gradient) in zip(units, runs, strict=True):
                self._apply(space, unit, record, weight, gradient, arguments)
            due.remove(group)
            kept, error = await self._write_back(block, [record, *(weight for weight, _ in runs)])
        finally:
            if not kept:
                block.release()
        if error is not None:
            raise error

    async def _write_back(self, block: Block, parts: list[Staged]) -> tuple[bool, BaseException | None]:
        """Store the results: (is `block` still needed, first error).

        A part that cannot be stored stays in `block`; its plane reads it from there until a write succeeds.
        """
        results = await asyncio.gather(*(part.write() for part in parts), return_exceptions=True)
        failed = [(part, r) for part, r in zip(parts, results, strict=True) if isinstance(r, BaseException)]
        holders = len(failed)

        def written() -> None:
            nonlocal holders
            holders -= 1
            if holders == 0:
                block.release()

        for part, _ in failed:
            part.plane.strand(part.begin, part.end, part.host_bytes, written)
        return bool(failed), failed[0][1] if failed else None

    def _run_of(self, unit: Unit, group: SubGroup) -> tuple[Staged, Staged]:
        begin, end = max(unit.begin, group.begin), min(unit.end, group.end)
        weights = self._storage.weights[group.space]
        gradients, _ = self._gradients.stored(unit.index)
        return Staged(weights, begin, end, self._compute), Staged(gradients, begin, end, self._compute)

    def _apply(
        self, space: Space, unit: Unit, record: Staged, weight: Staged, gradient: Staged, arguments: StepArguments
    ) -> None:
        """One kernel call for the part of a unit that lies in a sub-group."""
        numel = record.end - record.begin
        state = Record.over(record.bytes, numel, space.split)
        lo, hi = weight.begin - record.begin, weight.end - record.begin
        _, gradient_dtype = self._gradients.stored(unit.index)
        first = weight.begin - unit.begin
        segments = [
            segment
            for slot in unit.slots
            if (segment := _segment(slot, first, weight.end - weight.begin, arguments)) is not None
        ]
        kernels.adamw(
            weight.bytes.view(space.dtype),
            None if state.remainder is None else state.remainder[lo:hi],
            state.exp_avg[lo:hi],
            state.exp_avg_sq[lo:hi],
            gradient.bytes.view(gradient_dtype),
            segments,
            grad_scale=arguments.grad_scale,
            threads=self._threads,
        )


def _overlap(unit: Unit, slot: Slot, group: SubGroup) -> bool:
    return unit.begin + slot.offset_numel < group.end and group.begin < unit.begin + slot.end_numel


def _segment(slot: Slot, first: int, numel: int, arguments: StepArguments) -> kernels.Segment | None:
    """The slot's part of a run that starts at element `first` of the unit; None if empty or skipped."""
    values = arguments.values.get(slot.index)
    begin, end = max(slot.offset_numel - first, 0), min(slot.end_numel - first, numel)
    if values is None or begin >= end:
        return None
    return kernels.Segment(
        begin=begin,
        end=end,
        step_size=values.step_size,
        bias2_sqrt=values.bias2_sqrt,
        decay=values.decay,
        l2=values.l2,
        beta1=values.beta1,
        beta2=values.beta2,
        eps=values.eps,
    )
