"""Units in flight to the device, and the memory they are read into."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from offload.array.copies import write_array
from offload.errors import StateError, StorageError, is_reported, mark_reported
from offload.io.io_loop import IoFuture
from offload.memory.flat_storage import exact_alias
from offload.memory.host_memory import aligned_copy
from offload.memory.pool import Block
from offload.streams import MaybeEvent
from zero.optim.pending_updates import PendingUpdates
from zero.params.binding import UnitBinding
from zero.params.layout import Layout, Unit
from zero.store.collectives import Collectives, PendingWork
from zero.store.secondary_shards import SecondaryShards
from zero.store.storage import Storage


@dataclass(slots=True)
class Arrival:
    """A unit's values in flight, or waiting to be bound."""

    data: torch.Tensor  # uint8, the unit's bytes; its storage has exactly this length.
    block: Block | None  # Memory to free; None if the values are used where they live.
    future: IoFuture[Any] | None
    event: MaybeEvent = None  # On a device the values are there after this event; known once the future is done.
    streams: set[Any] = field(default_factory=set)  # The user's streams that have read the values, or will read them.
    copy: torch.Tensor | None = None  # What the parameters see, where that is not `data` itself.

    @property
    def is_done(self) -> bool:
        """True once the fetch has ended, failed or not."""
        return self.future is None or self.future.done()

    @property
    def has_reported_failure(self) -> bool:
        """True if the fetch failed and its error was already reported."""
        return self.future is not None and self.future.done() and is_reported(self.future.wait())


@dataclass(frozen=True, slots=True, eq=False)
class DrainingBlock:
    """Leased memory of an evicted unit, until neither the I/O loop nor the device uses it.

    `future`: nobody has waited for its end, or for the event that it returns; None: there is no such job.
    """

    unit: Unit
    block: Block
    future: IoFuture[Any] | None
    events: tuple[MaybeEvent, ...] = ()  # After its last uses on a device.


class _FetchJobs:
    """Jobs that fetch units, on the I/O loop. No reference to the engine: a job must not keep it alive."""

    def __init__(
        self, storage: Storage, updates: PendingUpdates, collectives: Collectives, neighbours: SecondaryShards
    ) -> None:
        self._storage = storage
        self._updates = updates
        self._collectives = collectives
        self._neighbours = neighbours

    async def fetch(
        self, unit: Unit, flat: torch.Tensor, events: tuple[MaybeEvent, ...], work: PendingWork
    ) -> MaybeEvent:
        try:
            own = await self._updates.fetch(unit, unit.shard_of(flat), events)
        except BaseException as error:
            self._collectives.cancel(work, error)
            raise
        return self._neighbours.store_part(unit, flat, await self._collectives.gather(work, unit, flat, own))

    async def fetch_all_shards(
        self, unit: Unit, memory: torch.Tensor, work: PendingWork, ungathered: set[int]
    ) -> MaybeEvent:
        """Update all shards where they live; the unit stays `ungathered` if that fails."""
        try:
            await self._updates.update_unit(unit)
        except BaseException as error:
            ungathered.add(unit.index)
            self._collectives.cancel(work, error)
            raise
        try:
            return await self._collectives.gather(work, unit, memory, self._storage.streams.record_update_event())
        except BaseException:
            ungathered.add(unit.index)
            raise


class FetchCalls(Protocol):
    """What the engine does before a unit is fetched, and when a forward has changed one."""

    def ensure_weights_on_device(self) -> None:
        """Bring weights back that `offload_states` has moved away: a module may be called by itself."""

    def on_forward_modify(self, index: int) -> None:
        """A forward has changed a unit in place."""


