"""A part of a sub-group's optimizer state, read or rewritten alone: for callers that want one parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from offload.errors import StateError
from offload.memory.pool import Block
from offload.planes.tiered_array import await_all
from offload.sizes import BLOCK_NUMEL, PAGE_BYTES, align_up
from zero.params.layout import Layout, SubGroup
from zero.plan.sub_group_state import SubGroupState
from zero.store.staging import StagedSubGroup
from zero.store.storage import Storage


class StateRange:
    """The blocks of an optimizer state in the swap space that have coordinates [begin, end) of its sub-group.

    As with `StagedSubGroup`: `lease` memory, which is the host's, `read`, work on `state_view()`, write it, and `free`.
    Raises StateError: its address space is not trained.

    Attributes:
        begin, end: coordinates of the blocks.
        nbytes: bytes that are read, and written; whole pages.
    """

    def __init__(self, storage: Storage, layout: Layout, group: SubGroup, begin: int, end: int) -> None:
        array = storage.state_arrays[group.space]
        if array is None:
            raise StateError(f"{group.name}: its parameters are not trained, so it has no optimizer state")
        self._storage, self._array, self._group = storage, array, group
        first = (begin - group.begin) // BLOCK_NUMEL * BLOCK_NUMEL
        last = min(align_up(end - group.begin, BLOCK_NUMEL), group.end - group.begin)
        self.begin, self.end = group.begin + first, group.begin + last
        self._format = storage.plan.state_format(layout.spaces[group.space])
        self._runs = self._format.byte_ranges(group.end - group.begin, first, last)
        self._pages = _pages_of(self._runs)
        self.nbytes = sum(hi - lo for lo, hi in self._pages)
        self._block: Block | None = None

    async def lease(self, what: str) -> None:
        """Lease its memory as soon as it is free; `what` appears in errors."""
        self._block = await self._storage.host_pool.allocate_async(self.nbytes, what)

    async def read(self) -> None:
        """Read the stored values. Raises StorageError."""
        array, group = self._array, self._group
        await await_all([array.read_part(group.begin, group.end, at, data) for at, data in self._staged_pages()])

    async def write_state(self) -> None:
        """Write the values back. Raises StorageError."""
        array, group = self._array, self._group
        await await_all([array.write_part(group.begin, group.end, at, data) for at, data in self._staged_pages()])

    def state_view(self) -> SubGroupState:
        """The state of the blocks, in the memory of this object."""
        staged = list(self._staged_pages())

        def part(first: int, nbytes: int) -> torch.Tensor:
            at, data = next((at, data) for at, data in staged if at <= first < at + data.numel())
            return data[first - at : first - at + nbytes]

        return self._format.from_parts([part(*run) for run in self._runs], self.begin)

    def free(self) -> None:
        """Free the memory. Idempotent."""
        block, self._block = self._block, None
        if block is not None:
            block.free()

    def _staged_pages(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first byte in the state, memory) of each run of pages. Raises StateError: the memory is not leased."""
        if self._block is None:
            raise StateError(f"{self._group.name}: [{self.begin:,}, {self.end:,}) of its optimizer state is not staged")
        position = 0
        for lo, hi in self._pages:
            yield lo, self._block.data[position : position + hi - lo]
            position += hi - lo


def stage_state(storage: Storage, layout: Layout, group: SubGroup, begin: int, end: int) -> StateRange | StagedSubGroup:
    """The optimizer state of a sub-group, or at least of coordinates [begin, end), to read or write; not leased yet."""
    array = storage.state_arrays[group.space]
    can_write_part = array is not None and array.can_write_part(group.begin, group.end)
    state_range = state_range_of(storage, layout, group, begin, end) if can_write_part else None
    return StagedSubGroup(storage, layout, group, units=()) if state_range is None else state_range


def state_range_of(storage: Storage, layout: Layout, group: SubGroup, begin: int, end: int) -> StateRange | None:
    """Coordinates [begin, end) of an optimizer state, to read alone; None if that does not save half of the bytes."""
    array = storage.state_arrays[group.space]
    if array is None or not array.swap_bytes(group.begin, group.end):
        return None
    state_range = StateRange(storage, layout, group, begin, end)
    return state_range if 2 * state_range.nbytes <= array.nbytes(group.begin, group.end) else None


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
