"""Lends the memory of gradients between their use and their next arrival: updated records wait there to be written.

[Note: why writes wait] Forward runs at the disk's limit: it waits for records to be read and written. Backward leaves
the disk mostly idle. A gradient is not needed after its update has used it, so by the end of forward most gradient
memory is free. Records that are updated but not yet written stay in it, and are written while backward computes. The
first gradient of a unit takes its memory back, so only the units that backward reaches late lend their memory.

So an update that finds no room in the arena may run in lent memory: `Places` admits one after the other.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import torch

from offload.memory.arena import Block
from offload.memory.flat_storage import exact_alias
from offload.streams import Fence
from zero.params.layout import Layout, SubGroup, Unit
from zero.store.storage import Storage

# Share of the gradient memory that is lent, from the front: its gradients arrive so late that writes left at the end
# of forward are over by then.
LENT_SHARE = 2 / 3

Range = tuple[int, int]
WRITES_IN_FLIGHT = 2  # Records written at once if others can wait: enough to keep a disk busy, and reads go first.


class SpareRanges:
    """Ranges of addresses: one party gives and withdraws them, others borrow and return them."""

    def __init__(self) -> None:
        self._given: list[Range] = []
        self._lent: list[Range] = []

    def give(self, begin: int, end: int) -> None:
        """[begin, end) may be lent from now on."""
        self.withdraw(begin, end)
        if begin < end:
            insort(self._given, (begin, end))

    def withdraw(self, begin: int, end: int) -> None:
        """[begin, end) is not lent again; parts of it that are lent now stay lent until they are returned."""
        self._given = list(_without(self._given, [(begin, end)]))

    def lent(self, begin: int, end: int) -> bool:
        """True while a part of [begin, end) is lent."""
        return any(first < end and begin < last for first, last in self._lent)

    def lend(self, nbytes: int) -> int | None:
        """Lend the first run of `nbytes` that is given and not lent yet; None if there is none."""
        begin = end = -1
        for first, last in _without(self._given, self._lent):
            begin, end = (begin, last) if first == end else (first, last)
            if end - begin >= nbytes:
                insort(self._lent, (begin, begin + nbytes))
                return begin
        return None

    def take_back(self, begin: int) -> None:
        """The range lent at `begin` is returned."""
        self._lent = [span for span in self._lent if span[0] != begin]


class _Pool:
    """The spare memory of one gradient plane."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.ranges = memory, SpareRanges()
        self.end = int(memory.numel() * LENT_SHARE)
        self.waiters: list[asyncio.Future[None]] = []

    def take_back(self, offset: int, nbytes: int, fences: tuple[Fence, ...]) -> None:
        """Called by `Block.release`."""
        self.ranges.take_back(offset)
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class SpareGradients:
    """Lends the memory of gradients that updates have used. All but `holds` runs on the mover's loop."""

    def __init__(self, layout: Layout, storage: Storage) -> None:
        self._layout, self._storage = layout, storage
        memories = {index: plane.host for index, plane in enumerate(storage.gradients) if plane is not None}
        self._pools = {index: _Pool(memory) for index, memory in memories.items() if memory is not None}
        self._holds: set[int] = set()

    @property
    def lends(self) -> bool:
        """False if no gradient has memory that can be lent."""
        return bool(self._pools)

    def give(self, group: SubGroup, units: Iterable[Unit]) -> None:
        """Lend the memory of these units' gradients in the sub-group: it is not needed until new gradients arrive."""
        pool = self._pools.get(group.space)
        if pool is None:
            return
        for unit in units:
            begin, end = self._range(pool, unit, *group.part_of(unit))
            if begin < end:
                self._holds.add(unit.index)
                pool.ranges.give(begin, end)

    def try_lease(self, nbytes: int) -> Block | None:
        """Memory of used gradients for an update; None if there is not enough in one run."""
        for pool in self._pools.values():
            begin = pool.ranges.lend(nbytes)
            if begin is not None:
                return Block(pool, begin, exact_alias(pool.memory[begin : begin + nbytes]))
        return None

    def holds(self, index: int) -> bool:
        """True if the unit's memory may be lent. For any thread."""
        return index in self._holds

    async def withdraw(self, unit: Unit) -> None:
        """Return when no part of the memory of the unit's gradient is lent any more."""
        pool = self._pools[self._layout.space_of(unit)]
        begin, end = self._range(pool, unit, unit.begin, unit.end)
        pool.ranges.withdraw(begin, end)
        while pool.ranges.lent(begin, end):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            pool.waiters.append(waiter)
            await waiter
        self._holds.discard(unit.index)

    def _range(self, pool: _Pool, unit: Unit, begin: int, end: int) -> Range:
        """The bytes of the pool that hold [begin, end) of the unit and may be lent; empty for other memory."""
        plane = self._storage.gradients[self._layout.space_of(unit)]
        first, last = (plane and plane.host_range(begin, end)) or (0, 0)
        return min(first, pool.end), min(last, pool.end)


def _without(spans: Iterable[Range], holes: Iterable[Range]) -> Iterable[Range]:
    """The parts of `spans` that are in none of `holes`; both sorted."""
    for begin, end in spans:
        for first, last in holes:
            if last <= begin or end <= first:
                continue
            if begin < first:
                yield (begin, first)
            begin = last
            if begin >= end:
                break
        if begin < end:
            yield (begin, end)


class Places:
    """Admits updates in the order in which they ask.

    `slots`: number of updates that may use memory of the arena; `spare`: memory that further updates use.

    Attributes:
        writes: a semaphore that each write of a record acquires.
    """

    def __init__(self, slots: int, spare: SpareGradients) -> None:
        self._spare = spare
        self._turn = asyncio.Lock()
        self._slots = asyncio.Semaphore(slots)
        self.writes = asyncio.Semaphore(WRITES_IN_FLIGHT if spare.lends else slots)

    @asynccontextmanager
    async def take(self, nbytes: int) -> AsyncIterator[Block | None]:
        """A place for an update that needs `nbytes` of host memory: lent memory, or None for a slot of the arena."""
        async with self._turn:
            block = self._spare.try_lease(nbytes) if nbytes and self._slots.locked() else None
            if block is None:
                await self._slots.acquire()
        try:
            yield block
        finally:
            if block is None:
                self._slots.release()
            else:
                block.release()
