"""Makes ranges of tiered arrays addressable for a short time: in place, or in leased memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

import torch

from offload.array.copies import blocks_around
from offload.array.tiered_array import TieredArray, await_all
from offload.errors import StateError
from offload.memory.host_memory import aligned_copy
from offload.memory.pool import Block
from offload.sizes import PAGE_BYTES, align_up
from offload.streams import Streams
from zero.params.layout import Layout, SubGroup, Unit
from zero.plan.sub_group_state import StateFormat, SubGroupState
from zero.store.storage import Storage


class StagedRange:
    """One range of a tiered array during an update.

    If the range is in memory of the compute device, it is used in place. Otherwise it passes through leased host
    memory, and if the computation runs on a GPU, through leased device memory too.

    Args:
        pages: the bytes of the range that are staged, as runs of whole pages; None: all. Only of an optimizer state in
            the swap space, for `read`, `part` and `write`.
        caller_memory: the caller's memory that the range may pass through instead, uint8; used if the computation can
            address it and the range is not in place.
    """

    def __init__(
        self,
        array: TieredArray,
        begin: int,
        end: int,
        compute: torch.device,
        streams: Streams,
        caller_memory: torch.Tensor | None = None,
        pages: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.array = array
        self.begin = begin
        self.end = end
        self._streams = streams
        self._memory = array.memory(begin, end)
        self._pages = pages
        nbytes = array.nbytes(begin, end) if pages is None else sum(hi - lo for lo, hi in pages)
        if not nbytes:  # an optimizer without states: nothing has to move, on any tier
            self._memory = torch.empty(0, dtype=torch.uint8, device=compute)
        self.in_place = self._memory is not None and self._memory.device == compute
        self._data = self._memory if self.in_place else None
        self._host: torch.Tensor | None = None
        self.uses_caller_memory = not self.in_place and caller_memory is not None and streams.has_unified_memory
        """The range passes through the caller's memory."""
        if self.uses_caller_memory:
            self._host = self._data = caller_memory
        self.has_memory_home = not self.in_place and self._memory is not None
        """The range's home is in memory, but not the compute device's: `write` copies it there and cannot fail."""
        on_host = compute.type == "cpu"
        passes = not self.in_place and not self.uses_caller_memory
        self.host_nbytes = nbytes if passes and (self._memory is None or on_host) else 0
        """Bytes of host memory that `set_buffers` needs."""
        self.device_nbytes = nbytes if passes and not on_host else 0
        """Bytes of the compute device's memory that `set_buffers` needs, if that is not the host's."""

    def set_buffers(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Pass through these buffers, of `host_nbytes` and `device_nbytes`."""
        if self.host_nbytes:
            self._host = self._data = host
        if self.device_nbytes:
            self._data = device

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 on the compute device: the range's bytes. Raises StateError: neither in place nor staged."""
        if self._data is None:
            raise StateError(f"{self.array.name}: range [{self.begin}, {self.end}) is not staged")
        return self._data

    def part(self, first: int, nbytes: int) -> torch.Tensor:
        """uint8 on the compute device: `nbytes` of the range from byte `first` on, which are staged."""
        if self._pages is None:
            return self.bytes[first : first + nbytes]
        at, data = next((at, data) for at, data in self._page_runs() if at <= first < at + data.numel())
        return data[first - at : first - at + nbytes]

    def _page_runs(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first byte in the range, memory) of each run of pages."""
        position = 0
        for lo, hi in self._pages or ():
            yield lo, self.bytes[position : position + hi - lo]
            position += hi - lo

    async def read(self) -> None:
        """Read the range, unless it is in place. On a GPU it is there for work that the I/O loop queues from now on."""
        if self.in_place:
            return
        if self._pages is not None:
            await await_all([self.array.read_part(self.begin, self.end, at, data) for at, data in self._page_runs()])
        elif self._host is not None:
            await self.array.read(self.begin, self.end, self._host)
        source = self._host if self._host is not None else self._memory
        if source is not None and source is not self._data:
            self._streams.wait_events(self._streams.copy_to_device(self.bytes, source, self._streams.record_event()))

    async def write(self) -> None:
        """Write the range back, unless it is in place."""
        if self._pages is not None:
            await await_all([self.array.write_part(self.begin, self.end, at, data) for at, data in self._page_runs()])
        elif not self.in_place:
            await self.array.write(self.begin, self.end, await self._copy_to_host())

    async def write_or_strand(self) -> None:
        """As `write`; if that fails, the array keeps a copy of the bytes until a later write succeeds.

        To strand bytes is to keep them in memory in this way. The copy is not in leased memory: a checkpoint in
        progress may wait for that, and an update for the checkpoint.
        """
        try:
            await self.write()
        except BaseException:
            self.array.keep_failed_write(self.begin, self.end, aligned_copy(self.host_bytes))
            raise

    async def write_front(self, nbytes: int) -> None:
        """As `write`, for the first `nbytes` only, whole pages; what follows is already correct in its home."""
        if not self.in_place and nbytes:
            await self.array.write_front(self.begin, self.end, (await self._copy_to_host())[:nbytes])

    async def _copy_to_host(self) -> torch.Tensor:
        if self._host is not None and self._host is not self._data:
            await self._streams.synchronize(
                self._streams.copy_to_host(self._host, self.bytes, self._streams.record_event())
            )
        return self.host_bytes

    @property
    def host_bytes(self) -> torch.Tensor:
        """The bytes that `write` writes to the array: in host memory if the home is in the swap space."""
        return self._host if self._host is not None else self.bytes


class StagingBlocks:
    """Host and device memory that some ranges pass through. Used on the I/O loop; made by `lease`.

    Device work with it runs on the I/O loop's stream, or is a copy that is queued after that stream and that the stream
    waits for. So the device memory may be leased again at once.
    """

    def __init__(self, host: Block, device: Block, streams: Streams) -> None:
        self._host, self._device, self._streams = host, device, streams

    @staticmethod
    async def lease(
        storage: Storage, parts: Sequence[StagedRange], what: str, host_block: Block | None = None
    ) -> StagingBlocks:
        """Lease the memory that `parts` need, as soon as it is free, and stage them.

        Args:
            storage: the owner of the memory.
            parts: ranges that pass through it.
            what: appears in errors.
            host_block: host memory to use instead of the host pool's, of the length that they need; `free` frees it.
        """
        host_bytes = sum(part.host_nbytes for part in parts)
        device_bytes = sum(align_up(part.device_nbytes, PAGE_BYTES) for part in parts)
        host = host_block or await storage.host_pool.allocate_async(host_bytes, what)
        try:  # after the host's memory: a lease of device memory must never wait for host memory
            device = await storage.update_pool.allocate_async(device_bytes, what)
        except BaseException:
            host.free()
            raise
        at_host = at_device = 0
        for part in parts:
            part.set_buffers(
                host.data[at_host : at_host + part.host_nbytes],
                device.data[at_device : at_device + part.device_nbytes],
            )
            at_host += part.host_nbytes
            at_device += align_up(part.device_nbytes, PAGE_BYTES)
        return StagingBlocks(host, device, storage.streams)

    def free(self) -> None:
        """Free the memory; host memory becomes free when the device has finished with it. Idempotent."""
        self._device.free()
        if self._host.data.numel():
            self._streams.free_after(self._host, self._streams.record_event())


class StagedSubGroup:
    """A sub-group made addressable for a short time: its optimizer state, its weights, and its gradients if requested.

    `lease` memory, `read` the stored values, work on `state_view()` and the bytes of the parts, write them, and `free`.
    Raises StateError: its address space is not trained.

    Args:
        storage: the storage of the sub-group.
        layout: of the storage.
        group: of an address space that is trained.
        units: units whose weights are staged; None: all that have weights in the sub-group.
        caller_memory: unit index -> the caller's memory that its weights may pass through; see `StagedRange`.
        gradients: unit -> the array of its gradient; None: stage no gradients.
        part: coordinates of the sub-group: only the blocks of the state that have them are staged, in host memory, and
            no weights; None: the whole state.

    Attributes:
        space: of the sub-group.
        begin, end: coordinates of the staged state.
        state: the staged optimizer state.
        weights, gradients: by the index of the unit.
    """

    def __init__(
        self,
        storage: Storage,
        layout: Layout,
        group: SubGroup,
        units: Iterable[Unit] | None = None,
        caller_memory: Mapping[int, torch.Tensor] | None = None,
        gradients: Callable[[Unit], TieredArray] | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        self._storage, self.group, self.space = storage, group, layout.spaces[group.space]
        states, weights = storage.state_arrays[group.space], storage.weights[group.space]
        if states is None:
            raise StateError(f"{group.name}: its parameters are not trained, so it has no optimizer state")
        self.units = [] if part else list(layout.units_in(group) if units is None else units)
        compute, streams, caller_memory = storage.update_device(group), storage.streams, caller_memory or {}

        def range_of(unit: Unit, array: TieredArray, memory: torch.Tensor | None = None) -> StagedRange:
            return StagedRange(array, *group.range_in(unit), compute, streams, memory)

        self.begin, self.end = group.begin, group.end
        if part is None:
            self.state = StagedRange(states, group.begin, group.end, compute, streams)
        else:
            self.begin, self.end = blocks_around(*part)
            pages = _pages_of(self._byte_ranges())
            self.state = StagedRange(states, group.begin, group.end, torch.device("cpu"), streams, pages=pages)
        self.weights = {unit.index: range_of(unit, weights, caller_memory.get(unit.index)) for unit in self.units}
        self.gradients = {unit.index: range_of(unit, gradients(unit)) for unit in self.units} if gradients else {}
        self._staging: StagingBlocks | None = None

    @staticmethod
    def part_of_state(
        storage: Storage, layout: Layout, group: SubGroup, begin: int, end: int, *, to_write: bool
    ) -> StagedSubGroup | None:
        """Stages coordinates [begin, end) of the optimizer state; None if that cannot be, or does not save half."""
        array = storage.state_arrays[group.space]
        if array is None or not array.swap_bytes(group.begin, group.end):
            return None
        if to_write and not array.can_write_part(group.begin, group.end):
            return None
        staged = StagedSubGroup(storage, layout, group, part=(begin, end))
        return staged if 2 * staged.host_nbytes <= array.nbytes(group.begin, group.end) else None

    @property
    def is_part(self) -> bool:
        """True if only a part of the state is staged, and no weights."""
        return (self.begin, self.end) != (self.group.begin, self.group.end)

    @property
    def parts(self) -> list[StagedRange]:
        """All staged ranges."""
        return [self.state, *self.weights.values(), *self.gradients.values()]

    @property
    def in_place(self) -> bool:
        """True if all ranges are in place, so that nothing passes through leased memory."""
        return all(part.in_place for part in self.parts)

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory that the sub-group passes through."""
        return sum(part.host_nbytes for part in self.parts)

    async def lease(self, what: str, host_block: Block | None = None) -> None:
        """Lease the memory that it passes through, if any; see `StagingBlocks.lease`."""
        if any(part.host_nbytes or part.device_nbytes for part in self.parts):
            self._staging = await StagingBlocks.lease(self._storage, self.parts, what, host_block)

    async def read(self) -> None:
        """Read the stored values. Raises StorageError."""
        await await_all([part.read() for part in self.parts if not part.in_place])

    async def stage(self, what: str) -> None:
        """`lease` memory and `read`; then the values can be used on all streams. Raises StorageError: it is freed."""
        streams = self._storage.streams
        await self.lease(what)
        try:
            await self.read()
            await streams.synchronize(streams.record_event())
        except BaseException:
            self.free()
            raise

    @asynccontextmanager
    async def open(self, what: str) -> AsyncIterator[None]:
        """Inside, the values are here for work of the I/O loop. Raises StorageError."""
        await self.lease(what)
        try:
            await self.read()
            yield
        finally:
            self.free()

    def state_view(self, step: int = 0) -> SubGroupState:
        """The optimizer state from `begin` to `end`; `step` matters only if the caller updates it."""
        parts = [self.state.part(first, nbytes) for first, nbytes in self._byte_ranges()]
        return self._format.from_parts(parts, self.begin, step)

    @property
    def _format(self) -> StateFormat:
        return self._storage.plan.state_format(self.space)

    def _byte_ranges(self) -> list[tuple[int, int]]:
        """(first byte, bytes) of each part of the state."""
        first, last = self.begin - self.group.begin, self.end - self.group.begin
        return self._format.byte_ranges(self.group.end - self.group.begin, first, last)

    async def compute(self, work: Callable[[], None]) -> None:
        """Run `work` where the sub-group is addressable; on a device this only queues it."""
        if self._storage.update_device(self.group).type == "cpu":
            await self._storage.streams.compute_on_host(work)
        else:
            work()

    def free(self) -> None:
        """Free the memory. Idempotent."""
        if self._staging is not None:
            self._staging.free()


def _pages_of(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """[begin, end) of whole pages around runs of bytes in order; each page once, because both would write it."""
    pages: list[tuple[int, int]] = []
    for first, nbytes in runs:
        lo, hi = first // PAGE_BYTES * PAGE_BYTES, align_up(first + nbytes, PAGE_BYTES)
        if pages and lo <= pages[-1][1]:
            pages[-1] = pages[-1][0], max(hi, pages[-1][1])
        else:
            pages.append((lo, hi))
    return pages
