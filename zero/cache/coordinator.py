"""Fetches units before they are used and evicts them afterwards: the only writer of every unit's state.

Hooks report when uses begin and end; `policy` decides which units to fetch and to evict; `residency` has the states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

import torch

from offload.accelerator import HOST, is_accelerator
from offload.errors import BudgetError, StateError, mark_reported
from offload.io.io_loop import IoFuture
from offload.memory.flat_storage import Poison
from offload.memory.pool import Block
from offload.streams import MaybeEvent
from zero.cache.access_trace import GENERATE, AccessTrace
from zero.cache.altered_copies import AlteredCopies, AlteredValues
from zero.cache.micro_batch_scheduler import MicroBatchScheduler
from zero.cache.policy import (
    HORIZON,
    HotUnits,
    choose_victims,
    first_positions,
    is_reused_soon,
    plan_prefetch,
    take_until,
)
from zero.cache.residency import FetchCounters, Residency, UnitEntry, UnitState
from zero.cache.unit_fetcher import Arrival, UnitFetcher
from zero.params.binding import UnitBinding
from zero.params.layout import Layout, Unit, sibling_group
from zero.plan.plan import Limits
from zero.store.storage import Storage


class Coordinator(AlteredCopies):
    """Owner of residency on the device.

    `scheduler`: when there is no room, it ends uses that are pinned only because further uses may follow.
    """

    def __init__(
        self,
        layout: Layout,
        bindings: list[UnitBinding],
        storage: Storage,
        limits: Limits,
        fetcher: UnitFetcher,
        scheduler: MicroBatchScheduler,
    ) -> None:
        self.trace = AccessTrace(sibling_group(layout.units))
        self.counters = FetchCounters()
        # True while the weights will not change after this backward: so its prefetch may cross the boundary.
        self.is_accumulating = False
        self.is_persistent_bound = False  # False between `evict_all` and `bind_persistent`.
        self._layout = layout
        self._bindings = bindings
        self._storage = storage
        self._limits = limits
        self._fetcher = fetcher
        self._scheduler = scheduler
        self._numel = {unit.index: unit.numel for unit in layout.units}
        movable = {unit.index: unit.numel for unit in layout.units if not unit.persistent}
        self._hot = HotUnits(movable)
        self._units = Residency(layout.units)
        self._in_backward = False
        self._prefetched_key: tuple[int, ...] = ()  # The prediction whose units are all on the device, or in flight.
        self._expert_rows_numel = 0  # Elements of the rows of packed experts that are in use.
        self._extra_numel = 0  # Elements beyond the limit, for a generation, in memory of its own.
        self._altered: dict[int, list[AlteredValues]] = {}  # For units whose copies were altered.
        self._parked: set[int] = set()  # IN_FLIGHT units with altered copies, which only `resume_altered` may bind.
        self._is_generation_paused = False  # The generation is over, and the units it has pinned stay for the next one.

    @property
    def device(self) -> torch.device:
        return self._storage.device

    def begin_forward(self, *, training: bool, backward_follows: bool) -> None:
        """The root's forward begins: prefetch the units it uses first."""
        self._in_backward = False
        if backward_follows:
            self.end_paused_generation()
        phase = GENERATE if self._hot.is_active else "train" if training else "eval"
        self.trace.begin_forward(phase, backward_follows=backward_follows)
        self._prefetch(with_backward=backward_follows)

    def begin_generation(self, room_bytes: int = 0) -> None:
        """Forwards will follow with the same weights: units that fit stay from one forward to the next.

        `room_bytes`: device memory that it may take beyond the plan's. Not taken if a paused generation has some.
        """
        resumed, self._is_generation_paused = self._is_generation_paused, False
        old_numel = self._extra_numel
        if not old_numel:
            self._extra_numel = self._fetcher.allocate_extra_memory(room_bytes)
        if not resumed or self._extra_numel != old_numel:
            self._hot.begin_generation(self._live_numel_max)
        self._expect_forward(GENERATE, with_backward=False)

    def pause_generation(self) -> None:
        """The generation is over; its units stay for the next one, until a forward with gradients or new values."""
        self._is_generation_paused = True

    def end_generation(self) -> None:
        """Evict the units that the generation pinned, except those in use."""
        self._is_generation_paused = False
        for index in self._hot.end_generation():
            if not self._units[index].is_in_use:
                self._evict(self._units[index])
        self._free_extra_memory()

    def end_paused_generation(self) -> None:
        """Evict the units that the last generation has pinned for the next one."""
        if self._is_generation_paused:
            self.end_generation()

    def _free_extra_memory(self) -> None:
        """Free the generation's own memory, and evict all units that may be in it."""
        if not self._extra_numel:
            return
        self._extra_numel = 0
        self._hot.shrink(self._live_numel_max)
        for entry in (*self._units.in_state(UnitState.IN_FLIGHT), *self._units.in_state(UnitState.BOUND)):
            if not entry.is_pinned:
                self._evict(entry)
        self._fetcher.free_extra_memory()

    @property
    def _live_numel_max(self) -> int:
        return self._limits.live_numel_max + self._extra_numel - self._expert_rows_numel

    @property
    def _limits_now(self) -> Limits:
        return replace(self._limits, live_numel_max=self._live_numel_max)

    def begin_forward_use(self, index: int, *, backward_follows: bool) -> None:
        """A module that uses the unit is called."""
        entry = self._units[index]
        entry.forward_uses += 1
        if entry.forward_uses > 1 or entry.state == UnitState.PERSISTENT:
            self.use_on_current_stream(index)
            return
        self._in_backward = False
        self.trace.use_forward(index, backward_follows=backward_follows)
        self._hot.note_use(index)
        try:
            self._fetch_and_bind(entry)
        except BaseException:
            entry.forward_uses -= 1  # the call does not begin, so nothing will end this use
            self._hot.unpin(index)
            raise
        self._prefetch(with_backward=self.trace.expects_backward(index, backward_follows))

    def use_on_current_stream(self, index: int) -> None:
        """A bound unit is used by the current stream from here on; its values may have come there for another one."""
        entry = self._units[index]
        if entry.state == UnitState.PERSISTENT:
            self._fetcher.use_persistent_on_stream()
        elif entry.state == UnitState.BOUND and entry.arrival is not None:
            self._fetcher.use_on_current_stream(entry.arrival)
        elif entry.state == UnitState.EDITED:
            for memory in self._bindings[index].flat_buffers:
                self._storage.streams.wait_and_record_stream(memory, entry.edit_event)

    def is_used(self, index: int) -> bool:
        """True while a call or a backward uses the unit, and always for a persistent unit."""
        return self._units[index].is_in_use or self._units[index].state == UnitState.PERSISTENT

    def is_last_use(self, index: int) -> bool:
        """True while exactly one forward call uses the unit."""
        return self._units[index].forward_uses == 1

    def end_forward_use(self, index: int, *, backward_follows: bool) -> None:
        """A call that uses the unit returned."""
        entry = self._units[index]
        entry.forward_uses = max(entry.forward_uses - 1, 0)
        if entry.forward_uses:
            return
        self.trace.end_use(index)
        if entry.state != UnitState.PERSISTENT and not entry.backward_uses:
            with_backward = self.trace.expects_backward(index, backward_follows)
            self._keep_or_evict(entry, self.trace.upcoming_in_forward(with_backward=with_backward))

    def begin_backward_use(self, index: int) -> None:
        """Gradients have reached an output of a module that uses the unit, or it is being recomputed."""
        self._use_in_backward(self._units[index], recomputes=False)
        self._units[index].backward_uses += 1

    def begin_recompute(self, index: int, *, by_call: bool = False) -> None:
        """A forward inside a backward uses the unit: it stays until a backward use of it ends, if there is room.

        `by_call`: a module call uses it, and `end_recompute` follows when that call returns.
        """
        self._use_in_backward(self._units[index], recomputes=True if by_call else None)
        self._units[index].recomputing += by_call

    def _use_in_backward(self, entry: UnitEntry, *, recomputes: bool | None) -> None:
        """`recomputes`: see `AccessTrace.use_backward`; None: code outside any call reads it, out of order."""
        present = entry.state == UnitState.PERSISTENT or entry.backward_uses or entry.is_recomputed
        if present:
            self.use_on_current_stream(entry.index)
            entry.has_recompute_returned &= recomputes is not None
        if entry.state == UnitState.PERSISTENT:
            return
        entry.recomputing += 1  # until the prefetch has ended, which may evict units that wait for gradients
        try:
            if not present:
                self._in_backward = True
                if recomputes is not None:
                    self.trace.use_backward(entry.index, recomputes=recomputes)
                self._fetch_and_bind(entry)
                entry.is_recomputed, entry.has_recompute_returned = True, False
            self._prefetch(with_backward=True)  # gradients may have passed units since the last one
        finally:
            entry.recomputing -= 1

    def end_recompute(self, indices: Iterable[int]) -> None:
        """A recomputing call returned: until gradients reach it, its units may be evicted for others."""
        for index in indices:
            self._units[index].recomputing = max(self._units[index].recomputing - 1, 0)
            self._units[index].has_recompute_returned = True

    def end_backward_use(self, index: int) -> bool:
        """Gradients have passed a call that uses the unit. True if that was the last open use; ignored if none was."""
        entry = self._units[index]
        if not entry.backward_uses:
            return False
        entry.backward_uses -= 1
        if entry.backward_uses or entry.recomputing:  # another micro-batch may still be recomputing it
            return False
        entry.is_recomputed = False
        self.trace.end_backward_use(index)
        if not entry.forward_uses and entry.state != UnitState.PERSISTENT:
            self._keep_or_evict(entry, self.trace.upcoming_in_backward(forward_follows=self.is_accumulating))
        return True

    def note_read(self, index: int) -> None:
        """A bound unit is read outside any call; a graph may need its values in the next backward."""
        entry = self._units[index]
        self.use_on_current_stream(index)
        entry.is_read_for_backward = entry.is_read_for_backward or (
            torch.is_grad_enabled() and entry.state == UnitState.BOUND
        )

    def end_backward(self) -> None:
        """The outermost backward is over: no use is open, even if hooks have missed its end."""
        open_uses = [
            entry for entry in self._units if entry.backward_uses or entry.is_recomputed or entry.is_read_for_backward
        ]
        # Clear all units before the first eviction: whether a unit may stay depends on which others are in use.
        for entry in self._units:
            entry.backward_uses = entry.recomputing = 0
            entry.is_recomputed = entry.is_read_for_backward = False
        for entry in open_uses:
            if not entry.forward_uses and entry.state != UnitState.PERSISTENT:
                self._keep_or_evict(entry, self.trace.upcoming_in_backward(forward_follows=self.is_accumulating))
        self.trace.end_backward()

    def end_forward(self, next_phase: str | None = None) -> None:
        """The root's forward is over, failed or not: no forward use is open.

        `next_phase`: a forward of this phase may follow at once, without a backward in between.
        """
        self.trace.end_forward()
        open_uses = [entry for entry in self._units if entry.forward_uses]
        for entry in open_uses:
            entry.forward_uses = 0
        for entry in open_uses:
            if not (entry.is_in_use or entry.is_edited):
                self._evict_bound(entry)
        if next_phase is not None:
            self._expect_forward(GENERATE if self._hot.is_active else next_phase, with_backward=False)

    def is_bound(self, index: int) -> bool:
        """True while the unit's parameters see their values."""
        return self._bindings[index].is_bound

    def bind_persistent(self) -> None:
        """Bind the units that never leave the device to their home, if they are not bound."""
        self._fetcher.bind_persistent()
        self.is_persistent_bound = True

    def on_step(self) -> None:
        """A step is fixed: units fetched from now on must have the values of that step. A training forward is next."""
        self.end_paused_generation()
        self._fetcher.on_step()

    def expect_forward(self) -> None:
        """A training forward comes next: begin to fetch the units it uses first."""
        self._fetcher.prefetch_persistent()
        self._expect_forward("train", with_backward=True)

    def _expect_forward(self, phase: str, *, with_backward: bool) -> None:
        self._in_backward = False
        self.trace.expect_forward(phase)
        self._prefetch(with_backward=with_backward)

    def wait_for_prefetches(self) -> None:
        """Wait until all prefetches have ended, failed or not."""
        for entry in self._units.in_state(UnitState.IN_FLIGHT):
            if entry.arrival is not None and entry.arrival.future is not None:
                entry.arrival.future.wait()

    def check_idle(self) -> None:
        """Raise StateError if a unit is in use: a step or a close was called inside forward or backward."""
        busy = [entry.unit.name for entry in self._units.in_state(UnitState.BOUND) if entry.is_in_use]
        if busy:
            raise StateError(
                f"step: units {', '.join(busy)} are in use, because step() was called inside forward or backward; "
                "call it after backward"
            )

    def evict_all(self) -> None:
        """Evict every unit: its values are about to change, or the engine closes.

        Persistent units stay on the device, but their parameters are unbound until `bind_persistent`: where torch
        cannot swap storages they see a copy. Raises StateError: a unit is in use, or a parameter was given another
        shape; it keeps its values.
        """
        self.check_idle()
        self.is_persistent_bound = False
        self.trace.forget_forwards()
        for entry in self._units:
            entry.is_read_for_backward = False
        for entry in (*self._units.in_state(UnitState.IN_FLIGHT), *self._units.in_state(UnitState.BOUND)):
            self._evict(entry)
        self._fetcher.drain()
        self._free_extra_memory()  # after `drain`: until then the I/O loop may use this memory
        refused: list[str] = []
        self._fetcher.use_persistent_on_stream()  # what they see may have been copied there on another stream
        persistent = [binding for binding in self._bindings if binding.unit.persistent and binding.is_bound]
        for binding in persistent:
            refused += binding.recapture()
            binding.unbind()
        if persistent:
            self._fetcher.order_io_after_writes()
        if refused:
            raise StateError("; ".join(refused))

    def free_device_memory(self) -> None:
        """Called after `evict_all`, when the engine closes: a model that lives on must keep no device memory.

        Code that reads its parameters past torch's dispatch sees NaN, now in host memory.
        """
        if is_accelerator(self.device):
            poison = Poison(max((unit.nbytes for unit in self._layout.units), default=1), HOST)
            for binding in self._bindings:
                binding.leave_device(poison)

    def evict_if_unused(self, index: int) -> None:
        """Evict the unit if no use of it is open, so that an editor may bind it to memory of its own."""
        self._fetcher.drain()
        if index not in self._units.pinned_units():
            self._evict(self._units[index])

    def begin_edit(self, index: int) -> None:
        """An editor binds the unit, in memory of its own or where it is: uses find it present and do not evict it."""
        entry = self._units[index]
        entry.is_edited = entry.state == UnitState.BOUND
        if entry.state == UnitState.EVICTED:
            self._units.move(entry, UnitState.EDITED)
            entry.edit_event = self._storage.streams.record_event()

    def is_edited(self, index: int) -> bool:
        """True between `begin_edit` and `end_edit`, if the editor has bound the unit to memory of its own."""
        return self._units[index].state == UnitState.EDITED

    def end_edit(self, index: int) -> None:
        """The editor is done; a unit that nothing uses any more is evicted."""
        entry = self._units[index]
        entry.is_edited = False
        if entry.state == UnitState.EDITED:
            self._units.move(entry, UnitState.EVICTED)
        elif entry.state == UnitState.EVICTED and entry.is_in_use:
            self._fetch_and_bind(entry)  # a use began meanwhile, and goes on
        elif not entry.is_pinned:
            self._evict_bound(entry)

    def on_rewrite(self, indices: Collection[int] | None = None, unstored: Collection[int] = ()) -> None:
        self._fetcher.on_rewrite(indices, unstored)

    # ---- rows of packed experts, fetched and freed apart from their unit ---------------------

    def lease_rows(self, unit: Unit, numel: int) -> Block:
        """Lease memory for rows of the unit, evicting units not in use. Free it with `free_rows`.

        Raises BudgetError: units in use leave no room.
        """
        nbytes, block = numel * unit.dtype.itemsize, None
        limit_numel = self._live_numel_max - numel
        while block is None:
            candidates = self._units.evictable_units()
            if self._units.resident_numel <= limit_numel:
                block = self._fetcher.lease_block(nbytes)
            elif not candidates:
                if self._scheduler.unpin_for_room():
                    continue
                raise self._no_room_error(f"experts of {unit.name}", numel)
            if block is None and candidates:
                self._evict_furthest(candidates)
            elif block is None:
                block = self._storage.unit_pool.allocate(nbytes, f"rows of {unit.name}")
        self._expert_rows_numel += numel
        self.counters.note_fetch(block.data.numel(), self._units.resident_numel + self._expert_rows_numel)
        self.counters.expert_row_bytes += block.data.numel()
        return block

    def free_rows_after(self, unit: Unit, block: Block, numel: int, future: IoFuture[MaybeEvent]) -> None:
        """As `free_rows`, for memory that `future` may still write to."""
        self._expert_rows_numel -= numel
        self._fetcher.free_after(unit, block, future)

    def free_rows(self, block: Block, numel: int) -> None:
        self._expert_rows_numel -= numel
        block.free(self._storage.streams.record_event())

    def _fetch_and_bind(self, entry: UnitEntry) -> None:
        """Bind the unit now; wait for its values if they are still in flight."""
        counters, arrival = self.counters, entry.arrival
        if (
            entry.state == UnitState.IN_FLIGHT
            and arrival is not None
            and (arrival.has_reported_failure or entry.index in self._parked)
        ):
            # Its failure was already reported: this call tries again; or the values are altered.
            self._drop_arrival(entry)
            arrival = None
        if entry.state == UnitState.EDITED:
            counters.hits += 1
            self.use_on_current_stream(entry.index)
            return
        if arrival is None:
            counters.misses += 1
            arrival = self._start_fetch(entry)
        elif entry.state == UnitState.BOUND:
            counters.hits += 1
            self._bindings[entry.index].mark_present()
            self._fetcher.use_on_current_stream(arrival)
            return
        elif arrival.is_done:
            counters.hits += 1
        else:
            counters.late += 1
        try:
            self._fetcher.await_values(arrival)
        except BaseException as error:
            mark_reported(error)
            self._drop_arrival(entry)
            raise
        self._fetcher.bind(self._bindings[entry.index], arrival)
        self._units.move(entry, UnitState.BOUND, arrival)

    def _start_fetch(self, entry: UnitEntry) -> Arrival:
        """Start to fetch the unit; evict others if needed. Raises BudgetError: units in use now leave no room."""
        unit, evict = entry.unit, self._choose_evictions(entry)
        if evict is None:
            if self._scheduler.unpin_for_room():
                return self._start_fetch(entry)
            raise self._no_room_error(f"unit {unit.name}", unit.numel)
        for other in evict:
            self._evict(self._units[other])
        arrival = self._fetcher.fetch(unit)
        while arrival is None:
            # Enough memory is free, but in fragments: evict the unit needed last to get a contiguous run.
            candidates = self._units.evictable_units()
            if not candidates:
                self._fetcher.lease_or_raise(unit).free()
            self._evict_furthest(candidates)
            arrival = self._fetcher.fetch(unit)
        self._on_fetch_start(entry, arrival)
        return arrival

    def _choose_evictions(self, entry: UnitEntry) -> tuple[int, ...] | None:
        """Units to evict for a unit that is needed now; None: units in use leave no room."""
        if self._units.resident_numel + entry.unit.numel <= self._live_numel_max:
            return ()
        units, pinned = self._units, self._hot.pinned
        # It evicts units that a generation pins, and if necessary recomputed units that only wait for gradients.
        # A unit in use is never evicted.
        pins: tuple[Callable[[int], bool], ...] = (
            lambda i: units[i].is_pinned or i in pinned,
            lambda i: units[i].is_pinned,
            lambda i: units[i].is_pinned and not units[i].awaits_gradients,
        )
        resident, upcoming = units.resident_units(), [*self._horizon()]
        choices = (
            choose_victims(entry.index, resident, is_pinned, upcoming, self._numel, self._live_numel_max)
            for is_pinned in pins
        )
        return next((choice for choice in choices if choice is not None), None)

    def _on_fetch_start(self, entry: UnitEntry, arrival: Arrival) -> None:
        self._units.move(entry, UnitState.IN_FLIGHT, arrival)
        self.counters.note_fetch(entry.unit.nbytes, self._units.resident_numel + self._expert_rows_numel)
        self.counters.whole_experts.update([entry.index] if entry.unit.expert_rows else [])

    def _evict_furthest(self, candidates: list[int]) -> None:
        """Evict the unit whose next use is furthest away; units that a generation pins are evicted last."""
        next_use = first_positions(self._horizon())
        last = {i: next_use.get(i, math.inf) for i in candidates}
        self._evict(self._units[max(candidates, key=lambda i: (i not in self._hot.pinned, last[i]))])

    def _prefetch(self, *, with_backward: bool) -> None:
        # A prediction whose units are all present only gets shorter, until it changes or a unit is evicted.
        key = (
            with_backward,
            self._in_backward,
            self.is_accumulating,
            self.trace.prediction_changes,
            self._units.evictions,
        )
        if key == self._prefetched_key:
            return
        upcoming = self._predicted_uses(with_backward=with_backward)
        plan = plan_prefetch(self._units.resident_units(), self._is_pinned, upcoming, self._numel, self._limits_now)
        for index in plan.evict:
            self._evict(self._units[index])
        for index in plan.fetch:
            entry = self._units[index]
            if entry.state == UnitState.EDITED:
                continue
            arrival = self._fetcher.fetch(entry.unit)
            if arrival is None:  # no memory is free, and no use needs the unit yet
                return
            self._on_fetch_start(entry, arrival)
        if plan.is_complete and not plan.evict:
            self._prefetched_key = key

    def _is_pinned(self, index: int) -> bool:
        """A prefetch must not evict it: it is in use, pinned, or in flight (ranks in step: even if it has arrived)."""
        entry, arrival = self._units[index], self._units[index].arrival
        if entry.state == UnitState.IN_FLIGHT and index not in self._parked:
            return self._fetcher.in_step or arrival is None or not arrival.is_done
        return (
            entry.is_pinned and not (entry.awaits_gradients and entry.has_recompute_returned)
        ) or index in self._hot.pinned

    def _no_room_error(self, what: str, numel: int) -> BudgetError:
        in_use = [self._layout.units[i] for i in sorted(self._units.pinned_units())]
        names = [f"{unit.name} ({unit.numel:,})" for unit in in_use]
        names += [f"rows of experts ({self._expert_rows_numel:,})"] if self._expert_rows_numel else []
        return BudgetError(
            f"{what} ({numel:,} elements) is needed while {', '.join(names) or 'nothing'} is in use: together they "
            f"exceed {self._limits.live_numel_max:,} live elements; raise "
            "zero_optimization.stage3_max_live_parameters or memory_budget.device"
        )

    def _predicted_uses(self, *, with_backward: bool) -> Iterator[int]:
        if self._in_backward:
            return self.trace.upcoming_in_backward(forward_follows=self.is_accumulating)
        return self.trace.upcoming_in_forward(with_backward=with_backward, to_fetch=True)

    def _horizon(self) -> Iterator[int]:
        """Predicted uses, as far ahead as an eviction can depend on them."""
        return take_until(self._predicted_uses(with_backward=True), HORIZON * self._live_numel_max, self._numel)

    def _keep_or_evict(self, entry: UnitEntry, upcoming: Iterator[int]) -> None:
        if entry.is_edited:
            return
        is_bound = entry.state == UnitState.BOUND
        if is_bound:
            self._bindings[entry.index].mark_released()
        if entry.is_read_for_backward:
            return
        colder = self._hot.try_pin(entry.index, lambda other: self._units[other].is_pinned) if is_bound else None
        if colder is not None:
            for other in colder:
                self._evict(self._units[other])
            return
        if not is_reused_soon(entry.index, upcoming, self._numel, self._limits_now):
            self._evict_bound(entry)

    def _evict(self, entry: UnitEntry) -> None:
        if entry.state == UnitState.BOUND:
            self._evict_bound(entry)
        else:
            self._drop_arrival(entry)

    def _evict_bound(self, entry: UnitEntry) -> None:
        arrival = entry.arrival
        if entry.state != UnitState.BOUND or arrival is None:
            return
        self._units.move(entry, UnitState.EVICTED)  # first: if code below raises, the unit must not seem to be present
        self._hot.unpin(entry.index)
        for values in self._altered.pop(entry.index, ()):
            values.undo()
        entry.is_recomputed = False
        binding = self._bindings[entry.index]
        refused = binding.recapture()
        modified = binding.is_modified
        self._fetcher.unbind(binding, arrival, modified=modified)
        self.counters.evictions[entry.index] += 1
        self._fetcher.evict(entry.unit, arrival, modified=modified)
        if refused:
            raise StateError(f"unit {entry.unit.name}: {'; '.join(refused)}")

    def _drop_arrival(self, entry: UnitEntry) -> None:
        """Drop values that are in flight and were never bound; waits until their fetch has ended."""
        arrival = entry.arrival
        if entry.state != UnitState.IN_FLIGHT or arrival is None:
            return
        self._units.move(entry, UnitState.EVICTED)
        if entry.index in self._parked:
            self._parked.discard(entry.index)
            self._hot.unpin(entry.index)
        self._fetcher.evict(entry.unit, arrival, modified=False)
