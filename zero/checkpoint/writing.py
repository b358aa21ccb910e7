"""Brings what the planes hold into a checkpoint's data file, run by run, with a few blocks of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import torch

from offload import kernels
from offload.arena import Arena, Block
from offload.containers import Place, Run
from offload.copies import copy_alone, read_plane
from offload.errors import StateError
from offload.planes import Plane, settle_all
from zero.checkpoint.extents import RUN_BYTES, STATE, Extent, Part, block_bounds
from zero.params.layout import Layout, Unit
from zero.record import Record
from zero.storage import Storage
from zero.stored_values import StagedGroup, stage_group

BLOCKS = 4
"""Runs in memory at once."""
EXTENTS_AT_ONCE = 2
"""While one is written the next is read."""


class ExtentWriter:
    """Encodes extents, in any order; everything on the loop of the storage's mover.

    Args:
        layout: of the planes.
        storage: which holds them.
        store: called with (offset in the file, bytes) of each run; they are free when it returns.
        register: see `Arena`.

    Attributes:
        checksums: payload's offset in the file -> (bytes, CRC-32C), of what has been encoded.
    """

    def __init__(
        self,
        layout: Layout,
        storage: Storage,
        store: Callable[[int, torch.Tensor], Awaitable[None]],
        register: Callable[[torch.Tensor], Callable[[], None]] | None = None,
    ) -> None:
        self._layout, self._storage, self._store_bytes = layout, storage, store
        self._arena = Arena(
            "checkpoint", BLOCKS * RUN_BYTES, "nothing: it is fixed", torch.device("cpu"), register=register
        )
        self.checksums: dict[int, tuple[int, int]] = {}
        self.stopped = False
        """`write_all` begins no further extent."""

    async def write_all(self, extents: Iterable[Extent]) -> None:
        """Write extents as the planes are now. Raises StorageError."""
        waiting = iter(extents)

        async def take_turns() -> None:
            for extent in waiting:
                if self.stopped:
                    return
                await self.write(extent)

        await settle_all([asyncio.ensure_future(take_turns()) for _ in range(EXTENTS_AT_ONCE)])

    async def write(self, extent: Extent) -> None:
        """Write one extent as the planes are now. Raises StorageError."""
        await settle_all(await self.encode(extent))

    async def encode(self, extent: Extent) -> list[asyncio.Task[None]]:
        """Take one extent as the planes are now, which may change once this returns.

        Returns:
            What stores it, under way; each may raise StorageError.

        Raises:
            StorageError: a read failed.
        """
        if extent.group is None:
            return await self._encode_runs(extent, None)
        staged = await stage_group(self._storage, self._layout, extent.group)
        try:
            return await self._encode_runs(extent, staged)
        finally:
            staged.release()

    def close(self) -> None:
        """Give the memory back."""
        self._arena.close()

    async def _encode_runs(self, extent: Extent, staged: StagedGroup | None) -> list[asyncio.Task[None]]:
        stores: list[asyncio.Task[None]] = []
        try:
            for run in extent.runs:
                block = await self._lease(run.nbytes)
                try:
                    for place in run.places:
                        await self._fill(place.item, place.payload_in(block.data), staged)
                        self._sum(run, place, block.data)
                    run.clear_gaps(block.data)
                except BaseException:
                    block.release()
                    raise
                stores.append(asyncio.create_task(self._store(run, block)))
                await asyncio.sleep(0)  # it starts now, while the next run is made
        except BaseException:
            await asyncio.gather(*stores, return_exceptions=True)
            raise
        return stores

    async def _lease(self, nbytes: int) -> Block:
        if nbytes <= RUN_BYTES:
            return await self._arena.lease_when_free(nbytes, "checkpoint")
        # One box, of a user's state say, that is larger than all others may be.
        return Arena("checkpoint", nbytes, "nothing: it is as large as the state", torch.device("cpu")).lease(
            nbytes, ""
        )

    def _sum(self, run: Run[Any], place: Place[Any], memory: torch.Tensor) -> None:
        payload = memory[place.payload : place.payload + place.nbytes]
        self.checksums[run.offset + place.payload] = (place.nbytes, kernels.crc32c(payload))

    async def _store(self, run: Run[Any], block: Block) -> None:
        try:
            await self._store_bytes(run.offset, block.data)
        finally:
            block.release()

    async def _fill(self, part: Part, target: torch.Tensor, staged: StagedGroup | None) -> None:
        """Put the values of one box into `target` (uint8, of the host)."""
        lo, hi = part.coordinate, part.coordinate + part.box.numel
        if lo == hi:
            return
        if isinstance(part.values, torch.Tensor):
            copy_alone(target, part.values[lo:hi].view(torch.uint8))
            return
        if part.unit is None:
            raise StateError(f"{part.name}: nobody knows where its values are")
        if staged is None:
            plane = part.values or self._storage.weights[self._layout.space_of(part.unit)]
            await self._fill_stored(plane, part.unit, lo, hi, target)
            return
        begin = staged.group.begin
        if part.kind == STATE:
            _fill_state(staged.record, part.state, lo - begin, hi - begin, target.view(part.dtype))
            return
        weight = staged.weights[part.unit.index]
        stored = weight.bytes.view(part.unit.dtype)[lo - weight.begin : hi - weight.begin]
        _fill_master(stored, staged.record.remainder, lo - begin, target.view(part.dtype))

    async def _fill_stored(self, plane: Plane, unit: Unit, lo: int, hi: int, target: torch.Tensor) -> None:
        """What a plane holds, as it is."""
        memory = plane.memory(lo, hi)
        if memory is not None:
            copy_alone(target, memory)
            return
        begin, end = block_bounds(lo, hi, unit.end)
        whole = torch.empty(plane.nbytes(begin, end), dtype=torch.uint8, device="cpu")
        await read_plane(plane, begin, end, whole, self._storage.arena)
        copy_alone(target, whole[plane.nbytes(begin, lo) : plane.nbytes(begin, hi)])


def _fill_master(weight: torch.Tensor, remainder: torch.Tensor | None, first: int, target: torch.Tensor) -> None:
    """The fp32 values of which `weight` and the remainder from element `first` on are the parts."""
    if remainder is None:
        copy_alone(target, weight)
        return
    part = remainder[first : first + weight.numel()]
    joined = target if weight.device.type == "cpu" else torch.empty_like(target, device=weight.device)
    kernels.join(joined, weight, part)
    if joined is not target:
        target.copy_(joined)


def _fill_state(record: Record, which: int, begin: int, end: int, target: torch.Tensor) -> None:
    """Elements [begin, end) of one of the record's state planes, in fp32."""
    planes = record.states.planes
    if planes:
        copy_alone(target, planes[which][begin:end])
    else:
        target.copy_(record.states.load(begin, end)[which])