class UnitFetcher:
    """Leases memory for units and starts the reads into it.

    If a unit is evicted while its update is still being written from its memory, the memory is freed when the write is
    over. Where ranks fetch in step, memory is freed only when it is needed, in the order in which units were evicted:
    so every rank finds room for the same units at the same places.

    Args:
        in_place: values in memory that the device can address are used where they live.

    Attributes:
        in_step: all ranks fetch together; see `Placement.fetches_collectively`.
    """

    def __init__(
        self,
        layout: Layout,
        bindings: list[UnitBinding],
        storage: Storage,
        updates: PendingUpdates,
        in_place: bool,
        steps: FetchCalls,
        collectives: Collectives,
    ) -> None:
        self._layout = layout
        self._bindings = bindings
        self._storage = storage
        self._updates = updates
        self._in_place = in_place
        self._steps = steps
        self._collectives = collectives
        self._neighbours = SecondaryShards(layout, storage, collectives)
        self._jobs = _FetchJobs(storage, updates, collectives, self._neighbours)
        self.in_step = collectives.placement.fetches_collectively
        self._draining: list[DrainingBlock] = []
        self._persistent_events: list[MaybeEvent] = []
        self._persistent_futures: list[IoFuture[Any]] = []  # Updates of persistent units, begun ahead.
        self._copied_units = [binding for binding in bindings if binding.unit.persistent and binding.binds_copy]
        self._step_stream: Any = None  # The stream of the last step.
        # Units whose home has room for all shards, but only this rank's is current.
        self._ungathered = set(storage.plan.unsharded_units)

    def fetch(self, unit: Unit) -> Arrival | None:
        """Start to fetch the unit; None if no block is free."""
        self._steps.ensure_weights_on_device()
        memory = self._storage.flat_buffer(unit) if self._in_place and self._is_on_device(unit) else None
        if memory is not None:
            return Arrival(exact_alias(memory), None, self._fetch_in_place(unit, memory))
        for draining in self._draining:
            if draining.unit is unit and draining.future is not None:
                draining.future.wait()  # it may be storing the values that are to be read now
        block = self.lease_block(unit.nbytes)
        if block is None:
            return None
        # An alias: binding swaps the storage of `block.data`, while the update still writes from this memory.
        flat, work = exact_alias(block.data), self._neighbours.enqueue_near(unit)
        if work is not None:
            job = self._neighbours.gather(unit, flat, block.events, work)
        else:
            job = self._jobs.fetch(unit, flat, block.events, self._collectives.enqueue("gather", unit))
        return Arrival(block.data, block, self._storage.io_loop.submit(f"fetching unit {unit.name}", job))

    def on_step(self) -> None:
        """Trained units are about to change on every rank."""
        self._step_stream = self._storage.streams.current_stream()
        self._ungathered.update(
            index for index in self._storage.plan.unsharded_units if self._layout.units[index].trainable
        )
        self._neighbours.invalidate(unit.index for unit in self._layout.units if unit.trainable)
        self._collectives.on_step_decided(lambda index: not self._updates.is_stored(index))

    def on_rewrite(self, indices: Collection[int] | None = None, unstored: Collection[int] = ()) -> None:
        """The stored weights of these units (None: all) change on every rank, by other means than a step.

        `unstored`: the units among them that this rank could not store yet.
        """
        indices = range(len(self._layout.units)) if indices is None else indices
        self._neighbours.invalidate(indices)
        self._ungathered |= self._storage.plan.unsharded_units.intersection(indices)
        self._collectives.on_weights_rewritten(unstored)

    def prefetch_persistent(self) -> None:
        """Begin to update persistent units where that needs all ranks, so that no rank waits for another later."""
        if self.in_step:
            self._persistent_futures += self._start_persistent_fetches()

    def bind_persistent(self) -> None:
        """Update persistent units, and bind those that are not bound to their home.

        Their parameters can be read at any time without a call of the engine, as those of torch: after a step the
        reader expects the new values on the step's stream, even if they were fetched for another one.
        """
        self._finish_persistent()
        for binding in self._bindings:
            if binding.unit.persistent and not binding.is_bound:
                binding.bind(exact_alias(self._flat_of(binding.unit)))
        streams = self._storage.streams
        if self._copied_units:
            self._persistent_events.append(streams.record_event())
        with streams.use_stream(self._step_stream):
            self.use_persistent_on_stream()

    def _finish_persistent(self) -> None:
        """Wait for this rank's shards, and for those of the other ranks."""
        futures, self._persistent_futures = [*self._persistent_futures, *self._start_persistent_fetches()], []
        gathered = [future.result() for future in futures]
        self._persistent_events = [*gathered, self._storage.streams.record_update_event()]
        self.use_persistent_on_stream()

    def _start_persistent_fetches(self) -> list[IoFuture[Any]]:
        futures = [self._fetch_in_place(unit, self._flat_of(unit)) for unit in self._layout.units if unit.persistent]
        return [future for future in futures if future is not None]

    def use_persistent_on_stream(self) -> None:
        """The calling thread's stream uses persistent units from now on; other streams may have used them before."""
        streams = self._storage.streams
        streams.wait_events(*self._persistent_events)
        self._persistent_events = [
            event for event in self._persistent_events if event is not None and not event.query()
        ]
        for binding in self._copied_units:
            if binding.is_bound:
                streams.wait_and_record_stream(binding.flat)

    def _flat_of(self, unit: Unit) -> torch.Tensor:
        memory = self._storage.flat_buffer(unit)
        if memory is None:
            raise StateError(f"persistent unit {unit.name} has no memory on the device")
        return memory

    def await_values(self, arrival: Arrival) -> None:
        """Return when the values are on the device, or when the current stream is queued to wait for them.

        Raises StorageError: the fetch failed.
        """
        streams = self._storage.streams
        if arrival.future is not None:
            arrival.event = arrival.future.result()
        if arrival.block is None and arrival.event is None:  # the values are used where updates write them
            arrival.event = streams.record_update_event()
        self.use_on_current_stream(arrival)

    def use_on_current_stream(self, arrival: Arrival) -> None:
        """The calling thread's stream uses the values from now on; another stream may have waited for them before."""
        if arrival.copy is None:
            self._storage.streams.wait_events(arrival.event)
        else:
            self._storage.streams.wait_and_record_stream(arrival.copy, arrival.event)
        arrival.streams.add(self._storage.streams.current_stream())
        if arrival.event is not None and arrival.event.query():
            arrival.event = None

    def bind(self, binding: UnitBinding, arrival: Arrival) -> None:
        """Make the values the parameters' values, after `await_values`."""
        binding.bind(arrival.data)
        if binding.binds_copy:
            arrival.copy, arrival.event = binding.flat, self._storage.streams.record_event()

    def unbind(self, binding: UnitBinding, arrival: Arrival, *, modified: bool) -> None:
        """Undo `bind`. `modified`: a stream of `arrival.streams` has written to the parameters."""
        if modified and arrival.copy is not None:
            self._storage.streams.wait_and_record_stream(arrival.copy, arrival.event, *self._events_after_uses(arrival))
        binding.unbind(modified=modified)

    def lease_block(self, nbytes: int) -> Block | None:
        """Memory for values of units; waits for writes from evicted units if needed. None: not enough memory."""
        self._reclaim()
        block = self._storage.lease_unit(nbytes)
        while block is None and self._draining:
            self._drain_one()
            block = self._storage.lease_unit(nbytes)
        return block

    def allocate_extra_memory(self, nbytes: int) -> int:
        """Take more device memory for units, at most `nbytes`; returns the number of elements it has room for."""
        movable = [unit for unit in self._layout.units if not unit.persistent]
        leased = [unit for unit in movable if not (self._in_place and self._is_on_device(unit))]
        all_bytes = sum(unit.nbytes for unit in leased)
        nbytes //= 1 + any(self._bindings[unit.index].binds_copy for unit in leased)
        if nbytes <= 0:
            return 0
        if all_bytes <= self._storage.unit_pool.capacity_bytes:
            return sum(unit.numel for unit in leased)  # the pool holds all: only the limit of elements is in the way
        extra_bytes = self._storage.add_unit_pool(min(nbytes, all_bytes))
        return sum(unit.numel for unit in leased) * extra_bytes // all_bytes

    def free_extra_memory(self) -> None:
        """Free the memory of `allocate_extra_memory`; no unit in it may be bound."""
        self.drain()
        self._storage.remove_unit_pool()

    def _is_on_device(self, unit: Unit) -> bool:
        memory = self._storage.flat_buffer(unit)
        return memory is not None and memory.device == self._bindings[unit.index].flat.device

    def lease_or_raise(self, unit: Unit) -> Block:
        """Lease the unit's memory or raise BudgetError; called when no unit can be evicted any more."""
        return self._storage.unit_pool.allocate(unit.nbytes, f"unit {unit.name}")

    def evict(self, unit: Unit, arrival: Arrival, *, modified: bool) -> None:
        """Evict the unit; waits until no fetch writes into its memory.

        Raises StorageError: modified values could not be stored; the tiered array keeps them in memory. Raises
        StateError: other ranks use the modified memory too.

        Args:
            unit: was bound, or in flight.
            arrival: the unit's arrival, as `fetch` returned it.
            modified: the model has changed a weight inside its forward (a clamped temperature, a codebook): store it.
        """
        pending = arrival.future
        try:
            if arrival.future is not None and arrival.future.wait() is None:
                # A fetch that was never used may have no waiter: its collectives still write there, and they end
                # late if another rank is late.
                self._storage.streams.wait_events(arrival.future.result())
            pending = None
            if modified and (self._collectives.reads_homes and self._collectives.placement.weights_sharded):
                raise StateError(
                    f"unit {unit.name}: forward modified its weights in place, which is not possible while the ranks "
                    "of this node read each other's shards in shared memory; set "
                    "zero_optimization.shared_host_memory to false"
                )
            if modified and arrival.block is not None:
                pending = self._store_modified(unit, arrival)
                pending.result()
            elif modified:
                self._steps.on_forward_modify(unit.index)
                self.order_io_after_writes()
        except StorageError as error:
            mark_reported(error)
            raise
        finally:  # an interrupt may have ended the wait: then the I/O loop is still busy with it
            if arrival.block is not None:
                self._draining.append(DrainingBlock(unit, arrival.block, pending, self._events_after_uses(arrival)))
                self._reclaim()

    def order_io_after_writes(self) -> None:
        """The current stream has written to homes of units; what the I/O loop does from now on comes after that."""
        streams = self._storage.streams
        event = streams.record_event()

        async def wait_for_event() -> None:
            streams.wait_events(event)

        if event is not None:
            self._storage.io_loop.run("following what has been written on the device", wait_for_event())

    def free_after(self, unit: Unit, block: Block, future: IoFuture[MaybeEvent]) -> None:
        """Free the unit's memory once `future` is done; nobody waits for it any more."""
        self._draining.append(DrainingBlock(unit, block, future, (self._storage.streams.record_event(),)))
        self._reclaim()

    def wait_for_uses(self, arrival: Arrival) -> None:
        """The current stream is about to write to the values: it waits for all uses of them."""
        self._storage.streams.wait_events(*self._events_after_uses(arrival))

    def _events_after_uses(self, arrival: Arrival) -> tuple[MaybeEvent, ...]:
        """Events after the uses on every stream: the evicting stream has not waited for the other streams."""
        streams = self._storage.streams
        events = [streams.record_event()]
        for stream in arrival.streams - {streams.current_stream()}:
            with streams.use_stream(stream):
                events.append(streams.record_event())
        return tuple(events)

    def drain(self) -> None:
        """Wait for all writes from the memory of evicted units, and free that memory."""
        while self._draining:
            self._drain_one()

    def _fetch_in_place(self, unit: Unit, memory: torch.Tensor) -> IoFuture[Any] | None:
        """Begin to update the unit; None: nothing to do. The result is an event after a gather, or None."""
        if unit.index in self._ungathered:
            self._ungathered.discard(unit.index)
            job = self._jobs.fetch_all_shards(unit, memory, self._collectives.enqueue("gather", unit), self._ungathered)
            return self._storage.io_loop.submit(f"gathering unit {unit.name}", job)
        if self._updates.is_current(unit.index):
            return None
        return self._storage.io_loop.submit(f"updating unit {unit.name}", self._updates.update_unit(unit))

    def _reclaim(self) -> None:
        """Free the memory of evicted units that the I/O loop no longer uses."""
        if self.in_step:
            return
        busy = [draining for draining in self._draining if self._is_busy(draining)]
        for draining in self._draining:
            if draining not in busy:
                self._free(draining)
        self._draining = busy

    def _is_busy(self, draining: DrainingBlock) -> bool:
        if draining.future is not None and not draining.future.done():
            return True
        # Updates write to disk only from memory that the disk can address; an update on a GPU goes through the host.
        return self._storage.streams.has_unified_memory and self._updates.is_written_from(draining.unit.index)

    def _free(self, draining: DrainingBlock) -> None:
        future = draining.future
        event = future.result() if future is not None and future.wait() is None else None
        draining.block.free(*draining.events, event)

    def _drain_one(self) -> None:
        draining = self._draining[0]
        if draining.future is not None:
            draining.future.wait()
        unit = draining.unit
        self._storage.io_loop.run(f"storing unit {unit.name}", self._updates.wait_for_writes(unit))
        self._free(draining)
        self._draining.remove(draining)
        self._reclaim()

    def _store_modified(self, unit: Unit, arrival: Arrival) -> IoFuture[MaybeEvent]:
        """Begin to store the values; if the waiting thread is interrupted, the I/O loop still stores them."""
        array, streams = self._storage.weights[self._layout.space_of(unit)], self._storage.streams
        self._steps.on_forward_modify(unit.index)
        data, modified = arrival.data, self._events_after_uses(arrival)

        async def store() -> MaybeEvent:
            streams.wait_events(*modified)
            await streams.synchronize(*modified, streams.record_copy_event())
            await self._updates.wait_for_writes(unit)  # its update writes to the same place
            event = self._neighbours.store_part(unit, data, None)  # no event: the device has reached all of them
            try:
                await write_array(array, unit.begin, unit.end, unit.shard_of(data), self._storage.host_pool)
                return event
            except StorageError as error:
                array.keep_failed_write(unit.begin, unit.end, aligned_copy(unit.shard_of(data).cpu()))
                self._updates.set_failure(error)
                if self._updates.is_single_rank:
                    raise
                return event

        return self._storage.io_loop.submit(f"storing what forward has modified in {unit.name}", store())
