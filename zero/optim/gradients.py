"""Gradients from autograd into the tiered array of gradients.

A single contribution is stored as produced, the first of several as fp32 if more are planned; else the second widens
it. Sums are in fp32, or in the 16 bits that `grad_accum_dtype` asks for. A parameter without a contribution since the
last step is marked: the optimizer skips it, as torch does. Block sums of squares are rewritten whenever a unit's
gradient is rewritten, so the step never reads it again for the norm.

A step seals the collected gradients: updates that run after the step read them. A gradient of the next step that needs
the place of a sealed one waits until its update has read it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from offload.array.copies import load_array, write_array
from offload.array.tiered_array import TieredArray
from offload.errors import StateError, StorageError
from offload.io.io_loop import IoFuture
from offload.kernels import kernels
from offload.kernels.square_sums import SquareSum, rows_in, rows_of
from offload.memory.pool import Block
from offload.streams import MaybeEvent
from zero.optim.contributions import CHUNK_NUMEL, Contribution, ContributionStore, add_up
from zero.params.layout import Layout, Slot, Unit
from zero.plan.sizes import gradient_sums_bytes
from zero.store.storage import Storage

EPOCHS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class StepGradient:
    """Place and dtype of a gradient of the last step."""

    array: TieredArray
    dtype: torch.dtype


@dataclass(slots=True)
class UnitGradient:
    """The state of one unit's gradient since the last step."""

    unit: Unit
    array: TieredArray
    dtype: torch.dtype  # The dtype in which the array holds this unit's gradient.
    narrow_array: TieredArray
    contributions: list[int]  # Per slot, how many the array holds or is about to.
    sums: torch.Tensor  # Block sums of the array's gradient, in host memory.
    is_stored: bool = False  # A contribution is stored, or is being stored, since the last step.
    # Slots whose latest contributions wait in `buffer`, in order -> how many contributions: one, unless `accumulates`.
    buffered_counts: dict[int, int] = field(default_factory=dict)
    # Flat gradient, unit.numel elements: of unit.dtype, or of the array's dtype if `accumulates`.
    buffer: torch.Tensor | None = None
    # Contributions are added up in `buffer`: the array held nothing when the buffer was opened.
    accumulates: bool = False
    # The leased memory of `buffer`, with room for its sums on a GPU; None if `buffer` is the array's own memory.
    block: Block | None = None
    stream: Any = None  # On a GPU, the stream on which the buffer is being filled.
    # The contribution that is being stored; its block is leased until that succeeds.
    pending_store: PendingStore | None = None
    copy_event: MaybeEvent = None  # After the device's copies to the host, sums included.
    step_gradient: StepGradient | None = None

    @property
    def is_empty(self) -> bool:
        """True if the array holds nothing for this step."""
        return not self.is_stored


class PendingStore(Protocol):
    """A gradient that is being stored in its array."""

    block: Block | None
    future: IoFuture[None] | None  # The running attempt; None after a failure.

    @property
    def is_done(self) -> bool:
        """True once all of it is stored."""


class GradientUpdates(Protocol):
    """The updates of steps, which use gradients and borrow their memory."""

    def update_unit(self, index: int) -> None:
        """Update the unit: then its gradient is not needed any more."""

    def reclaim_memory(self, unit: Unit) -> None:
        """Wait until updates return the memory of the unit's gradient."""


