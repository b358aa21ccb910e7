"""Lends the memory of gradients between their use and their next arrival: updated states wait there to be written.

[Note: why writes wait] Forward runs at the disk's limit: it waits for optimizer states to be read and written. Backward
leaves the disk mostly idle. A gradient is not needed after its update has used it, so by the end of forward most
gradient memory is free. States that are updated but not yet written stay in it, and are written while backward
computes. The first gradient of a unit withdraws its memory, so only units that backward reaches late offer theirs.

So an update that finds no room in the host pool may run in spare memory: `UpdateAdmission` admits one after the other.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

import torch

from offload.memory.flat_storage import exact_alias
from offload.memory.pool import Block
from offload.streams import MaybeEvent
from zero.params.layout import Layout, SubGroup, Unit
from zero.store.storage import Storage

# Share of the gradient memory that is lent, from the front: its gradients arrive so late that writes that remain at the
# end of forward are over by then.
SPARE_SHARE = 2 / 3

Range = tuple[int, int]
WRITES_IN_FLIGHT = 2  # States written at once if others can wait: enough to keep a disk busy, and reads go first.


class Ranges:
    """A set of addresses as disjoint ranges, in order; ranges that touch are one. A change looks at its surroundings
    only: a step adds thousands of ranges.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[Range]:
        return zip(self._begins, self._ends, strict=True)

    def add(self, begin: int, end: int) -> None:
        if begin < end:
            first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)  # those that touch it
            if first < last:
                begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
            self._begins[first:last], self._ends[first:last] = [begin], [end]

    def remove(self, begin: int, end: int) -> None:
        first, last = bisect_right(self._ends, begin), bisect_left(self._begins, end)  # those that it cuts
        if begin < end and first < last:
            ranges = [(self._begins[first], begin), (end, self._ends[last - 1])]
            ranges = [(lo, hi) for lo, hi in ranges if lo < hi]
            self._begins[first:last], self._ends[first:last] = [lo for lo, _ in ranges], [hi for _, hi in ranges]

    def within(self, begin: int, end: int) -> list[Range]:
        """The parts of [begin, end) that are in the set."""
        first, last = bisect_right(self._ends, begin), bisect_left(self._begins, end)
        return [(max(self._begins[i], begin), min(self._ends[i], end)) for i in range(first, last)]


class SpareRanges:
    """Ranges of addresses: one party offers and withdraws them, others borrow and return them."""

    def __init__(self) -> None:
        self._offered, self._free = Ranges(), Ranges()  # Free: offered and not borrowed.
        self._borrowed: list[int] = []  # Where borrowed ranges begin, in order.
        self._end_of: dict[int, int] = {}

    def offer(self, begin: int, end: int) -> None:
        """[begin, end) may be borrowed from now on."""
        self._offered.add(begin, end)
        self._free.add(begin, end)
        for first in self._borrowed_in(begin, end):
            self._free.remove(first, self._end_of[first])

    def withdraw(self, begin: int, end: int) -> None:
        """[begin, end) cannot be borrowed again; borrowed parts of it stay borrowed until they are returned."""
        self._offered.remove(begin, end)
        self._free.remove(begin, end)

    def is_borrowed(self, begin: int, end: int) -> bool:
        """True while a part of [begin, end) is borrowed."""
        return bool(self._borrowed_in(begin, end))

    def borrow(self, nbytes: int) -> int | None:
        """Borrow the first free range of `nbytes`, and return its begin; None if there is none."""
        begin = next((begin for begin, end in self._free if end - begin >= nbytes), None)
        if begin is not None:
            self._free.remove(begin, begin + nbytes)
            insort(self._borrowed, begin)
            self._end_of[begin] = begin + nbytes
        return begin

    def return_range(self, begin: int) -> None:
        """Return the range that was borrowed at `begin`."""
        end = self._end_of.pop(begin)
        del self._borrowed[bisect_left(self._borrowed, begin)]
        for span in self._offered.within(begin, end):
            self._free.add(*span)

    def _borrowed_in(self, begin: int, end: int) -> list[int]:
        """Where the borrowed ranges begin that reach into [begin, end)."""
        first = last = bisect_left(self._borrowed, end)
        while first and self._end_of[self._borrowed[first - 1]] > begin:
            first -= 1
        return self._borrowed[first:last]


class _Pool:
    """The spare memory of the gradients of one address space."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.ranges = memory, SpareRanges()
        self.end = int(memory.numel() * SPARE_SHARE)
        self.waiters: list[asyncio.Future[None]] = []

    def free_range(self, offset: int, nbytes: int, events: tuple[MaybeEvent, ...]) -> None:
        """Called by `Block.free`."""
        self.ranges.return_range(offset)
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


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
                pool.ranges.offer(begin, end)

    def try_lease(self, nbytes: int) -> Block | None:
        """Memory of used gradients for an update; None if no free range is large enough."""
        for pool in self._pools.values():
            begin = pool.ranges.borrow(nbytes)
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
        pool.ranges.withdraw(begin, end)
        while pool.ranges.is_borrowed(begin, end):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            pool.waiters.append(waiter)
            await waiter
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
