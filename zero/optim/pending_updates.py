"""Updates after the step: the sub-groups that are due, and the order in which units need them.

[Note: order] `step()` fixes a step's values and returns. A sub-group is updated when the first unit that needs it is
fetched, so updates run in the order of the next forward and overlap with it; the update also delivers the forward's
weights. A sub-group that no forward needs is updated when its values are read, and at the latest before the next step.

[Note: failure] After a failed read the sub-group stays due. After a failed write the arrays hold the new values in
memory, and no update starts until they are on the disk: on a failing disk each further update would strand a block.
The next call of the engine raises the error, which names the step.

[Note: failure among ranks] A forward or backward that ends on one rank alone leaves the others waiting in the next
collective. So with several ranks a read or write that fails is repeated at once, and the next step reports it on all
ranks. Only if it fails again, this rank's forward fails.

[Note: threads] Only the I/O loop writes this state, except in `begin_step`, which is called while nothing is due. The
stepper sets `is_stopped`, and takes `unreported` when it reports it. Other threads ask whether sub-groups are pending;
the I/O loop only takes some out, so an answer can only become "no".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from offload.array.copies import fetch_array
from offload.array.tiered_array import await_all
from offload.errors import StateError, StorageError
from offload.streams import MaybeEvent
from zero.optim.sub_group_pipeline import Delivery, StepArguments, SubGroupPipeline
from zero.params.layout import Layout, SubGroup, Unit
from zero.store.collectives import Collectives
from zero.store.storage import Storage


@dataclass(slots=True, eq=False)
class RunningUpdate:
    """One running update."""

    # The units whose new weights were delivered; or the error that left the sub-group due.
    update_future: asyncio.Future[frozenset[int]]
    memory_future: asyncio.Future[None]  # Ends when no write reads from a unit's own memory any more; never an error.
    borrowed_units: frozenset[int]  # Units from whose own memory weights are written; never memory of a GPU.
    task: asyncio.Task[None] | None = None  # Ends when all its transfers have ended; never raises.


class PendingUpdates:
    """The sub-groups of the last step that are not updated yet.

    Args:
        threads: of the kernel on the host inside `finish_groups`. During a forward or backward that computes on the
            host too, the kernel has one thread.
        collectives: other ranks read units once they are updated.
    """

    def __init__(
        self, layout: Layout, storage: Storage, pipeline: SubGroupPipeline, collectives: Collectives, threads: int
    ) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._threads = threads
        self._collectives = collectives
        self.is_single_rank = collectives.placement.is_single_rank
        self._threads_in_forward = 1 if storage.streams.has_unified_memory else threads
        self.arguments = StepArguments({}, 1.0, 0)  # The last step's.
        self._due: set[SubGroup] = set()
        self._unapplied: set[SubGroup] = set()
        self._running: dict[SubGroup, RunningUpdate] = {}
        self._unstored: set[SubGroup] = set()
        self.failure: StorageError | None = None  # A result could not be stored, and is not on the disk yet.
        self.unreported: StorageError | None = None  # With several ranks: the next step reports it to all.
        self._stranded: set[SubGroup] = set()  # Updated, and not completely on the disk because a write has failed.
        self._rewriting = asyncio.Lock()
        self.is_stopped = False  # The engine closes: no further update begins.
        self._layout = layout
        self._groups: dict[int, list[SubGroup]] = {unit.index: [] for unit in layout.units}
        for group in storage.plan.sub_groups:
            for unit in layout.units_in(group):
                self._groups[unit.index].append(group)

    # ---- any thread ---------------------------------------------------------------------------

    def begin_step(self, arguments: StepArguments, due: Iterable[SubGroup]) -> None:
        """A step is fixed; no update of the previous step is due or running.

        `arguments`: the step's; `due`: the sub-groups it changes.
        """
        self.arguments = arguments
        self._due = set(due)
        self._unapplied = set(self._due)
        self._unstored = set(self._due)

    def is_stored(self, index: int) -> bool:
        """True if the unit's weights of the last step are stored in their home."""
        return not any(group in self._unstored for group in self._groups[index])

    def is_current(self, index: int) -> bool:
        """True if the unit's weights are updated by the last step."""
        return not self._unapplied or not any(group in self._unapplied for group in self._groups[index])

    def is_written_from(self, index: int) -> bool:
        """True while an update writes to the disk from the unit's own memory."""
        return any(index in running.borrowed_units for running in list(self._running.values()))

    def is_busy(self, group: SubGroup) -> bool:
        return group in self._due or group in self._unapplied or group in self._running

    @property
    def is_idle(self) -> bool:
        return not (self._unapplied or self._running)

    # ---- the I/O loop -------------------------------------------------------------------------

    async def fetch(self, unit: Unit, into: torch.Tensor, events: tuple[MaybeEvent, ...]) -> MaybeEvent:
        """Fill `into` (uint8, on the compute device) with this rank's shard of the unit's weights of the last step.

        Returns an event after the copies, which may still be running. Raises StorageError: the content of `into` is
        useless; sub-groups not updated stay due.

        Args:
            unit: any.
            into: this rank's shard of a flat buffer.
            events: after the last uses of that memory on the device.
        """
        await self.run_with_retry(lambda: self._fetch(unit, Delivery(into, events)))
        return self._storage.streams.record_copy_event()

    async def fetch_rows(
        self, unit: Unit, rows: Iterable[tuple[int, int, int]], into: torch.Tensor, events: tuple[MaybeEvent, ...]
    ) -> MaybeEvent:
        """Fill parts of `into` (uint8, on the compute device) with parts of the unit's weights of the last step.

        Returns an event after the copies, which may still be running. Raises StorageError: the content of `into` is
        useless; sub-groups not updated stay due.

        Args:
            unit: any.
            rows: (first coordinate, end, first element of `into`) of each part.
            into: memory for the weights.
            events: after the last uses of that memory on the device.
        """
        rows, storage, width = list(rows), self._storage, unit.dtype.itemsize
        groups = [g for g in self._groups[unit.index] if any(g.begin < end and lo < g.end for lo, end, _ in rows)]
        await self.update_groups(groups)
        await self._wait_for_groups(groups)  # until then the disk holds the old weights
        array = storage.weights[self._layout.space_of(unit)]
        parts = [(begin, end, into[at * width : (at + end - begin) * width]) for begin, end, at in rows]
        read = partial(fetch_array, array)
        await self.run_with_retry(
            lambda: await_all([read(*p, storage.host_pool, storage.streams, events) for p in parts])
        )
        return storage.streams.record_copy_event()

    async def update_groups(self, groups: Iterable[SubGroup]) -> None:
        """Update sub-groups whose weights are used where they are stored.

        Raises StorageError: at least one of them is still due.
        """
        groups = list(groups)
        await self.run_with_retry(lambda: await_all([self._update_group(group) for group in groups]))

    async def update_unit(self, unit: Unit) -> None:
        await self.update_groups(self._groups[unit.index])

    async def wait_for_writes(self, unit: Unit) -> None:
        """Wait until no weights of the unit are being written. Starts no update and raises nothing."""
        for group in self._groups[unit.index]:
            if (running := self._running.get(group)) is not None:
                await asyncio.shield(running.memory_future)

    async def finish_groups(self, groups: Iterable[SubGroup]) -> None:
        """Update sub-groups and store the results.

        Raises StorageError: sub-groups not updated stay due, results not stored stay in memory.
        """
        groups = list(groups)
        await self.run_with_retry(lambda: self._finish_groups(groups))

    async def retry_writes(self) -> None:
        """Repeat the writes that failed. Raises StorageError if one fails again."""
        await self._wait_for_groups(list(self._running))
        await self._rewrite_stranded()

    def set_failure(self, error: StorageError) -> None:
        """A result could not be written and is kept in memory; no update starts until it is on the disk."""
        self.failure = self.failure or error
        if not self.is_single_rank:
            self.unreported = self.unreported or error

    def groups_of(self, units: Iterable[int] | None) -> list[SubGroup]:
        """The sub-groups of these units (None: all) that are due or running, in coordinate order. For any thread."""
        # A snapshot first: hashing sub-groups runs Python code, and the I/O loop may end an update meanwhile.
        busy = self._due | self._unapplied | set(tuple(self._running))
        groups = busy if units is None else {group for index in units for group in self._groups[index]} & busy
        return sorted(groups, key=lambda group: (group.space, group.begin))

    # ---- inside -------------------------------------------------------------------------------

    async def _finish_groups(self, groups: list[SubGroup]) -> None:
        results = await asyncio.gather(*(self._update_group(g, self._threads) for g in groups), return_exceptions=True)
        await self._wait_for_groups(groups)
        errors = [result for result in results if isinstance(result, BaseException)]
        if self.failure is not None or errors:
            raise self.failure or errors[0]

    def _on_groups_stored(self, groups: Iterable[SubGroup]) -> None:
        for group in list(groups):
            self._unstored.discard(group)
            for unit in self._layout.units_in(group):
                if self.is_stored(unit.index):
                    self._collectives.on_unit_updated(unit.index)

    async def run_with_retry(self, transfer: Callable[[], Awaitable[None]]) -> None:
        """Run `transfer`, and with several ranks run it again if it fails. Raises StorageError."""
        try:
            await transfer()
        except StorageError as error:
            if self.is_single_rank:
                raise
            self.unreported = self.unreported or error
            await transfer()

    async def _rewrite_stranded(self) -> None:
        """Write the results that are kept in memory, while other updates may run.

        Raises StorageError: a write has failed again.
        """
        async with self._rewriting:
            while self.failure is not None:
                groups = set(self._stranded)
                try:
                    await self._storage.retry_failed_writes()
                except StorageError as error:
                    raise error.within(f"update of step {self.arguments.number}") from error
                self._stranded -= groups
                self._on_groups_stored(groups & self._unstored)
                if not self._stranded:  # else another update has failed meanwhile
                    self.failure = None

    async def _wait_for_groups(self, groups: list[SubGroup]) -> None:
        """Wait until all transfers of these sub-groups have ended."""
        tasks = [r.task for g in groups if (r := self._running.get(g)) is not None and r.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def _update_group(self, group: SubGroup, threads: int | None = None) -> None:
        running = self._running.get(group)
        if running is None and group in self._due:
            running = self._start_update(group, {}, threads or self._threads_in_forward)
        if running is not None:
            await asyncio.shield(running.update_future)

    async def _fetch(self, unit: Unit, delivery: Delivery) -> None:
        groups = self._groups[unit.index]
        if any(group in self._due or group in self._running for group in groups):
            # Make tasks even for a single sub-group: units fetched at the same moment are then updated in that order.
            await await_all([asyncio.create_task(self._fetch_part(unit, group, delivery)) for group in groups])
        else:
            await self._read_weights(unit, unit.begin, unit.end, delivery)

    async def _fetch_part(self, unit: Unit, group: SubGroup, delivery: Delivery) -> None:
        if group in self._due:
            running = self._start_update(group, {unit.index: delivery}, self._threads_in_forward)
            # Shielded: the waiting task may be cancelled, but an update that has begun must continue.
            if unit.index in await asyncio.shield(running.update_future):
                return
        elif group in self._running:
            running = self._running[group]
            await asyncio.shield(running.update_future)
            await self._wait_for_groups([group])  # until then the disk holds the old weights
        await self._read_weights(unit, *group.range_in(unit), delivery)

    async def _read_weights(self, unit: Unit, begin: int, end: int, delivery: Delivery) -> None:
        storage, width = self._storage, unit.dtype.itemsize
        array = storage.weights[self._layout.space_of(unit)]
        part = delivery.into[(begin - unit.begin) * width : (end - unit.begin) * width]
        await fetch_array(array, begin, end, part, storage.host_pool, storage.streams, delivery.events)

    def _start_update(self, group: SubGroup, deliveries: dict[int, Delivery], threads: int) -> RunningUpdate:
        # So that it is not begun twice; `_run_update` adds it again if it fails before it is applied.
        self._due.discard(group)
        borrowed_units = frozenset(i for i, delivery in deliveries.items() if delivery.into.device.type == "cpu")
        loop = asyncio.get_running_loop()
        running = RunningUpdate(loop.create_future(), loop.create_future(), borrowed_units)
        running.task = asyncio.create_task(self._run_update(group, deliveries, running, threads))
        self._running[group] = running
        return running

    async def _run_update(
        self, group: SubGroup, deliveries: dict[int, Delivery], running: RunningUpdate, threads: int
    ) -> None:
        pipeline = self._pipeline
        try:
            await self._check_arrays()
            async with pipeline.begin_update(group, self.arguments, deliveries) as update:
                await self._check_arrays()  # again: another update may have failed while this one waited for memory
                delivered = await pipeline.compute(update, threads)
                self._unapplied.discard(group)
                running.update_future.set_result(delivered)
                are_weights_stored = await pipeline.store_weights(update)
                running.borrowed_units = frozenset()
                running.memory_future.set_result(None)
                if are_weights_stored:
                    self._on_groups_stored([group])
                error = await pipeline.store_state(update)
            if error is not None:
                raise error
        except BaseException as error:
            await self._on_failed_update(group, running, error)
        finally:
            if not running.memory_future.done():
                running.memory_future.set_result(None)
            del self._running[group]  # last: a reader that finds no running update reads the arrays

    async def _check_arrays(self) -> None:
        """An update is about to begin: raise if it must not."""
        if self.failure is not None and self.is_single_rank:
            raise self.failure
        await self._rewrite_stranded()
        if self.is_stopped:
            raise StateError("update: the engine is closed")

    async def _on_failed_update(self, group: SubGroup, running: RunningUpdate, error: BaseException) -> None:
        """Keep the sub-group due, if its values did not change, or its new values in memory; end the waits."""
        named = error
        if isinstance(error, StorageError) and error is not self.failure:
            named = error.within(f"update of step {self.arguments.number}")
        if not running.update_future.done():
            self._due.add(group)
            running.update_future.set_exception(named)
            running.update_future.exception()  # mark it as retrieved: a prefetch may have no waiter, which is no error
            return
        self._stranded.add(group)
        self.set_failure(named)  # type: ignore[arg-type]
        if not self.is_single_rank:
            with suppress(StorageError):  # the next update to begin tries again, and raises it
                await self._rewrite_stranded()