class Gradients:
    """All trainable units' gradients.

    `in_place`: a first contribution may be collected where it is stored.

    Attributes:
        has_deferred: gradients of an earlier backward of this step wait to be reduced.
        has_lost: since `clear`, a gradient could not be reduced, and never can be.
        failure: with several ranks, the first failed transfer since `clear`; the next step reports it to all ranks.
        is_interleaved: in this backward several micro-batches pass each unit before `on_unit_backward_end`.
        updates: those of steps; None before steps are possible: no gradient is sealed, and no memory is lent.
        arrival_order: (unit, position of the slot), in the order in which the first gradients since the last step
            arrived.
        factors: parameter index -> factor by which user code has multiplied its gradient (None: it was dropped) and
            that the collected values do not contain yet. The same on all ranks.
        epoch: a new number, unique among all engines, each time that all gradients were used or dropped.
    """

    has_deferred = is_interleaved = has_lost = False
    failure: StorageError | None = None

    def __init__(self, layout: Layout, storage: Storage, device: torch.device, in_place: bool, threads: int) -> None:
        self._storage, self._device, self._in_place = storage, device, in_place
        self._streams, self._store, self._threads = storage.streams, ContributionStore(storage, threads), threads
        self.updates: GradientUpdates | None = None
        self.arrival_order: dict[tuple[int, int], None] = {}
        self.factors: dict[int, float | None] = {}
        self.epoch = next(EPOCHS)
        self._filling_streams: set[Any] = set()  # Streams that have written gradients since the last step.
        self._units: dict[int, UnitGradient] = {}
        # Units that the I/O loop is storing, in the order of the requests.
        self._pending_stores: dict[int, None] = {}
        # All units with a buffer, a pending store or a running copy; perhaps also others.
        self._busy_units: set[int] = set()
        self._wide_arrays: dict[int, TieredArray] = {}
        for unit in layout.units:
            array = storage.gradients[layout.space_of(unit)] if unit.trainable else None
            if array is not None:
                dtype, sums = storage.gradient_dtype(unit), storage.allocate_square_sums(unit)
                self._units[unit.index] = UnitGradient(unit, array, dtype, array, [0] * len(unit.slots), sums)

    # ---- arrival ------------------------------------------------------------------------------

    def add_gradient(
        self, index: int, position: int, gradient: torch.Tensor, rows: torch.Tensor | None = None, divisor: float = 1.0
    ) -> bool:
        """Collect one parameter's gradient. True if every slot of the unit has arrived, and nothing will be added.

        Args:
            index: the unit.
            position: the slot inside the unit.
            gradient: in the parameter's shape; may be freed afterwards.
            rows: rows of the first dimension that `gradient` is for; other rows have gradient zero. None: all rows.
            divisor: divisor of the gradient.
        """
        state = self._units[index]
        if position in state.buffered_counts and (not state.accumulates or rows is not None):
            self.flush(index)  # a second contribution before the unit was complete
        if state.buffer is None:
            self._busy_units.add(index)
            self._open_buffer(state)
        slot = state.unit.slots[position]
        if state.buffer is None:
            raise StateError(f"gradient of {slot.name}: no buffer")
        self._streams.wait_stream(state.stream)
        state.stream = self._streams.current_stream()
        self._filling_streams.add(state.stream)
        place = state.buffer[slot.offset_numel : slot.end_numel]
        if position in state.buffered_counts:
            add_up(place, gradient.reshape(-1).to(state.unit.dtype), self._threads)
        elif rows is None:
            place.copy_(gradient.reshape(-1))
        else:
            place.zero_()
            place.view(slot.shape)[rows] = gradient.to(place.dtype)
        if divisor != 1:
            place.div_(divisor)
        state.buffered_counts[position] = state.buffered_counts.get(position, 0) + 1
        self.arrival_order[index, position] = None
        return len(state.buffered_counts) == len(state.unit.slots) and not state.accumulates

    def flush(self, index: int) -> None:
        """Store the gradients that have arrived in the array; a later contribution opens the unit again."""
        state = self._units.get(index)
        if state is None or state.buffer is None:
            return
        if (
            not state.is_empty
            and self._must_widen(state)
            and any(state.contributions[p] for p in state.buffered_counts)
        ):
            self._widen(state)
        self._streams.wait_stream(state.stream)
        item = self._take_contribution(state, state.buffer)
        home = state.array.memory(state.unit.begin, state.unit.end)
        if home is not None and self._store.can_address(home, item.buffer):
            self._store_in_memory(state, item, home)
        elif home is not None and item.is_first and item.block is not None:
            state.copy_event = self._store.copy_to_host(item, home, _sums_in(item.block, item.unit))
            item.block.free(state.copy_event)
        else:
            if not self._streams.has_unified_memory and item.block is not None:
                self._store.sum_on_device(item, _sums_in(item.block, item.unit))
            item.event, state.pending_store = self._streams.record_event(), item
            self._pending_stores[index] = None
            self._start_store(state, item)

    def on_unit_backward_end(self, index: int) -> None:
        """All gradients of one use of the unit have arrived, or the unit is complete."""
        self.flush(index)

    def _must_widen(self, state: UnitGradient) -> bool:
        """True if the stored gradient must become fp32 before another is added."""
        return state.dtype != torch.float32 and self._storage.plan.accumulation == torch.float32

    def _take_contribution(self, state: UnitGradient, buffer: torch.Tensor) -> Contribution:
        """Return the gradients that have arrived as one contribution; the unit can be opened again."""
        slots = [state.unit.slots[position] for position in state.buffered_counts]
        adds = [state.contributions[position] > 0 for position in state.buffered_counts]
        item = Contribution(state.unit, state.array, state.dtype, buffer, slots, adds, state.is_empty, state.sums)
        item.block = state.block
        for position, count in state.buffered_counts.items():
            state.contributions[position] += count
        state.buffer = state.block = state.stream = None
        state.buffered_counts, state.accumulates, state.is_stored = {}, False, True
        return item

    def _store_in_memory(self, state: UnitGradient, item: Contribution, home: torch.Tensor) -> None:
        """Store it in memory that its device can write; from a GPU only the sums are copied to the host."""
        if self._streams.has_unified_memory:
            self._store.store_in_memory(item, home, item.sums)
            if item.block is not None:
                item.block.free()
            return
        block = item.block or self._lease_buffer(state, gradient_sums_bytes(state.unit))
        sums = _sums_in(block, state.unit)
        self._store.store_in_memory(item, home, sums)
        state.copy_event = self._streams.copy_to_host(item.sums, sums, self._streams.record_event())
        block.free(state.copy_event)

    def flush_all(self) -> None:
        """Flush all buffers at the end of a backward, in the order of the layout."""
        for index in sorted(self._busy_units):
            self.flush(index)

    def begin_backward(self, *, boundary: bool, interleaved: bool = False) -> None:
        """A backward begins; `boundary`: a step follows that updates the parameters with its gradients."""
        self.is_interleaved = interleaved

    def end_backward(self) -> None:
        self.flush_all()
        self.is_interleaved = False

    def abort_backward(self) -> None:
        """A backward of several micro-batches together has failed; `clear` or the engine's end follows."""
        self.is_interleaved = False

    def finish_for_step(self) -> None:
        """Flush all gradients and wait until they are stored: a step is about to be decided. Raises StorageError."""
        self.flush_all()
        self.wait_until_stored()

    def wait_until_stored(self) -> None:
        """Wait until every flushed gradient is stored. Raises StorageError."""
        busy = [self._units[index] for index in sorted(self._busy_units)]
        for state in busy:
            self._wait_for_store(state)
        on_their_way = [state.copy_event for state in busy if state.copy_event is not None]
        if on_their_way:
            self._storage.io_loop.run("copying gradients to the host", self._streams.synchronize(*on_their_way))
        for state in busy:
            state.copy_event = None
            if state.buffer is None:
                self._busy_units.discard(state.unit.index)

    def clear(self) -> None:
        """Drop the contributions since the last step: after zero_grad. Gradients that a step has sealed remain."""
        for stream in self._filling_streams:  # of a backward that was aborted: no other code has waited for it
            self._streams.wait_stream(stream)
        self._filling_streams.clear()
        for state in self._units.values():
            if state.pending_store is not None and state.pending_store.future is not None:
                state.pending_store.future.wait()
            for holder in (state.pending_store, state):
                if holder is not None and holder.block is not None:
                    holder.block.free(self._streams.record_event())
            state.pending_store = state.buffer = state.block = state.stream = None
            state.buffered_counts, state.accumulates = {}, False
            self._reset_state(state)
        self._pending_stores.clear()
        self._clear_arrival_order()
        self.has_lost, self.failure = False, None

    def hand_to_step(self) -> None:
        """Seal the present gradients for a step; the caller has flushed all and waited until they are stored."""
        for state in self._units.values():
            state.step_gradient = None if state.is_empty else StepGradient(state.array, state.dtype)
            self._reset_state(state)
        self._clear_arrival_order()
        self._filling_streams.clear()

    def _clear_arrival_order(self) -> None:
        self.arrival_order.clear()
        self.factors.clear()
        self.epoch = next(EPOCHS)

    def _reset_state(self, state: UnitGradient) -> None:
        state.is_stored, state.contributions = False, [0] * len(state.unit.slots)
        state.array, state.dtype = state.narrow_array, self._storage.gradient_dtype(state.unit)

    # ---- all gradients, for callers that move them elsewhere ------------------------------------

    def states(self) -> list[UnitGradient]:
        """The gradient state of every trained unit; after `flush_all` and `wait_until_stored` all buffers are empty."""
        return list(self._units.values())

    def state_of(self, unit: Unit) -> UnitGradient:
        """Raises StateError: the unit is not trained."""
        if unit.index not in self._units:
            raise StateError(f"{unit.name} is not trained, so it has no gradient")
        return self._units[unit.index]

    def unreduced_gradients(self, only: int | None = None) -> dict[int, torch.Tensor]:
        """Unit index -> this rank's full gradient that is not reduced yet, on the host; `only`: of one unit."""
        return {}

    def free_pool_memory(self, *, drop_unreduced: bool) -> dict[int, torch.Tensor]:
        """Free all memory of `gradient_pool`.

        `drop_unreduced`: drop the unreduced gradients too, and return them, for `restore_unreduced`.
        """
        return {}

    def scale_unreduced(self, unit: Unit, slot: Slot, factor: float | None) -> None:
        """Multiply one parameter's gradient that waits to be reduced; None: drop it."""

    def drop_slot(self, unit: Unit, slot: Slot) -> None:
        """Note that the slot, whose values are zero now, has no gradient; nor has the unit, if it was the last."""
        state = self._units[unit.index]
        state.contributions[slot.position] = 0
        if not any(state.contributions):
            self._reset_state(state)

    def restore_unreduced(self, index: int, flat: torch.Tensor) -> None:
        """Let `flat`, a full gradient of (unit.numel,), wait to be reduced again, as `unreduced_gradients` returned it.

        Raises StateError: with one rank nothing waits.
        """
        raise StateError(f"gradient of unit {index}: nothing waits to be reduced with one rank")

    def read_stored(self, state: UnitGradient, begin: int, end: int) -> torch.Tensor:
        """Copy to the host the stored gradient at coordinates [begin, end) of a unit. Raises StorageError."""
        job = load_array(state.array, begin, end, self._storage.host_pool)
        stored = self._storage.io_loop.run(f"reading the gradient of {state.unit.name}", job)
        return stored.view(state.dtype).to("cpu", copy=True)

    def write_stored(self, state: UnitGradient, begin: int, values: torch.Tensor) -> None:
        """Store `values` (in the array's dtype, whole blocks) from coordinate `begin` on. Raises StorageError."""
        unit, end = state.unit, begin + values.numel()
        kernels.block_sumsq(values, into=rows_of(state.sums, begin - unit.begin, end - unit.begin))
        job = write_array(state.array, begin, end, values.view(torch.uint8), self._storage.host_pool)
        self._storage.io_loop.run(f"storing the gradient of {unit.name}", job)
        state.is_stored = True

    def make_wide(self, state: UnitGradient) -> None:
        """Make an fp32 home for a unit that holds nothing yet. Raises BudgetError: there is no room for one."""
        if state.dtype != torch.float32:
            state.array, state.dtype = self._wide_array(state.unit), torch.float32

    def _wide_array(self, unit: Unit) -> TieredArray:
        """The unit's fp32 home, the same one in every step that needs it."""
        if unit.index not in self._wide_arrays:
            self._wide_arrays[unit.index] = self._storage.add_fp32_gradient(unit)
        return self._wide_arrays[unit.index]

    # ---- queries of the step ------------------------------------------------------------------

    def slots_with_gradient(self, index: int) -> list[bool]:
        """Per slot of the unit: has it had a gradient since the last step?"""
        return [count > 0 for count in self._units[index].contributions]

    def has_gradient(self, unit: Unit, slot: Slot) -> bool:
        """True if the slot has a gradient, as far as this rank knows without a message; it may be in flight."""
        state = self._units.get(unit.index)
        return state is not None and self.factors.get(slot.index, 1.0) is not None and self._has_gradient(state, slot)

    def _has_gradient(self, state: UnitGradient, slot: Slot) -> bool:
        return state.contributions[slot.position] > 0

    def common_factor(self) -> float | None:
        """The factor of all gradients: none is rewritten for it. None: they have different ones."""
        if not self.factors:
            return 1.0
        slots = ((state, slot) for state in self._units.values() for slot in state.unit.slots)
        factors = {self.factors.get(slot.index, 1.0) for state, slot in slots if self._has_gradient(state, slot)}
        return factors.pop() if len(factors) == 1 else None

    def step_gradient(self, index: int) -> StepGradient:
        """The unit's gradient of the last step, until its update has used it.

        Raises StateError: the last step has no gradient of the unit.
        """
        state = self._units[index]
        if state.step_gradient is None:
            raise StateError(f"gradient of {state.unit.name}: the last step has none")
        return state.step_gradient

    def square_sum(self) -> SquareSum:
        """Sum of squares over this rank's shards."""
        return SquareSum.merge(SquareSum.from_rows(state.sums) for state in self._units.values() if state.is_stored)

    # ---- inside -------------------------------------------------------------------------------

    def reclaim_memory(self, unit: Unit) -> None:
        """The unit's gradient needs its memory now: return when the memory is free."""
        if self.updates is not None:
            self.updates.reclaim_memory(unit)

    def _apply_update(self, unit: Unit) -> None:
        """The unit's sealed gradient occupies its place: return after an update has used it."""
        if self.updates is not None:
            self.updates.update_unit(unit.index)

    def _open_buffer(self, state: UnitGradient) -> None:
        self._wait_for_store(state)
        unit, streams = state.unit, self._streams
        if state.step_gradient is not None:
            self._apply_update(unit)
            streams.wait_events(streams.record_update_event())  # on a GPU the update may still be running
            state.step_gradient = None
        self.reclaim_memory(unit)
        dtype = self._begin_accumulation(state) if self.is_interleaved and state.is_empty else unit.dtype
        if self._in_place and state.is_empty and state.dtype == dtype:
            home = state.array.memory(unit.begin, unit.end)
            if home is not None and home.device == self._device:
                state.buffer = home.view(dtype)
                return
        nbytes = unit.numel * dtype.itemsize
        state.block = self._lease_buffer(
            state, nbytes + (0 if streams.has_unified_memory else gradient_sums_bytes(unit))
        )
        state.buffer = state.block.view(dtype, unit.numel)

    def _begin_accumulation(self, state: UnitGradient) -> torch.dtype:
        """Contributions will be added up before they are stored; returns the dtype of the sum."""
        state.accumulates = True
        if self._must_widen(state):
            self.make_wide(state)
        return state.dtype

    def _lease_buffer(self, state: UnitGradient, nbytes: int) -> Block:
        """Lease device memory; the current stream may use it at once."""
        pool = self._storage.gradient_pool
        block = pool.try_allocate(nbytes)
        # The I/O loop finishes the pending stores in this order.
        pending = [self._units[index] for index in self._pending_stores]
        for other in (*pending, *self._units.values()):
            if block is not None:
                break
            # The pool is small on purpose: units with open buffers are flushed, and open again if needed.
            if other is not state and other.block is not None:
                self.flush(other.unit.index)
            self._wait_for_store(other)
            block = pool.try_allocate(nbytes)
        block = block or pool.allocate(nbytes, f"gradient of {state.unit.name}")
        self._streams.wait_events(*block.events)
        return block

    def _start_store(self, state: UnitGradient, item: Contribution) -> None:
        job = self._store.store(item)
        item.future = self._storage.io_loop.submit(f"storing the gradient of {state.unit.name}", job)

    def _wait_for_store(self, state: UnitGradient) -> None:
        """Wait until the I/O loop has stored the unit's contribution. After a failure the next call tries again.

        Blocks are freed here and not on the I/O loop: one thread owns the pool.
        """
        item = state.pending_store
        if item is None:
            return
        if item.future is None and isinstance(item, Contribution):
            self._start_store(state, item)
        future = item.future
        if future is None:
            raise StateError(f"gradient of {state.unit.name}: nothing is on its way")
        try:
            future.result()
        finally:
            if future.done():
                item.future = None
            if future.done() and item.is_done:
                state.pending_store = None
                self._pending_stores.pop(state.unit.index, None)
                if item.block is not None:
                    item.block.free()

    def _widen(self, state: UnitGradient) -> None:
        """Move a 16-bit gradient to an fp32 home: a second contribution is about to be added."""
        self._wait_for_store(state)
        unit = state.unit
        wide, narrow, dtype = self._wide_array(unit), state.array, state.dtype

        async def widen() -> None:
            await self._streams.synchronize(state.copy_event)  # the copies to the host, sums included
            await self._store.widen(unit, narrow, dtype, wide)

        self._storage.io_loop.run(f"widening the gradient of {unit.name}", widen())
        self._streams.wait_events(self._streams.record_update_event())
        state.array, state.dtype = wide, torch.float32


