"""Gradients of several ranks: each rank keeps the sum of its shard, divided by the number of ranks.

[Note: order of reductions] A reduction needs all ranks, so all must start the same reductions in the same order, even
if their own backwards run in different orders. At the end of a backward the ranks agree on the order of the next one
with the same number in its step: the units that all ranks have always had, in the first rank's order. The initial order
is the layout's, reversed. A unit that is not the next one waits, in host memory if the pool has no room. At the end of
backward the remaining units of the order are reduced, with zeros for gradients that a rank does not have, and then all
other gradients that any rank has.

[Note: what is rounded] The bits must not depend on that order, because a resumed run has another order. So each rank
puts a parameter's first gradient of a backward into one reduction. Its mean is rounded to the unit's dtype, even if it
is then added to an earlier backward's gradient in fp32. Further gradients of the same backward (from a block that is
recomputed several times) are added up in fp32 and reduced in fp32 at its end, whether the first still waits or not. If
every rank has reduced zeros, the unit counts as one without a gradient.

[Note: stages 0 and 1] They reduce once per step: until then each rank adds up full gradients in fp32.

[Note: failure] A rank whose disk fails goes on reducing, because the others wait for it. A sum that could not be
written is kept in memory until a later write succeeds; if its disk fails again before that, or a sum cannot be made,
the gradient is lost. The step reports both, on all ranks.

[Note: dtype] All ranks reduce a unit in one dtype: in fp32 in the cases above, and always if backwards of this step
were deferred; otherwise in the unit's dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from offload.errors import BudgetError, StorageError
from offload.io.io_loop import IoFuture
from offload.kernels import kernels
from offload.memory.pool import Block
from offload.streams import MaybeEvent
from zero.optim.contributions import zero_gaps
from zero.optim.gradients import Gradients, UnitGradient
from zero.params.layout import Layout, Slot, Unit
from zero.store.collectives import Collectives, PendingWork
from zero.store.storage import Storage


class ReductionOrder:
    """The order in which one rank starts reductions. Pure: units are ints.

    Each backward of a step has a number and an order of its own.

    `expected`: the order of a number's first backward.
    """

    def __init__(self, expected: list[int]) -> None:
        self._expected, self._orders = expected, dict[int, list[int]]()
        self._number = -1
        self._next = 0
        # Units with a gradient in this backward, in the order of their first gradients.
        self.arrived_units: list[int] = []
        self._irregular: set[int] = set()  # Units that were missing in some backward; no order has them any more.

    def begin_step(self) -> None:
        """The next backward is the first of a step."""
        self._number = -1

    def begin_backward(self) -> None:
        """A backward begins whose gradients are reduced."""
        self._number += 1
        self._next, self.arrived_units = 0, []

    def add_ready(self, unit: int, waiting: Iterable[int]) -> list[int]:
        """Units to be reduced now, in order.

        Args:
            unit: has a gradient of this backward now.
            waiting: all units with a gradient, of this backward or an earlier one, that is not reduced yet.
        """
        self.note_arrival(unit)
        return self.take_ready(waiting)

    def note_arrival(self, unit: int) -> None:
        """A unit has a gradient now; `take_ready` returns the units to be reduced later."""
        if unit not in self.arrived_units:
            self.arrived_units.append(unit)

    def take_ready(self, waiting: Iterable[int]) -> list[int]:
        """Units to be reduced now, in order, among the `waiting` ones."""
        # A gradient of an earlier backward alone is not ready: if it were reduced now, it would be reduced again.
        ready, due = set(waiting).intersection(self.arrived_units), list[int]()
        while self._next < len(self._order) and self._order[self._next] in ready:
            due.append(self._order[self._next])
            self._next += 1
        return due

    def take_remaining(self) -> list[int]:
        """The backward is over: the units of the agreed order that are still to be reduced, in order."""
        due, self._next = self._order[self._next :], len(self._order)
        return due

    @property
    def _order(self) -> list[int]:
        return self._orders.get(self._number, self._expected)

    def set_next_order(self, units_of_ranks: list[list[int]]) -> None:
        """Set the order of the next backward of this number.

        `units_of_ranks`: the units of each rank, in rank order.
        """
        everywhere = set(units_of_ranks[0]).intersection(*units_of_ranks[1:])
        self._irregular |= set(self._order) - everywhere
        self._orders[self._number] = [unit for unit in units_of_ranks[0] if unit in everywhere - self._irregular]


@dataclass(slots=True)
class UnreducedGradient:
    """A unit's full gradient on this rank, not reduced yet."""

    flat: torch.Tensor  # (unit.numel,) of the unit's dtype, or fp32 if several contributions are added up.
    block: Block | None  # Its leased memory, if it has some.
    event: MaybeEvent = None  # After the work that has written `flat`, on the stream of the backward.
    is_shared_zeros: bool = False  # `flat` is the shared zeros, in place of a gradient that this rank does not have.


