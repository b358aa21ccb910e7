"""Memory that is allocated once: linear pools that hold tiered arrays, and pools of blocks.

On a CPU-only machine the device's memory is host memory under the same limits, so every policy runs
and is tested without a GPU.
"""

from __future__ import annotations

import asyncio
import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Protocol, TypeAlias

import torch

from offload.accelerator import synchronize
from offload.errors import BudgetError, StateError
from offload.memory.flat_storage import exact_alias
from offload.memory.host_memory import map_host, pin, tensor_over, unfaulted_bytes, wipe_on_fork
from offload.memory.shared_host_memory import SharedHostMemory
from offload.sizes import PAGE_BYTES, align_up
from offload.streams import Event, MaybeEvent

# A uint8 tensor -> a tensor over the same bytes at their new place; the tensor itself if they have not moved.
Relocate: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


_open_pools: weakref.WeakSet[LinearPool] = weakref.WeakSet()


def unfaulted_pool_bytes(closing: Collection[LinearPool] = ()) -> int:
    """Host memory of this process's open pools that the kernel has still to provide, and so still counts as free.

    `closing`: pools that are about to be closed.
    """
    unfaulted = (pool.unfaulted_data for pool in tuple(_open_pools) if pool not in closing)
    return sum(unfaulted_bytes(data) for data in unfaulted if data is not None)