def _sums_in(block: Block, unit: Unit) -> torch.Tensor:
    """The room for the sums of the unit's gradient in a device block: at its end."""
    return rows_in(block.data[block.data.numel() - gradient_sums_bytes(unit) :])


# Place of the gradient of a parameter or of one of its tiles, and the number of its contributions.
GradientPlace = tuple[UnitGradient, Slot, int]


def move_gradients(old: Gradients, new: Gradients, new_index_of: dict[int, int]) -> None:
    """Move the gradients accumulated since the last step; nothing is in flight on either side, and `new` is empty.

    Raises StorageError: `old` is unchanged. `new_index_of`: parameter index in the layout of `old` -> index in the
    layout of `new`; other parameters have no place there.
    """
    sources: dict[int, list[GradientPlace]] = {}
    for state in old.states():
        for slot, count in zip(state.unit.slots, state.contributions, strict=True):
            if count and slot.index in new_index_of:
                sources.setdefault(new_index_of[slot.index], []).append((state, slot, count))
    for state in new.states():
        slot_places = [
            [p for p in sources.get(s.index, []) if _common_elements(p[1], s) or not s.numel] for s in state.unit.slots
        ]
        if any(slot_places):
            _copy_gradients(old, new, state, slot_places)


def _copy_gradients(
    old: Gradients, new: Gradients, state: UnitGradient, slot_places: list[list[GradientPlace]]
) -> None:
    if any(place[0].dtype == torch.float32 for places in slot_places for place in places):
        new.make_wide(state)
    unit = state.unit
    for lo in range(0, unit.numel, CHUNK_NUMEL):
        hi = min(lo + CHUNK_NUMEL, unit.numel)
        chunk = torch.zeros(hi - lo, dtype=state.dtype, device="cpu")
        for slot, places in zip(unit.slots, slot_places, strict=True):
            origin = slot.offset_numel - slot.first_numel  # the offset that the parameter's first element would have
            for source, part, _ in places:
                common = _common_elements(part, slot)
                first, last = max(lo - origin, common.start), min(hi - origin, common.stop)
                if first < last:
                    begin = source.unit.begin + part.offset_numel - part.first_numel
                    values = old.read_stored(source, begin + first, begin + last)
                    chunk[first + origin - lo : last + origin - lo].copy_(values)
        new.write_stored(state, unit.begin + lo, chunk)
    state.contributions = [max((place[2] for place in places), default=0) for places in slot_places]


def _common_elements(slot: Slot, other: Slot) -> range:
    """Elements of a parameter that are in both slots."""
    begin = max(slot.first_numel, other.first_numel)
    return range(begin, min(slot.first_numel + slot.numel, other.first_numel + other.numel))
