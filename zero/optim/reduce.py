"""Gradients of several ranks: each rank keeps the sum of its slice, divided by the number of ranks.

[Note: order of reductions] A reduction needs all ranks, so all must start the same reductions in the same order, even
if their own backwards run in different orders. At the end of a backward the ranks agree on the order of the next one
with the same number in its step: the units that all ranks have always had, in the first rank's order. The initial order
is the layout's, reversed. A unit whose turn has not come waits, in host memory if the pool has no room. At the end of
backward the rest of the order follows, with zeros for gradients that a rank does not have, and then all other gradients
that any rank has.

[Note: what is rounded] The bits must not depend on that order, because a resumed run has another order. So each rank
gives a parameter's first gradient of a backward to one reduction. Its mean is rounded to the unit's dtype, even if it
is then added to an earlier backward's gradient in fp32. Further gradients of the same backward (from a block that is
recomputed several times) are added up in fp32 and reduced in fp32 at its end, whether the first still waits or not. If
every rank has reduced zeros, the unit counts as one without a gradient.

[Note: whole gradients] Stages 0 and 1 reduce once per step: until then each rank adds up whole gradients in fp32.

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
from offload.kernels import kernels
from offload.memory.arena import Block
from offload.mover import IoFuture
from offload.streams import MaybeEvent
from zero.exchange.exchange import Collectives, PendingWork
from zero.optim.contributions import zero_gaps
from zero.optim.gradients import Gradients, UnitGradient
from zero.params.layout import Layout, Slot, Unit
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
        self.seen: list[int] = []  # Units with a gradient in this backward, in the order of their first gradients.
        self._irregular: set[int] = set()  # Units that were missing in some backward; no order has them any more.

    def begin_step(self) -> None:
        """The next backward is the first of a step."""
        self._number = -1

    def begin_backward(self) -> None:
        """A backward begins whose gradients are reduced."""
        self._number += 1
        self._next, self.seen = 0, []

    def complete(self, unit: int, waiting: Iterable[int]) -> list[int]:
        """Units to be reduced now, in order.

        Args:
            unit: has a gradient of this backward now.
            waiting: all units with a gradient, of this backward or an earlier one, that is not reduced yet.
        """
        self.see(unit)
        return self.go_on(waiting)

    def see(self, unit: int) -> None:
        """A unit has a gradient now; `go_on` returns the units to be reduced later."""
        if unit not in self.seen:
            self.seen.append(unit)

    def go_on(self, waiting: Iterable[int]) -> list[int]:
        """Units to be reduced now, in order, among the `waiting` ones."""
        # A gradient of an earlier backward alone is not ready: if it were reduced now, it would be reduced again.
        ready, now = set(waiting).intersection(self.seen), list[int]()
        while self._next < len(self._order) and self._order[self._next] in ready:
            now.append(self._order[self._next])
            self._next += 1
        return now

    def rest(self) -> list[int]:
        """The backward is over: the units of the agreed order that are still to be reduced, in order."""
        now, self._next = self._order[self._next :], len(self._order)
        return now

    @property
    def _order(self) -> list[int]:
        return self._orders.get(self._number, self._expected)

    def agree(self, seen: list[list[int]]) -> None:
        """Set the order of the next backward of this number. `seen`: the units of each rank, in rank order."""
        everywhere = set(seen[0]).intersection(*seen[1:])
        self._irregular |= set(self._order) - everywhere
        self._orders[self._number] = [unit for unit in seen[0] if unit in everywhere - self._irregular]


@dataclass(slots=True)
class Waiting:
    """A whole gradient of this rank that is not reduced yet."""

    flat: torch.Tensor  # (unit.numel,) of the unit's dtype, or fp32 if several contributions are added up.
    block: Block | None  # Its leased memory, if it has some.
    made: MaybeEvent = None  # After the work that has written `flat`, on the stream of the backward that gave it.
    blank: bool = False  # `flat` is the shared zeros, in place of a gradient that this rank does not have.


@dataclass(slots=True)
class Reduction:
    """A gradient that is being reduced and stored in its planes on all ranks."""

    block: Block | None
    stores: bool  # False: there is no place for the sum, and only the other ranks need this reduction.
    transfer: IoFuture[None] | None = None
    done: bool = False


class ReducedGradients(Gradients):
    """Gradients that are reduced over ranks; see the notes above.

    `exchange`: with the other ranks. There is no `in_place`: whole gradients are always collected outside the planes.
    """

    def __init__(
        self, layout: Layout, storage: Storage, device: torch.device, threads: int, exchange: Collectives
    ) -> None:
        super().__init__(layout, storage, device, in_place=False, threads=threads)
        self._exchange, self._placement = exchange, exchange.placement
        trained = [unit for unit in reversed(layout.units) if unit.trainable]
        # Persistent units are last: they are in use until the end of a backward.
        self._order = ReductionOrder([unit.index for unit in sorted(trained, key=lambda unit: unit.persistent)])
        self._narrow = any(unit.dtype.itemsize < torch.float32.itemsize for unit in trained)
        self._waiting: dict[int, Waiting] = {}
        # Unit -> positions of the slots whose first gradient of this backward waits or is reduced.
        self._given: dict[int, set[int]] = {}
        # Unit -> the sum of its further gradients of this backward, fp32 (unit.numel,).
        self._further: dict[int, torch.Tensor] = {}
        self._blank: list[int] = []  # Units for which this rank has reduced zeros in this backward, into empty planes.
        self._reducing = self._in_backward = self._starting = False
        self._completed = False  # All of this step's gradients are reduced; some may still have to be stored.
        self.deferred = bool(storage.plan.deferred_bytes)
        self._nothing: Block | None = None

    # ---- a backward -----------------------------------------------------------------------------

    def begin_backward(self, *, boundary: bool, together: bool = False) -> None:
        """See `Gradients`. Sums of several micro-batches in fp32 are reduced in fp32, as deferred gradients are."""
        super().begin_backward(boundary=boundary, together=together)
        self.deferred = self.deferred or (together and self._storage.plan.accumulation == torch.float32)
        if self._nothing is None and self._units:
            self._nothing = self._lease_zeros()
        self._in_backward, self._completed = True, False
        self._given.clear()
        self._blank.clear()
        self._reducing = boundary or not self._placement.gradients_deferred
        if not self._reducing:
            self.deferred = True
            return
        if self._narrow and self._placement.gradients_deferred and not self._storage.plan.deferred_bytes:
            # A rank may have had more backwards than others before this one.
            answers = self._exchange.all_gather_bytes("sums that wait", bytes([self.deferred]))
            self.deferred = any(answer == b"\1" for answer in answers)
        self._order.begin_backward()

    def arrive(
        self, index: int, position: int, gradient: torch.Tensor, rows: torch.Tensor | None = None, parts: float = 1.0
    ) -> bool:
        """See `Gradients`. Where ranks fetch in step, reductions have fixed places among the gathers: a unit is passed
        when all ranks pass a call, and not when this rank has all gradients of the unit.
        """
        return super().arrive(index, position, gradient, rows, parts) and not self._placement.in_step

    def flush(self, index: int) -> None:
        """See `Gradients`. The gradients that have arrived wait to be reduced."""
        state = self._units.get(index)
        if state is None or state.buffer is None:
            return
        self._streams.wait_stream(state.stream)
        arrived = [state.unit.slots[position] for position in state.arrived]
        zero_gaps(state.buffer, state.unit, arrived, 0)
        for position, count in state.arrived.items():
            state.contributions[position] += count
        newest = Waiting(state.buffer, state.block, self._streams.record_event())
        if self._in_backward and self._reducing:
            given = self._given.setdefault(index, set())
            self._add_further(state.unit, newest, [p for p in state.arrived if p in given])
            arrived = [state.unit.slots[position] for position in state.arrived if position not in given]
            given.update(state.arrived)
        self._wait(state, newest, arrived)
        state.buffer = state.block = state.stream = None
        state.arrived, state.adds = {}, False

    def passed(self, index: int) -> None:
        """See `Gradients`. The gradients that have arrived may be reduced when their turn comes."""
        self.flush(index)
        if self._in_backward and self._reducing and index in self._given and not self._lacks_some(index):
            if self._starting:
                self._order.see(index)
            else:
                self._start_all(self._order.complete(index, self._waiting))

    def _lacks_some(self, index: int) -> bool:
        """True if a parameter's sum of earlier backwards waits for its gradient of this one.

        When a reentrant checkpoint ends, its unit is passed although other gradients of the unit are still to come. The
        sums that go into the mean over ranks must not depend on the time of the reduction, so the unit waits for the
        end of backward.
        """
        given, earlier = self._given[index], self._units[index].contributions
        return self.deferred and any(count and position not in given for position, count in enumerate(earlier))

    def end_backward(self) -> None:
        """See `Gradients`. Collective."""
        self.flush_all()
        if self._in_backward and self._reducing:
            for index in self._given:
                self._order.see(index)
            self._start_all(self._order.rest())
            seen, blank = self._reduce_rest("end of backward", self._order.seen)
            self._order.agree(seen)
            self._forget(blank)
        self._in_backward = self.together = False

    def break_off(self) -> None:
        self._in_backward = self.together = False

    def complete(self) -> None:
        """See `Gradients`. Collective."""
        self.flush_all()
        if self._placement.gradients_deferred and not self._completed:
            self._reduce_rest("gradients not reduced yet", [])
            self._completed = True  # an interrupt below is this rank's alone: the others have gone on
        self.settle()
        self._begin_step()

    def _begin_step(self) -> None:
        self._completed = False
        self._order.begin_step()
        self.deferred = bool(self._storage.plan.deferred_bytes)

    def clear(self) -> None:
        for waiting in self._waiting.values():
            self._release(waiting)
        self._waiting.clear()
        self._further.clear()
        super().clear()
        self._begin_step()

    def waiting(self, only: int | None = None) -> dict[int, torch.Tensor]:
        wanted = (index for index in self._waiting if only in (None, index))
        return {index: self._made(self._waiting[index]).flat.cpu() for index in wanted}

    def _made(self, held: Waiting) -> Waiting:
        """The same; the current stream waits for it."""
        self._streams.wait_events(held.made)
        return held

    def rest(self, *, aside: bool) -> dict[int, torch.Tensor]:
        nothing, self._nothing = self._nothing, None
        if nothing is not None:
            nothing.free()
        if not aside:
            return {}
        waiting, self._waiting = self._waiting, {}
        copies = {index: self._made(held).flat.to("cpu", copy=True) for index, held in waiting.items()}
        for held in waiting.values():
            self._release(held)
        return copies

    def scale_waiting(self, unit: Unit, slot: Slot, factor: float | None) -> None:
        if unit.index in self._waiting:
            part = self._made(self._waiting[unit.index]).flat[slot.offset_numel : slot.end_numel]
            part.zero_() if factor is None else part.mul_(factor)

    def drop(self, unit: Unit, slot: Slot) -> None:
        # Other ranks may have gradients of the unit's other slots, so its sum stays.
        self._units[unit.index].contributions[slot.position] = 0

    def _has(self, state: UnitGradient, slot: Slot) -> bool:
        # `contributions` counts only this rank's. Of a reduced unit all slots are shown, some perhaps as zeros; of one
        # that is reduced in the step too, since other ranks may have what this one has not.
        waits = self._placement.gradients_deferred and bool(self.order)
        return super()._has(state, slot) or state.summed or waits

    def take_up(self, index: int, flat: torch.Tensor) -> None:
        held = flat.to(self._device)
        if held.dtype == torch.float32:
            held = self._storage.whole_gradients.deferred(self._units[index].unit).copy_(held)
        self._waiting[index] = Waiting(held, None)

    # ---- inside ---------------------------------------------------------------------------------

    def _release(self, held: Waiting) -> None:
        """Release its memory, with a fence: the next user must wait for the work queued so far."""
        if held.block is not None:
            held.block.free(self._streams.record_event())

    def _open(self, state: UnitGradient) -> None:
        """Collect outside the plane; the plane's content must not change before the reduction."""
        self._settle(state)
        wide = self.together and self._storage.plan.accumulation == torch.float32
        state.adds, dtype = self.together, torch.float32 if wide else state.unit.dtype
        state.block = self._lease(state, state.unit.numel * dtype.itemsize)
        state.buffer = state.block.view(dtype, state.unit.numel)

    def _lease(self, state: UnitGradient, nbytes: int) -> Block:
        """As with one rank; if there is no room left, waiting gradients are moved out of the pool."""
        pool = self._storage.gradient_pool
        block = pool.try_allocate(nbytes)
        steps = (self._settle_all, self._flush_others, self._settle_all, self._move_out)
        for make_room in steps:
            if block is None:
                make_room(state)
                block = pool.try_allocate(nbytes)
        block = block or pool.allocate(nbytes, f"gradient of {state.unit.name}")
        self._streams.wait_events(*block.events)
        return block

    def _settle(self, state: UnitGradient) -> None:
        """See `Gradients`. Raises no StorageError; see the note on failure."""
        try:
            super()._settle(state)
        except StorageError as error:
            self.failure = self.failure or error

    def _settle_all(self, state: UnitGradient) -> None:
        """Wait for the running reductions."""
        for other in self._units.values():
            self._settle(other)

    def _flush_others(self, state: UnitGradient) -> None:
        """Flush units with open buffers; they open again if needed. In a reduction flush the unit itself too."""
        for other in self._units.values():
            if other is not state or self._starting:
                self.flush(other.unit.index)

    def _wait(self, state: UnitGradient, newest: Waiting, arrived: list[Slot]) -> None:
        """Let new gradients wait. A backward that reduces puts them next to waiting ones; others add them up."""
        held = self._waiting.get(state.unit.index)
        if held is not None:
            self._made(held)
        if self._reducing and held is None and arrived:
            self._waiting[state.unit.index] = newest
            return
        if self._reducing and held is not None and held.flat.dtype != torch.float32:
            for slot in arrived:
                held.flat[slot.offset_numel : slot.end_numel].copy_(newest.flat[slot.offset_numel : slot.end_numel])
            held.made = self._streams.record_event()
        elif arrived:
            self._add_up(state, held, newest)
        self._release(newest)

    def _add_up(self, state: UnitGradient, held: Waiting | None, newest: Waiting) -> None:
        """Add up gradients of several backwards, in fp32."""
        if held is None or held.flat.dtype != torch.float32 or held.block is not None:
            self._settle(state)  # an earlier sum may still be read
            wide = self._storage.whole_gradients.deferred(state.unit)
            kernels.cast(wide, (held or newest).flat)
        else:
            wide = held.flat
        if held is not None:
            kernels.accumulate(wide, newest.flat)
            self._release(held)
        self._waiting[state.unit.index] = Waiting(wide, None, self._streams.record_event())

    def _add_further(self, unit: Unit, newest: Waiting, positions: list[int]) -> None:
        """Take from `newest` the gradients of parameters that have had one in this backward."""
        for slot in (unit.slots[position] for position in positions):
            if unit.index not in self._further:
                self._further[unit.index] = torch.zeros(unit.numel, dtype=torch.float32, device=newest.flat.device)
            part = newest.flat[slot.offset_numel : slot.end_numel]
            self._further[unit.index][slot.offset_numel : slot.end_numel] += part
            part.zero_()

    def _move_out(self, state: UnitGradient) -> None:
        """Move waiting gradients to host memory, to make room in the pool."""
        for held in self._waiting.values():
            if held.block is not None:
                moved = self._made(held).flat.to("cpu", copy=True)
                held.block.free(self._streams.record_event())
                held.flat, held.block, held.made = moved, None, None

    def _start_all(self, due: list[int]) -> None:
        """Start reductions, and then those that become due meanwhile.

        A reduction that has to make room for itself must not start another: the other would take its turn first, on
        this rank alone.
        """
        self._starting = True
        try:
            while due:
                for index in due:
                    self._reduce(index)
                due = self._order.go_on(self._waiting) if self._in_backward else []
        finally:
            self._starting = False

    def _reduce_rest(self, what: str, seen: list[int]) -> tuple[list[list[int]], set[int]]:
        """Reduce the gradients that any rank still has, then further gradients.

        Returns each rank's `seen`, and the units for which every rank has reduced zeros so far. `seen` cannot show
        this: it lacks gradients that a rank has only from an earlier backward.
        """
        left = {index: waiting.flat.dtype == torch.float32 for index, waiting in self._waiting.items()}
        mine = [seen, list(left.items()), list(self._further), self._blank]
        answers = self._exchange.all_gather_bytes(what, json.dumps(mine).encode())
        everybodys = [json.loads(answer) for answer in answers]
        rest: dict[int, bool] = {}
        for _, theirs, _, _ in everybodys:
            for index, wide in theirs:
                rest[index] = rest.get(index, False) or wide
        self._starting = True
        try:
            for index, wide in sorted(rest.items()):
                self._reduce(index, wide=wide)
            for index in sorted(set[int]().union(*(further for _, _, further, _ in everybodys))):
                self._reduce_further(index)
        finally:
            self._starting = False
        blank = [set[int](theirs) for _, _, _, theirs in everybodys]
        return [seen for seen, _, _, _ in everybodys], blank[0].intersection(*blank[1:])

    def _reduce_further(self, index: int) -> None:
        further, state = self._further.pop(index, None), self._units[index]
        if further is not None:
            self._settle(state)  # the previous reduction may still read its fp32 memory
            self._waiting[index] = Waiting(self._storage.whole_gradients.deferred(state.unit).copy_(further), None)
        self._reduce(index, wide=True)

    def _forget(self, blank: set[int]) -> None:
        """Reset units that every rank reduced as zeros: they had no gradient, so the next one is the first."""
        for index in blank:
            state = self._units[index]
            self._settle(state)
            state.summed, state.plane = False, state.narrow_plane
            state.dtype = self._storage.gradient_dtype(state.unit)

    def _reduce(self, index: int, *, wide: bool = False) -> None:
        """Start the reduction of a unit's gradient, in fp32 if `wide`; this rank's is zero if it has none."""
        state = self._units[index]
        dtype = torch.float32 if wide or self.deferred else state.unit.dtype
        try:
            waiting = self._ready(state, dtype)
            stores = self._free_home(state, dtype)
        except BudgetError as error:  # the other ranks wait for this reduction: report why it fails
            self._exchange.cancel(self._exchange.enqueue("reduce", state.unit), error)
            raise
        turn = self._exchange.enqueue("reduce", state.unit)
        item = Reduction(waiting.block, stores)
        rounds = state.dtype != dtype  # a mean added in fp32 is rounded before, as it would be if it were the first
        job = self._run(state, item, waiting, turn, self._streams.record_event(), first=state.empty, rounds=rounds)
        self._busy.add(index)
        state.storing, state.summed = item, True
        item.transfer = self._storage.mover.submit(f"reducing the gradient of {state.unit.name}", job)
        if not self._exchange.overlaps:
            self._settle(state)

    def _ready(self, state: UnitGradient, dtype: torch.dtype) -> Waiting:
        """The gradient to be reduced, in memory that the exchange can use."""
        index = state.unit.index
        self._settle(state)
        if state.empty and index not in self._waiting:
            self._blank.append(index)
        held = self._waiting.pop(index, None)
        waiting = self._in_dtype(state, None if held is None else self._made(held), dtype)
        if waiting.flat.device.type != self._device.type or not self._exchange.can_reduce_from(waiting.flat):
            block = self._lease(state, waiting.flat.nbytes)
            copied = block.view(waiting.flat.dtype, waiting.flat.numel())
            waiting = Waiting(copied.copy_(waiting.flat), block)
        return waiting

    def _free_home(self, state: UnitGradient, dtype: torch.dtype) -> bool:
        """Make the place of the sum free for it. False: the disk has failed, and the gradient is lost."""
        try:
            if not state.empty and (self._widens(state) or dtype != state.dtype != torch.float32):
                self._widen(state)
            elif dtype == torch.float32:
                self.make_wide(state)
            if state.sealed is not None:
                self.update(state.unit.index)
                self._streams.wait_events(self._streams.record_update_event())
                state.sealed = None
            self.reclaim(state.unit)
        except StorageError as error:
            self.failure, self.lost = self.failure or error, True
            return False
        return True

    def _in_dtype(self, state: UnitGradient, held: Waiting | None, dtype: torch.dtype) -> Waiting:
        """The gradient to be reduced, in `dtype`: zeros if none waits."""
        if held is not None and held.flat.dtype == dtype:
            return held
        zeros = self._zeros(state.unit, dtype) if held is None else None
        if zeros is not None:
            return Waiting(zeros, None, blank=True)
        if dtype == state.unit.dtype:
            block = self._lease(state, state.unit.nbytes)
            made = Waiting(block.view(dtype, state.unit.numel), block)
        else:
            made = Waiting(self._storage.whole_gradients.deferred(state.unit), None)
        if held is None:
            made.flat.zero_()
        else:
            made.flat.copy_(held.flat)
            self._release(held)
        return made

    def _lease_zeros(self) -> Block:
        """Lease the zeros that this rank gives in place of gradients it does not have; one block for all units."""
        wide = self.together and self.deferred
        nbytes = max(state.unit.numel * 4 if wide else state.unit.nbytes for state in self._units.values())
        nothing = self._storage.gradient_pool.allocate(nbytes, "gradients that are zero")
        self._streams.wait_events(*nothing.events)
        nothing.data.zero_()
        return nothing

    def _zeros(self, unit: Unit, dtype: torch.dtype) -> torch.Tensor | None:
        """The shared zeros in the unit's length; None if their block is too small."""
        nothing = self._nothing or self._lease_zeros()
        self._nothing = nothing
        return nothing.view(dtype, unit.numel) if unit.numel * dtype.itemsize <= nothing.data.numel() else None

    async def _run(
        self,
        state: UnitGradient,
        item: Reduction,
        waiting: Waiting,
        turn: PendingWork,
        made: MaybeEvent,
        *,
        first: bool,
        rounds: bool,
    ) -> None:
        unit, scale = state.unit, self._exchange.scale
        try:
            async with self._exchange.reduce(turn, unit, waiting.flat, made) as sources:
                home = state.plane, state.dtype
                try:
                    if item.stores:
                        await home[0].retry_failed_writes()  # on a failing disk each further sum would stay in memory
                        await self._store.store_sum(unit, home, sources, scale, state.sums, first=first, rounds=rounds)
                finally:
                    if waiting.blank:
                        waiting.flat.zero_()  # the exchange may have made sums in this memory
        except BaseException as error:
            # A peer's part cannot be had again: this gradient lacks a backward, unless it only waits to be written.
            self.lost |= not getattr(error, "is_in_memory", False)
            raise
        finally:
            item.done = True