class LinearPool:
    """One allocation of exactly `nbytes`, zero at first, handed out piece by piece and freed at once.

    Pages of host memory that is not pinned are faulted in at the first write. So while a model is moved from memory
    into tiered arrays, the model shrinks as the arrays grow, and both together take hardly more than one of them.

    Args:
        pinned: page-lock host memory for copies to a GPU.
        shared: shared memory; its first `nbytes` are used instead of an allocation. Its owner closes it.
        of_device: the memory belongs to the budget of the device that computes, wherever `device` is.

    Attributes:
        is_on_host: the bytes are in host memory for now, see `move_to_host`.
    """

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        *,
        pinned: bool = False,
        shared: SharedHostMemory | None = None,
        of_device: bool = False,
    ) -> None:
        self.nbytes, self.of_device, self.is_on_host = nbytes, of_device, False
        self._device, self._is_shared = device, shared is not None
        self._allocated_bytes = 0
        _check_room(f"pool of {nbytes:,} bytes", nbytes, shared)
        self._data: torch.Tensor | None = _allocate(nbytes, device, prefault=False, shared=shared)
        self._unpin = pin(self._data) if pinned and device.type == "cpu" else None
        _open_pools.add(self)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """The next `nbytes` as a uint8 tensor with a storage of its own. Raises BudgetError: the pool is used up."""
        if self._data is None or self._allocated_bytes + nbytes > self.nbytes:
            raise BudgetError(
                f"pool of {self.nbytes:,} bytes: {nbytes:,} more do not fit after {self._allocated_bytes:,}"
            )
        begin = self._allocated_bytes
        self._allocated_bytes += nbytes
        return exact_alias(self._data[begin : begin + nbytes])

    @property
    def data(self) -> torch.Tensor | None:
        """uint8, all of it; None once closed."""
        return self._data

    @property
    def is_movable(self) -> bool:
        """True for memory in the device's budget that is neither shared nor closed."""
        return self.of_device and not self._is_shared and self._data is not None

    @property
    def unfaulted_data(self) -> torch.Tensor | None:
        """The host memory, if some of its pages may be missing: it is neither page-locked nor shared. Else None."""
        data = self._data
        if data is None or self._is_shared or self._unpin is not None or data.device.type != "cpu":
            return None
        return data

    def contains(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` (uint8, not empty) is a part of the pool."""
        data = self._data
        return (
            data is not None
            and tensor.numel() > 0
            and tensor.device == data.device
            and 0 <= tensor.data_ptr() - data.data_ptr() < data.numel()
        )

    def move_to_host(self, *, pinned: bool) -> Relocate:
        """Move all bytes to host memory. The device must not have work in flight that uses them.

        Returns a function: it maps a tensor from `allocate`, or a part of one, to the same bytes at their new place,
        and returns any other tensor unchanged. The old memory is freed once every such tensor is replaced and the
        function is dropped. Raises BudgetError: the host has no room; nothing has changed. Raises StateError: the
        memory is not `is_movable`. `pinned`: page-lock the host memory.
        """
        return self._move(torch.device("cpu"), pinned=pinned, to_host=True)

    def move_back(self) -> Relocate:
        """Move all bytes back to the pool's own device; as `move_to_host`.

        Raises torch.OutOfMemoryError: the device has no room; nothing has changed.
        """
        return self._move(self._device, pinned=False, to_host=False)

    def _move(self, device: torch.device, *, pinned: bool, to_host: bool) -> Relocate:
        old = self._data
        if old is None or not self.is_movable:
            raise StateError(f"pool of {self.nbytes:,} bytes: it cannot be moved, because it is closed or shared")
        new = _allocate(self.nbytes, device, prefault=False)
        unpin = pin(new) if pinned else None
        new.copy_(old)
        undo = self._unpin
        self._unpin = unpin
        self._data = new
        self.is_on_host = to_host
        if undo is not None:
            undo()

        def relocate(tensor: torch.Tensor) -> torch.Tensor:
            offset = tensor.data_ptr() - old.data_ptr()
            if not tensor.numel() or tensor.device != old.device or not 0 <= offset < old.numel():
                return tensor
            return exact_alias(new[offset : offset + tensor.numel()])

        return relocate

    def close(self) -> None:
        """Drop the allocation; it is freed with the last tensor over it. Idempotent."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:  # before the memory may be freed: another mapping may get its address at once
            unpin()
        self._data = None


class Ranges:
    """A set of addresses as disjoint ranges, in order; ranges that touch are one.

    A change looks at its surroundings only: a step adds thousands of ranges.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
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

    def within(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of [begin, end) that are in the set."""
        first, last = bisect_right(self._ends, begin), bisect_left(self._begins, end)
        return [(max(self._begins[i], begin), min(self._ends[i], end)) for i in range(first, last)]


class ExtentAllocator:
    """Free extents of an address range, and who waits for one. One owner, on one thread.

    Args:
        capacity_bytes: [0, capacity_bytes) may be allocated from the beginning; `offer` adds more.
        align_bytes: every extent is a multiple of it.
    """

    def __init__(self, capacity_bytes: int = 0, align_bytes: int = PAGE_BYTES) -> None:
        self._align_bytes = align_bytes
        self.capacity_bytes = capacity_bytes // align_bytes * align_bytes
        self._offered, self._free = Ranges(), Ranges()  # Free: offered and not allocated.
        self._begins: list[int] = []  # Of the allocated extents, in order.
        self._end_of: dict[int, int] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self.used_bytes = 0
        self.peak_bytes = 0
        self.offer(0, self.capacity_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that may be allocated now, over all free runs."""
        return sum(end - begin for begin, end in self._free)

    @property
    def largest_free_bytes(self) -> int:
        """Length of the longest free run."""
        return max((end - begin for begin, end in self._free), default=0)

    def offer(self, begin: int, end: int) -> None:
        """[begin, end) may be allocated from now on."""
        self._offered.add(begin, end)
        self._free.add(begin, end)
        for first in self._begins_in(begin, end):
            self._free.remove(first, self._end_of[first])

    def withdraw(self, begin: int, end: int) -> None:
        """[begin, end) cannot be allocated again; allocated parts of it stay so until they are freed."""
        self._offered.remove(begin, end)
        self._free.remove(begin, end)

    def is_allocated(self, begin: int, end: int) -> bool:
        """True while a part of [begin, end) is allocated."""
        return bool(self._begins_in(begin, end))

    def allocate(self, nbytes: int, *, lowest: bool = False) -> int | None:
        """Offset of a new extent of `nbytes` (rounded up to the alignment); None if no run fits.

        Best fit keeps holes of one size for blocks of that size. This suits a model of equal layers: the next layer
        exactly fills the hole of an evicted layer. `lowest`: take the first run that fits instead.
        """
        need = align_up(max(nbytes, 1), self._align_bytes)
        fits = ((begin, end) for begin, end in self._free if end - begin >= need)
        run = next(fits, None) if lowest else min(fits, key=lambda run: run[1] - run[0], default=None)
        if run is None:
            return None
        begin = run[0]
        self._free.remove(begin, begin + need)
        insort(self._begins, begin)
        self._end_of[begin] = begin + need
        self.used_bytes += need
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return begin

    def free(self, offset: int) -> None:
        """Free an extent, and wake all who wait; what was withdrawn meanwhile cannot be allocated again.

        Raises StateError: `offset` is not an allocated extent.
        """
        end = self._end_of.pop(offset, None)
        if end is None:
            raise StateError(f"free at offset {offset}: no extent starts there")
        del self._begins[bisect_left(self._begins, offset)]
        self.used_bytes -= end - offset
        for begin, stop in self._offered.within(offset, end):
            self._free.add(begin, stop)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_free(self) -> None:
        """Return after the next `free`. All who wait go on, in the order in which they came, and look again."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _begins_in(self, begin: int, end: int) -> list[int]:
        """Where the allocated extents begin that reach into [begin, end)."""
        first = last = bisect_left(self._begins, end)
        while first and self._end_of[self._begins[first - 1]] > begin:
            first -= 1
        return self._begins[first:last]


class BlockOwner(Protocol):
    """An object that allocates blocks."""

    def free_range(self, offset: int, nbytes: int, events: tuple[MaybeEvent, ...]) -> None:
        """Called by `Block.free`."""


class Block:
    """An allocated piece of a pool; call `free()` once no transfer uses it.

    Attributes:
        data: uint8, with a storage of exactly the requested length.
        events: they cover earlier uses of that memory on a device; new work on the device must wait for them.
    """

    def __init__(self, owner: BlockOwner, offset: int, data: torch.Tensor, events: tuple[MaybeEvent, ...] = ()) -> None:
        self._owner = owner
        self._offset = offset
        self.data = data
        self.events = events

    def view(self, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
        """`numel` elements of `dtype` starting `offset_bytes` into the block."""
        return self.data[offset_bytes : offset_bytes + numel * dtype.itemsize].view(dtype)

    def free(self, *events: MaybeEvent) -> None:
        """Return the block to its pool. Idempotent.

        `events`: they cover the last uses on a device; only device memory may be returned before they are complete.
        """
        if self._offset >= 0:
            self._owner.free_range(self._offset, self.data.numel(), events)
            self._offset = -1


class BlockPool:
    """One exact-size allocation, made at first use, faulted once, sub-allocated by extent and reused. One owner thread.

    Args:
        name: the purpose of the bytes; appears in errors.
        knob: the configuration key that makes the pool larger; appears in errors.
        pinned: page-lock host memory for copies to a GPU.
        register: registers host memory with the I/O engine and returns a function that undoes it. Only for a pool
            whose blocks the engine alone uses: children of fork find zeros in it.
        shared: shared memory, used from its first byte instead of an allocation. Its owner closes it.
    """

    def __init__(
        self,
        name: str,
        nbytes: int,
        knob: str,
        device: torch.device,
        *,
        pinned: bool = False,
        register: Callable[[torch.Tensor], Callable[[], None]] | None = None,
        shared: SharedHostMemory | None = None,
    ) -> None:
        self.name = name
        self._knob = knob
        self._device = device
        self._pinned = pinned
        self._register = register if device.type == "cpu" else None
        self._registrations = ExitStack()  # Of the memory with the device and the kernel; closed before it is freed.
        self._shared = shared
        self._extents = ExtentAllocator(align_up(nbytes, PAGE_BYTES))
        _check_room(f"the {name} pool", self._extents.capacity_bytes, shared)
        self._data: torch.Tensor | None = None
        self._closed = False
        # (first byte, end, event): freed, but in use by the device until the event.
        self._freed_in_use: list[tuple[int, int, Event]] = []

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._extents.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were allocated at once."""
        return self._extents.peak_bytes

    def try_allocate(self, nbytes: int) -> Block | None:
        """A block of exactly `nbytes`, or None when no free run is long enough."""
        if nbytes == 0:
            return Block(self, -1, torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self._closed:
            raise StateError(f"the {self.name} pool is closed")
        offset = self._extents.allocate(nbytes)
        if offset is None:
            return None
        try:
            data = exact_alias(self._memory()[offset : offset + nbytes])
            return Block(self, offset, data, self._events_of(offset, offset + nbytes))
        except BaseException:
            self._extents.free(offset)
            raise

    def allocate(self, nbytes: int, what: str) -> Block:
        """As `try_allocate`, but raises.

        Raises BudgetError: the block does not fit; the message names the free bytes and the knob.
        """
        block = self.try_allocate(nbytes)
        if block is None:
            raise BudgetError(
                f"{what}: needs {nbytes:,} contiguous bytes of the {self.name} pool; the largest free block has "
                f"{self._extents.largest_free_bytes:,} of {self._extents.free_bytes:,} free bytes and "
                f"{self.capacity_bytes:,} in total; raise {self._knob}"
            )
        return block

    async def allocate_async(self, nbytes: int, what: str) -> Block:
        """A block, as soon as enough others have been freed. For coroutines of one event loop.

        Allocate all that a job needs as one block: a job that has a block and waits for another can wait for itself.
        Raises BudgetError: nothing is allocated and the block still does not fit.
        """
        while (block := self.try_allocate(nbytes)) is None:
            if self.used_bytes == 0:
                return self.allocate(nbytes, what)
            await self._extents.wait_for_free()
        return block

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the pool itself has allocated now."""
        return 0 if self._data is None or self._shared is not None else self._data.numel()

    def free_memory(self) -> None:
        """Drop the allocation until `reserve_memory`, or the next block. The device must have no work with it.

        Raises StateError: a block is allocated.
        """
        if self.used_bytes:
            raise StateError(f"the {self.name} pool cannot be freed: {self.used_bytes:,} bytes are in use")
        if self.reserved_bytes:
            self._registrations.close()  # before the memory may be freed
            self._data, self._freed_in_use = None, []

    def reserve_memory(self) -> None:
        """Allocate now, and not at the next block."""
        self._memory()

    def _memory(self) -> torch.Tensor:
        """The allocation, made at first use: a pool that is planned but never needed costs nothing."""
        if self._data is None:
            self._data = _allocate(self._extents.capacity_bytes, self._device, shared=self._shared)
            unpin = pin(self._data) if self._pinned and self._device.type == "cpu" else None
            if unpin is not None:
                self._registrations.callback(unpin)
            if self._register is not None:
                wipe_on_fork(self._data)
                self._registrations.callback(self._register(self._data))
        return self._data

    def _events_of(self, begin: int, end: int) -> tuple[MaybeEvent, ...]:
        if not self._freed_in_use:
            return ()
        self._freed_in_use = [(first, last, event) for first, last, event in self._freed_in_use if not event.query()]
        return tuple(event for first, last, event in self._freed_in_use if first < end and begin < last)

    def free_range(self, offset: int, nbytes: int, events: tuple[MaybeEvent, ...]) -> None:
        self._freed_in_use += [(offset, offset + nbytes, event) for event in events if event is not None]
        self._extents.free(offset)

    def close(self) -> None:
        """Drop the allocation; it is freed with the last tensor over it. Idempotent."""
        self._closed = True
        self._registrations.close()  # before the memory may be freed
        self._data = None


def _check_room(what: str, nbytes: int, shared: SharedHostMemory | None) -> None:
    if shared is not None and nbytes > shared.nbytes:
        raise BudgetError(f"{what}: {nbytes:,} bytes do not fit the shared memory of {shared.nbytes:,} ({shared.what})")


@torch.inference_mode(False)
def _allocate(
    nbytes: int, device: torch.device, *, prefault: bool = True, shared: SharedHostMemory | None = None
) -> torch.Tensor:
    if shared is not None:
        if device.type != "cpu":
            raise StateError(f"{shared.what}: shared memory is host memory, not on {device}")
        return shared.data[:nbytes]
    if device.type == "cpu":
        return (
            tensor_over(map_host(nbytes, prefault=prefault))[:nbytes]
            if nbytes
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
    data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    # Other streams use this memory at once: work of its earlier owners, and the zeroing, must have finished.
    synchronize(device)
    return data
