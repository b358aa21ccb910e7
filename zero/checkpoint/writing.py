"""Brings what the planes hold into a checkpoint's data file, run by run, with a few blocks of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import torch

from offload.errors import StateError
from offload.files.containers import Run
from offload.kernels import kernels, masters
from offload.memory.arena import Arena, Block
from offload.planes.copies import copy_alone, read_plane
from offload.planes.planes import Plane, settle_all
from offload.system.worker import Worker
from zero.checkpoint.extents import RUN_BYTES, STATE, Extent, Part, block_bounds
from zero.params.layout import Layout, Unit
from zero.plan.record import Record
from zero.store.storage import Storage
from zero.store.stored_values import StagedGroup, stage_group

BLOCKS = 8
"""Runs in memory at once."""
EXTENTS_AT_ONCE = 4
"""While some are written the next are read and encoded: fewer leave the disk without work."""
ENCODERS = 2
"""Threads. One encodes 5 GB/s; a disk that takes as much would wait for it."""


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
        self._encoders = Worker("zero-checkpoint-encoder", ENCODERS)
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
        """Give memory and threads back."""
        self._encoders.close()
        self._arena.close()

    async def _encode_runs(self, extent: Extent, staged: StagedGroup | None) -> list[asyncio.Task[None]]:
        stores: list[asyncio.Task[None]] = []
        try:
            for run in extent.runs:
                block = await self._lease(run.nbytes)
                try:
                    await self._make(run, block.data, staged)
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

    async def _make(self, run: Run[Part], memory: torch.Tensor, staged: StagedGroup | None) -> None:
        """Put a run into `memory`; what only computes is done on a thread of its own."""
        fillings = [await self._filling(place.item, place.payload_in(memory), staged) for place in run.places]

        def encode() -> None:
            for place, fill in zip(run.places, fillings, strict=True):
                fill()
                payload = memory[place.payload : place.payload + place.nbytes]
                self.checksums[run.offset + place.payload] = (place.nbytes, kernels.crc32c(payload))
            run.clear_gaps(memory)

        if self._storage.streams.shared:
            await self._encoders.run(encode)
        else:  # a device's work is ordered by the stream that this thread has
            encode()

    async def _store(self, run: Run[Part], block: Block) -> None:
        try:
            await self._store_bytes(run.offset, block.data)
        finally:
            block.release()

    async def _filling(self, part: Part, target: torch.Tensor, staged: StagedGroup | None) -> Callable[[], None]:
        """What puts the values of one box into `target` (uint8, of the host); they are in memory when this returns."""
        lo, hi = part.coordinate, part.coordinate + part.box.numel
        if lo == hi:
            return lambda: None
        if isinstance(part.values, torch.Tensor):
            return partial(copy_alone, target, part.values[lo:hi].view(torch.uint8))
        if part.unit is None:
            raise StateError(f"{part.name}: nobody knows where its values are")
        if staged is None:
            plane = part.values or self._storage.weights[self._layout.space_of(part.unit)]
            return partial(copy_alone, target, await self._stored(plane, part.unit, lo, hi))
        begin, values = staged.group.begin, target.view(part.dtype)
        if part.kind == STATE:
            return partial(_fill_state, staged.record, part.state, lo - begin, hi - begin, values)
        weight = staged.weights[part.unit.index]
        stored = weight.bytes.view(part.unit.dtype)[lo - weight.begin : hi - weight.begin]
        return partial(_fill_master, stored, staged.record.remainder, lo - begin, values)

    async def _stored(self, plane: Plane, unit: Unit, lo: int, hi: int) -> torch.Tensor:
        """What a plane holds, as it is."""
        memory = plane.memory(lo, hi)
        if memory is not None:
            return memory
        begin, end = block_bounds(lo, hi, unit.end)
        whole = torch.empty(plane.nbytes(begin, end), dtype=torch.uint8, device="cpu")
        await read_plane(plane, begin, end, whole, self._storage.arena)
        return whole[plane.nbytes(begin, lo) : plane.nbytes(begin, hi)]


def _fill_master(weight: torch.Tensor, remainder: torch.Tensor | None, first: int, target: torch.Tensor) -> None:
    """The fp32 values of which `weight` and the remainder from element `first` on are the parts."""
    part = None if remainder is None else remainder[first : first + weight.numel()]
    if part is None or part.dtype == torch.float32:
        copy_alone(target, weight if part is None else part)
        return
    joined = target if weight.device.type == "cpu" else torch.empty_like(target, device=weight.device)
    masters.whole(joined, weight, part)
    if joined is not target:
        target.copy_(joined)


def _fill_state(record: Record, which: int, begin: int, end: int, target: torch.Tensor) -> None:
    """Elements [begin, end) of one of the record's state planes, in fp32."""
    planes = record.states.planes
    if planes:
        copy_alone(target, planes[which][begin:end])
    else:
        target.copy_(record.states.load(begin, end)[which])