@dataclass(slots=True)
class Reduction:
    """A gradient that is being reduced, and stored in its array on each rank."""

    block: Block | None
    has_home: bool  # False: there is no place for the sum, and only the other ranks need this reduction.
    future: IoFuture[None] | None = None
    is_done: bool = False


class ReducedGradients(Gradients):
    """Gradients that are reduced over ranks; see the notes above.

    `collectives`: with the other ranks. There is no `in_place`: full gradients are always collected outside the arrays.
    """

    def __init__(
        self, layout: Layout, storage: Storage, device: torch.device, threads: int, collectives: Collectives
    ) -> None:
        super().__init__(layout, storage, device, in_place=False, threads=threads)
        self._collectives, self._placement = collectives, collectives.placement
        trained = [unit for unit in reversed(layout.units) if unit.trainable]
        # Persistent units are last: they are in use until the end of a backward.
        self._order = ReductionOrder([unit.index for unit in sorted(trained, key=lambda unit: unit.persistent)])
        self._has_narrow_units = any(unit.dtype.itemsize < torch.float32.itemsize for unit in trained)
        self._unreduced: dict[int, UnreducedGradient] = {}
        # Unit -> positions of the slots whose first gradient of this backward has arrived.
        self._first_slots: dict[int, set[int]] = {}
        # Unit -> the sum of its further gradients of this backward, fp32 (unit.numel,).
        self._extra_sums: dict[int, torch.Tensor] = {}
        # Units for which this rank has reduced zeros in this backward, into empty arrays.
        self._zero_units: list[int] = []
        self._reducing = self._in_backward = self._starting = False
        self._is_reduced = False  # All of this step's gradients are reduced; some may still have to be stored.
        self.has_deferred = bool(storage.plan.deferred_bytes)
        self._zeros_block: Block | None = None

    # ---- a backward -----------------------------------------------------------------------------

    def begin_backward(self, *, boundary: bool, interleaved: bool = False) -> None:
        """See `Gradients`. Sums of several micro-batches in fp32 are reduced in fp32, as deferred gradients are."""
        super().begin_backward(boundary=boundary, interleaved=interleaved)
        self.has_deferred = self.has_deferred or (interleaved and self._storage.plan.accumulation == torch.float32)
        if self._zeros_block is None and self._units:
            self._zeros_block = self._lease_zeros()
        self._in_backward, self._is_reduced = True, False
        self._first_slots.clear()
        self._zero_units.clear()
        self._reducing = boundary or not self._placement.gradients_deferred
        if not self._reducing:
            self.has_deferred = True
            return
        if self._has_narrow_units and self._placement.gradients_deferred and not self._storage.plan.deferred_bytes:
            # A rank may have had more backwards than others before this one.
            answers = self._collectives.all_gather_bytes("sums that wait", bytes([self.has_deferred]))
            self.has_deferred = any(answer == b"\1" for answer in answers)
        self._order.begin_backward()

    def add_gradient(
        self, index: int, position: int, gradient: torch.Tensor, rows: torch.Tensor | None = None, divisor: float = 1.0
    ) -> bool:
        """See `Gradients`. Where ranks fetch together, reductions have fixed places among the gathers: a unit's
        backward ends when all ranks leave a call, and not when this rank has all gradients of the unit.
        """
        return (
            super().add_gradient(index, position, gradient, rows, divisor) and not self._placement.fetches_collectively
        )

    def flush(self, index: int) -> None:
        """See `Gradients`. The gradients that have arrived wait to be reduced."""
        state = self._units.get(index)
        if state is None or state.buffer is None:
            return
        self._streams.wait_stream(state.stream)
        arrived = [state.unit.slots[position] for position in state.buffered_counts]
        zero_gaps(state.buffer, state.unit, arrived, 0)
        for position, count in state.buffered_counts.items():
            state.contributions[position] += count
        newest = UnreducedGradient(state.buffer, state.block, self._streams.record_event())
        if self._in_backward and self._reducing:
            first_slots = self._first_slots.setdefault(index, set())
            self._move_extra(state.unit, newest, [p for p in state.buffered_counts if p in first_slots])
            arrived = [state.unit.slots[position] for position in state.buffered_counts if position not in first_slots]
            first_slots.update(state.buffered_counts)
        self._add_unreduced(state, newest, arrived)
        state.buffer = state.block = state.stream = None
        state.buffered_counts, state.accumulates = {}, False

    def on_unit_backward_end(self, index: int) -> None:
        """See `Gradients`. The gradients that have arrived may be reduced, in the agreed order."""
        self.flush(index)
        if self._in_backward and self._reducing and index in self._first_slots and not self._awaits_gradients(index):
            if self._starting:
                self._order.note_arrival(index)
            else:
                self._start_reductions(self._order.add_ready(index, self._unreduced))

    def _awaits_gradients(self, index: int) -> bool:
        """True if a parameter's sum of earlier backwards waits for its gradient of this one.

        The end of a reentrant checkpoint ends the unit's backward although other gradients of the unit are still to
        come. The sums that go into the mean over ranks must not depend on the time of the reduction, so the unit waits
        for the end of backward.
        """
        arrived, counts = self._first_slots[index], self._units[index].contributions
        return self.has_deferred and any(count and position not in arrived for position, count in enumerate(counts))

    def end_backward(self) -> None:
        """See `Gradients`. Collective."""
        self.flush_all()
        if self._in_backward and self._reducing:
            for index in self._first_slots:
                self._order.note_arrival(index)
            self._start_reductions(self._order.take_remaining())
            units_of_ranks, zero_units = self._reduce_remaining("end of backward", self._order.arrived_units)
            self._order.set_next_order(units_of_ranks)
            self._reset_units(zero_units)
        self._in_backward = self.is_interleaved = False

    def abort_backward(self) -> None:
        self._in_backward = self.is_interleaved = False

    def finish_for_step(self) -> None:
        """See `Gradients`. Collective."""
        self.flush_all()
        if self._placement.gradients_deferred and not self._is_reduced:
            self._reduce_remaining("gradients not reduced yet", [])
            self._is_reduced = True  # an interrupt below happens on this rank alone: the others have continued
        self.wait_until_stored()
        self._begin_step()

    def _begin_step(self) -> None:
        self._is_reduced = False
        self._order.begin_step()
        self.has_deferred = bool(self._storage.plan.deferred_bytes)

    def clear(self) -> None:
        for gradient in self._unreduced.values():
            self._free_block(gradient)
        self._unreduced.clear()
        self._extra_sums.clear()
        super().clear()
        self._begin_step()

    def unreduced_gradients(self, only: int | None = None) -> dict[int, torch.Tensor]:
        indices = (index for index in self._unreduced if only in (None, index))
        return {index: self._wait_for_event(self._unreduced[index]).flat.cpu() for index in indices}

    def _wait_for_event(self, gradient: UnreducedGradient) -> UnreducedGradient:
        """The same; the current stream waits for it."""
        self._streams.wait_events(gradient.event)
        return gradient

    def free_pool_memory(self, *, drop_unreduced: bool) -> dict[int, torch.Tensor]:
        zeros_block, self._zeros_block = self._zeros_block, None
        if zeros_block is not None:
            zeros_block.free()
        if not drop_unreduced:
            return {}
        gradients, self._unreduced = self._unreduced, {}
        copies = {index: self._wait_for_event(g).flat.to("cpu", copy=True) for index, g in gradients.items()}
        for gradient in gradients.values():
            self._free_block(gradient)
        return copies

    def scale_unreduced(self, unit: Unit, slot: Slot, factor: float | None) -> None:
        if unit.index in self._unreduced:
            part = self._wait_for_event(self._unreduced[unit.index]).flat[slot.offset_numel : slot.end_numel]
            part.zero_() if factor is None else part.mul_(factor)

    def drop_slot(self, unit: Unit, slot: Slot) -> None:
        # Other ranks may have gradients of the unit's other slots, so its sum stays.
        self._units[unit.index].contributions[slot.position] = 0

    def _has_gradient(self, state: UnitGradient, slot: Slot) -> bool:
        # `contributions` counts only this rank's. Of a reduced unit all slots are shown, some perhaps as zeros; so are
        # those of a unit that the step will reduce, since other ranks may have gradients that this one does not have.
        awaits_step = self._placement.gradients_deferred and bool(self.arrival_order)
        return super()._has_gradient(state, slot) or state.is_stored or awaits_step

    def restore_unreduced(self, index: int, flat: torch.Tensor) -> None:
        flat = flat.to(self._device)
        if flat.dtype == torch.float32:
            flat = self._storage.unreduced_gradients.allocate_deferred_sum(self._units[index].unit).copy_(flat)
        self._unreduced[index] = UnreducedGradient(flat, None)

    # ---- inside ---------------------------------------------------------------------------------

    def _free_block(self, gradient: UnreducedGradient) -> None:
        """Free its memory, with an event: the next user must wait for the work queued so far."""
        if gradient.block is not None:
            gradient.block.free(self._streams.record_event())

    def _open_buffer(self, state: UnitGradient) -> None:
        """Collect outside the array; the array's content must not change before the reduction."""
        self._wait_for_store(state)
        wide = self.is_interleaved and self._storage.plan.accumulation == torch.float32
        state.accumulates, dtype = self.is_interleaved, torch.float32 if wide else state.unit.dtype
        state.block = self._lease_buffer(state, state.unit.numel * dtype.itemsize)
        state.buffer = state.block.view(dtype, state.unit.numel)

    def _lease_buffer(self, state: UnitGradient, nbytes: int) -> Block:
        """As with one rank; if the pool is full, unreduced gradients are moved out of it."""
        pool = self._storage.gradient_pool
        block = pool.try_allocate(nbytes)
        steps = (self._wait_for_stores, self._flush_others, self._wait_for_stores, self._move_to_host)
        for make_room in steps:
            if block is None:
                make_room(state)
                block = pool.try_allocate(nbytes)
        block = block or pool.allocate(nbytes, f"gradient of {state.unit.name}")
        self._streams.wait_events(*block.events)
        return block

    def _wait_for_store(self, state: UnitGradient) -> None:
        """See `Gradients`. Raises no StorageError; see the note on failure."""
        try:
            super()._wait_for_store(state)
        except StorageError as error:
            self.failure = self.failure or error

    def _wait_for_stores(self, state: UnitGradient) -> None:
        """Wait for the running reductions."""
        for other in self._units.values():
            self._wait_for_store(other)

    def _flush_others(self, state: UnitGradient) -> None:
        """Flush units with open buffers; they open again if needed. In a reduction flush the unit itself too."""
        for other in self._units.values():
            if other is not state or self._starting:
                self.flush(other.unit.index)

    def _add_unreduced(self, state: UnitGradient, newest: UnreducedGradient, arrived: list[Slot]) -> None:
        """Keep new gradients until their reduction. A backward that reduces puts them next to unreduced ones of other
        slots; other backwards add them up.
        """
        gradient = self._unreduced.get(state.unit.index)
        if gradient is not None:
            self._wait_for_event(gradient)
        if self._reducing and gradient is None and arrived:
            self._unreduced[state.unit.index] = newest
            return
        if self._reducing and gradient is not None and gradient.flat.dtype != torch.float32:
            for slot in arrived:
                part = slice(slot.offset_numel, slot.end_numel)
                gradient.flat[part].copy_(newest.flat[part])
            gradient.event = self._streams.record_event()
        elif arrived:
            self._accumulate(state, gradient, newest)
        self._free_block(newest)

    def _accumulate(self, state: UnitGradient, gradient: UnreducedGradient | None, newest: UnreducedGradient) -> None:
        """Add up gradients of several backwards, in fp32."""
        if gradient is None or gradient.flat.dtype != torch.float32 or gradient.block is not None:
            self._wait_for_store(state)  # an earlier sum may still be read
            wide = self._storage.unreduced_gradients.allocate_deferred_sum(state.unit)
            kernels.cast(wide, (gradient or newest).flat)
        else:
            wide = gradient.flat
        if gradient is not None:
            kernels.accumulate(wide, newest.flat)
            self._free_block(gradient)
        self._unreduced[state.unit.index] = UnreducedGradient(wide, None, self._streams.record_event())

    def _move_extra(self, unit: Unit, newest: UnreducedGradient, positions: list[int]) -> None:
        """Take from `newest` the gradients of parameters that have had one in this backward."""
        for slot in (unit.slots[position] for position in positions):
            if unit.index not in self._extra_sums:
                self._extra_sums[unit.index] = torch.zeros(unit.numel, dtype=torch.float32, device=newest.flat.device)
            part = newest.flat[slot.offset_numel : slot.end_numel]
            self._extra_sums[unit.index][slot.offset_numel : slot.end_numel] += part
            part.zero_()

    def _move_to_host(self, state: UnitGradient) -> None:
        """Move unreduced gradients to host memory, to make room in the pool."""
        for gradient in self._unreduced.values():
            if gradient.block is not None:
                host_copy = self._wait_for_event(gradient).flat.to("cpu", copy=True)
                gradient.block.free(self._streams.record_event())
                gradient.flat, gradient.block, gradient.event = host_copy, None, None

    def _start_reductions(self, due: list[int]) -> None:
        """Start reductions, and then those that become due meanwhile.

        A reduction that has to make room for itself must not start another: the other would be queued first, on this
        rank alone.
        """
        self._starting = True
        try:
            while due:
                for index in due:
                    self._start_reduction(index)
                due = self._order.take_ready(self._unreduced) if self._in_backward else []
        finally:
            self._starting = False

    def _reduce_remaining(self, what: str, arrived_units: list[int]) -> tuple[list[list[int]], set[int]]:
        """Reduce the gradients that any rank still has, then further gradients.

        Returns each rank's `arrived_units`, and the units for which every rank has reduced zeros so far.
        `arrived_units` cannot show this: it lacks gradients that a rank has only from an earlier backward.
        """
        is_wide = [(index, gradient.flat.dtype == torch.float32) for index, gradient in self._unreduced.items()]
        message = [arrived_units, is_wide, list(self._extra_sums), self._zero_units]
        answers = self._collectives.all_gather_bytes(what, json.dumps(message).encode())
        arrived_of_ranks, is_wide_of_ranks, extra_of_ranks, zeros_of_ranks = zip(*map(json.loads, answers), strict=True)
        unreduced: dict[int, bool] = {}  # Unit -> whether any rank has its gradient in fp32.
        for rank_is_wide in is_wide_of_ranks:
            for index, wide in rank_is_wide:
                unreduced[index] = unreduced.get(index, False) or wide
        self._starting = True
        try:
            for index, wide in sorted(unreduced.items()):
                self._start_reduction(index, wide=wide)
            for index in sorted(set[int]().union(*extra_of_ranks)):
                self._reduce_extra(index)
        finally:
            self._starting = False
        zero_units = set[int](zeros_of_ranks[0]).intersection(*zeros_of_ranks[1:])
        return list(arrived_of_ranks), zero_units

    def _reduce_extra(self, index: int) -> None:
        extra_sum, state = self._extra_sums.pop(index, None), self._units[index]
        if extra_sum is not None:
            self._wait_for_store(state)  # the previous reduction may still read its fp32 memory
            flat = self._storage.unreduced_gradients.allocate_deferred_sum(state.unit).copy_(extra_sum)
            self._unreduced[index] = UnreducedGradient(flat, None)
        self._start_reduction(index, wide=True)

    def _reset_units(self, zero_units: set[int]) -> None:
        """Reset units that every rank reduced as zeros: they had no gradient, so the next one is the first."""
        for index in zero_units:
            state = self._units[index]
            self._wait_for_store(state)
            state.is_stored, state.array = False, state.narrow_array
            state.dtype = self._storage.gradient_dtype(state.unit)

    def _start_reduction(self, index: int, *, wide: bool = False) -> None:
        """Start the reduction of a unit's gradient, in fp32 if `wide`; this rank's is zero if it has none."""
        state = self._units[index]
        dtype = torch.float32 if wide or self.has_deferred else state.unit.dtype
        try:
            gradient = self._gradient_to_reduce(state, dtype)
            has_home = self._vacate_home(state, dtype)
        except BudgetError as error:  # the other ranks wait for this reduction: report why it fails
            self._collectives.cancel(self._collectives.enqueue("reduce", state.unit), error)
            raise
        work = self._collectives.enqueue("reduce", state.unit)
        item = Reduction(gradient.block, has_home)
        rounds = state.dtype != dtype  # a mean added in fp32 is rounded before, as it would be if it were the first
        job = self._run_reduction(
            state, item, gradient, work, self._streams.record_event(), first=state.is_empty, rounds=rounds
        )
        self._busy_units.add(index)
        state.pending_store, state.is_stored = item, True
        item.future = self._storage.io_loop.submit(f"reducing the gradient of {state.unit.name}", job)
        if not self._collectives.overlaps:
            self._wait_for_store(state)

    def _gradient_to_reduce(self, state: UnitGradient, dtype: torch.dtype) -> UnreducedGradient:
        """The gradient to be reduced, in memory that the collectives can use."""
        index = state.unit.index
        self._wait_for_store(state)
        if state.is_empty and index not in self._unreduced:
            self._zero_units.append(index)
        unreduced = self._unreduced.pop(index, None)
        gradient = self._convert(state, None if unreduced is None else self._wait_for_event(unreduced), dtype)
        if gradient.flat.device.type != self._device.type or not self._collectives.can_reduce_from(gradient.flat):
            block = self._lease_buffer(state, gradient.flat.nbytes)
            flat = block.view(gradient.flat.dtype, gradient.flat.numel())
            gradient = UnreducedGradient(flat.copy_(gradient.flat), block)
        return gradient

    def _vacate_home(self, state: UnitGradient, dtype: torch.dtype) -> bool:
        """Make the place of the sum free for it. False: the disk has failed, and the gradient is lost."""
        try:
            if not state.is_empty and (self._must_widen(state) or dtype != state.dtype != torch.float32):
                self._widen(state)
            elif dtype == torch.float32:
                self.make_wide(state)
            if state.step_gradient is not None:
                self._apply_update(state.unit)
                self._streams.wait_events(self._streams.record_update_event())
                state.step_gradient = None
            self.reclaim_memory(state.unit)
        except StorageError as error:
            self.failure, self.has_lost = self.failure or error, True
            return False
        return True

    def _convert(
        self, state: UnitGradient, gradient: UnreducedGradient | None, dtype: torch.dtype
    ) -> UnreducedGradient:
        """The gradient to be reduced, in `dtype`: zeros if there is none."""
        if gradient is not None and gradient.flat.dtype == dtype:
            return gradient
        zeros = self._zeros(state.unit, dtype) if gradient is None else None
        if zeros is not None:
            return UnreducedGradient(zeros, None, is_shared_zeros=True)
        if dtype == state.unit.dtype:
            block = self._lease_buffer(state, state.unit.nbytes)
            converted = UnreducedGradient(block.view(dtype, state.unit.numel), block)
        else:
            converted = UnreducedGradient(self._storage.unreduced_gradients.allocate_deferred_sum(state.unit), None)
        if gradient is None:
            converted.flat.zero_()
        else:
            converted.flat.copy_(gradient.flat)
            self._free_block(gradient)
        return converted

    def _lease_zeros(self) -> Block:
        """Lease zeros, which this rank reduces in place of gradients that it does not have; one block for all units."""
        wide = self.is_interleaved and self.has_deferred
        nbytes = max(state.unit.numel * 4 if wide else state.unit.nbytes for state in self._units.values())
        block = self._storage.gradient_pool.allocate(nbytes, "gradients that are zero")
        self._streams.wait_events(*block.events)
        block.data.zero_()
        return block

    def _zeros(self, unit: Unit, dtype: torch.dtype) -> torch.Tensor | None:
        """The shared zeros in the unit's length; None if their block is too small."""
        block = self._zeros_block or self._lease_zeros()
        self._zeros_block = block
        return block.view(dtype, unit.numel) if unit.numel * dtype.itemsize <= block.data.numel() else None

    async def _run_reduction(
        self,
        state: UnitGradient,
        item: Reduction,
        gradient: UnreducedGradient,
        work: PendingWork,
        event: MaybeEvent,
        *,
        first: bool,
        rounds: bool,
    ) -> None:
        unit, scale = state.unit, self._collectives.scale
        try:
            async with self._collectives.reduce(work, unit, gradient.flat, event) as sources:
                home = state.array, state.dtype
                try:
                    if item.has_home:
                        await home[0].retry_failed_writes()  # on a failing disk each further sum would stay in memory
                        await self._store.store_sum(unit, home, sources, scale, state.sums, first=first, rounds=rounds)
                finally:
                    if gradient.is_shared_zeros:
                        gradient.flat.zero_()  # the collective may have made sums in this memory
        except BaseException as error:
            # A peer sends its part only once: this gradient lacks a backward, unless it only waits to be written.
            self.has_lost |= not getattr(error, "is_in_memory", False)
            raise
        finally:
            item.is_done = True
