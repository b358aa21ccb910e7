"""Lends the memory of gradients between their use and their next arrival: updated states wait there to be written.

[Note: why writes wait] Forward runs at the disk's limit: it waits for optimizer states to be read and written. Backward
leaves the disk mostly idle. A gradient is not needed after its update has used it, so by the end of forward most
gradient memory is free. States that are updated but not yet written stay in it, and are written while backward
computes. The first gradient of a unit withdraws its memory, so only units that backward reaches late offer theirs.

So an update that finds no room in the host pool may run in spare memory: `UpdateAdmission` admits one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import torch

from offload.memory.flat_storage import exact_alias
from offload.memory.pool import Block, ExtentAllocator
from offload.streams import MaybeEvent
from zero.params.layout import Layout, SubGroup, Unit
from zero.store.storage import Storage

# Share of the gradient memory that is lent, from the front: its gradients arrive so late that writes that remain at the
# end of forward are over by then.
SPARE_SHARE = 2 / 3

Range = tuple[int, int]
WRITES_IN_FLIGHT = 2  # States written at once if others can wait: enough to keep a disk busy, and reads go first.


class _Pool:
    """The spare memory of the gradients of one address space."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.end = int(memory.numel() * SPARE_SHARE)
        self.extents = ExtentAllocator(align_bytes=1)

    def free_range(self, offset: int, nbytes: int, events: tuple[MaybeEvent, ...]) -> None:
        """Called by `Block.free`."""
        self.extents.free(offset)


class SpareGradientMemory:
    """Lends the memory of gradients that updates have used. All but `is_offered` runs on the I/O loop."""

    def __init__(self, layout: Layout, storage: Storage) -> None:
        self._layout, self._storage = layout, storage
        memories = {index: array.host for index, array in enumerate(storage.gradients) if array is not None}
        self._pools = {index: _Pool(memory) for index, memory in memories.items() if memory is not None}
        self._offered_units: set[int] = set()

    @property
    def has_memory(self) -> bool:
        """False if no gradient has memory that can be lent."""
        return bool(self._pools)

    def offer(self, group: SubGroup, units: Iterable[Unit]) -> None:
        """Lend the memory of these units' gradients in the sub-group: it is not needed until new gradients arrive."""
        pool = self._pools.get(group.space)
        if pool is None:
            return
        for unit in units:
            begin, end = self._range(pool, unit, *group.range_in(unit))
            if begin < end:
                self._offered_units.add(unit.index)
                pool.extents.offer(begin, end)

    def try_lease(self, nbytes: int) -> Block | None:
        """Memory of used gradients for an update; None if no free range is large enough."""
        for pool in self._pools.values():
            begin = pool.extents.allocate(nbytes, lowest=True)
            if begin is not None:
                return Block(pool, begin, exact_alias(pool.memory[begin : begin + nbytes]))
        return None

    def is_offered(self, index: int) -> bool:
        """True if the unit's memory may be lent. For any thread."""
        return index in self._offered_units

    async def withdraw(self, unit: Unit) -> None:
        """Return when no part of the memory of the unit's gradient is borrowed any more."""
        pool = self._pools[self._layout.space_of(unit)]
        begin, end = self._range(pool, unit, unit.begin, unit.end)
        pool.extents.withdraw(begin, end)
        while pool.extents.is_allocated(begin, end):
            await pool.extents.wait_for_free()
        self._offered_units.discard(unit.index)

    def _range(self, pool: _Pool, unit: Unit, begin: int, end: int) -> Range:
        """The bytes of the pool that hold [begin, end) of the unit and may be lent; empty for other memory."""
        array = self._storage.gradients[self._layout.space_of(unit)]
        first, last = (array and array.host_range(begin, end)) or (0, 0)
        return min(first, pool.end), min(last, pool.end)


class UpdateAdmission:
    """Admits updates in the order of their requests.

    `slots`: number of updates that may use memory of the host pool; `spare`: memory that further updates use.

    Attributes:
        write_semaphore: a semaphore that each write of an optimizer state acquires.
    """

    def __init__(self, slots: int, spare: SpareGradientMemory) -> None:
        self._spare = spare
        self._admission_lock = asyncio.Lock()
        self._slots = asyncio.Semaphore(slots)
        self.write_semaphore = asyncio.Semaphore(WRITES_IN_FLIGHT if spare.has_memory else slots)

    @asynccontextmanager
    async def admit(self, nbytes: int) -> AsyncIterator[Block | None]:
        """A place for an update that needs `nbytes` of host memory: spare memory, or None: a slot of the host pool."""
        async with self._admission_lock:
            block = self._spare.try_lease(nbytes) if nbytes and self._slots.locked() else None
            if block is None:
                await self._slots.acquire()
        try:
            yield block
        finally:
            if block is None:
                self._slots.release()
            else:
                block.free()
