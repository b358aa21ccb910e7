"""Memory and swap space that grow when needed: for bytes whose sum is not known before the first forward."""

from __future__ import annotations

import torch

from offload.array.tiered_array import Disk
from offload.memory.pool import Block, BlockPool, ExtentAllocator
from offload.sizes import PAGE_BYTES, align_up

STEP_BYTES = 16 << 20  # The minimum that is added at once.
GROWTH = 4  # At least this fraction of the capacity (1/4) is added: a few steps reach any size.


class GrowingPool:
    """Pools of one kind of memory. One owner at a time.

    Args:
        name: the purpose of the bytes; appears in errors.
        knob: the configuration key that makes bounded memory larger.
        nbytes: the total, in one pool; None: unbounded, another pool is added when none has room.
        pinned: page-lock host memory.
    """

    def __init__(self, name: str, knob: str, device: torch.device, nbytes: int | None, *, pinned: bool = False) -> None:
        self.name = name
        self.knob = knob
        self._device = device
        self._pinned = pinned
        self.can_grow = nbytes is None
        self._pools = [] if nbytes is None else [self._make_pool(nbytes)]
        self._closed = False
        self.peak_bytes = 0  # The most bytes that were allocated at once.

    @property
    def capacity_bytes(self) -> int:
        return sum(pool.capacity_bytes for pool in self._pools)

    @property
    def used_bytes(self) -> int:
        return sum(pool.used_bytes for pool in self._pools)

    def try_allocate(self, nbytes: int) -> Block | None:
        """A block of exactly `nbytes`; None if there is no room and the memory may not grow."""
        block = next((candidate for pool in self._pools if (candidate := pool.try_allocate(nbytes)) is not None), None)
        if block is None and self.can_grow and not self._closed:
            self.grow(max(nbytes, STEP_BYTES, self.capacity_bytes // GROWTH))
            block = self._pools[-1].allocate(nbytes, self.name)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return block

    def grow(self, nbytes: int) -> None:
        self._pools.append(self._make_pool(nbytes))

    def trim(self) -> None:
        """Free unused pools, unless their size was planned."""
        if self.can_grow:
            for pool in [pool for pool in self._pools if not pool.used_bytes]:
                pool.close()
                self._pools.remove(pool)

    def close(self) -> None:
        """Close all pools; their memory is freed with the last tensor over it. Idempotent."""
        self._closed = True
        for pool in self._pools:
            pool.close()
        self._pools.clear()

    def _make_pool(self, nbytes: int) -> BlockPool:
        return BlockPool(self.name, nbytes, self.knob, self._device, pinned=self._pinned)


class SwapPool:
    """A part of a swap space, allocated by extent.

    Args:
        disk: moves the bytes.
        begin: offset of the reserved range.
        nbytes: length of the reserved range.
        can_grow: when the range is used up, more is reserved.
    """

    def __init__(self, disk: Disk, begin: int, nbytes: int, *, can_grow: bool) -> None:
        self.disk, self._swap, self._can_grow = disk, disk.swap, can_grow
        self._extents = ExtentAllocator()
        self._extents.offer(begin, begin + nbytes)

    @property
    def used_bytes(self) -> int:
        return self._extents.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were allocated at once."""
        return self._extents.peak_bytes

    def try_allocate(self, nbytes: int) -> int | None:
        """Offset in the swap space of `nbytes`, on a page; None if there is no room and the pool may not grow.

        Raises StorageError: the pool cannot grow, since the file system has no room.
        """
        offset = self._extents.allocate(nbytes)
        if offset is None and self._can_grow:
            capacity_bytes = self._extents.used_bytes + self._extents.free_bytes
            more_bytes = align_up(max(nbytes, STEP_BYTES, capacity_bytes // GROWTH), PAGE_BYTES)
            begin = self._swap.extend(more_bytes)
            self._extents.offer(begin, begin + more_bytes)
            offset = self._extents.allocate(nbytes)
        return offset

    def free(self, offset: int) -> None:
        """Free the extent at `offset`, which `try_allocate` returned."""
        self._extents.free(offset)
