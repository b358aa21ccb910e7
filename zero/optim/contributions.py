"""Stores one contribution to a unit's gradient: from the buffer that autograd filled to its home.

If the buffer's device can address the home, the contribution is stored there at once. From a GPU to the host it is
copied while the device computes; the block sums are made on the device. If the disk can take it unchanged, it is
written from its buffer. All others that are bound for the disk, and those that must be added to earlier contributions
on the host, pass through chunks of the host pool on the I/O loop. Gradients are added up in fp32 or, if
`grad_accum_dtype` says so, in their own 16 bits: then each sum is made in fp32 and rounded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch

from offload.array.copies import device_chunk_bytes
from offload.array.tiered_array import TieredArray, await_all
from offload.errors import StorageError
from offload.io.io_loop import IoFuture
from offload.kernels import kernels
from offload.kernels.square_sums import rows_of
from offload.memory.host_memory import aligned_copy
from offload.memory.pool import Block
from offload.sizes import BLOCK_NUMEL
from offload.streams import MaybeEvent
from zero.params.layout import Slot, Unit
from zero.plan.sizes import SUM_CHUNK_BYTES, WIDE_CHUNK_NUMEL
from zero.store.storage import Storage

CHUNK_NUMEL = 256 * 1024  # Elements handled at a time; a multiple of the block.
# Elements written at a time directly from the buffer: several requests of the drive, so that its queue stays full.
PIECE_NUMEL = 4 * 1024 * 1024
CHUNKS_IN_FLIGHT = 4  # One is copied while another is added up, and the disk reads and writes two more.


@dataclass(slots=True)
class Contribution:
    """Gradients that have arrived for one unit. After a failure, storing continues where it stopped."""

    unit: Unit
    array: TieredArray
    dtype: torch.dtype  # The dtype in which the array holds this unit's gradient.
    # The flat gradient, unit.numel elements of unit.dtype or of `dtype`; garbage where none has arrived.
    buffer: torch.Tensor
    slots: list[Slot]
    adds: list[bool]  # Per slot in `slots`: is it added to an earlier contribution?
    is_first: bool  # The array holds nothing for this step yet.
    sums: torch.Tensor  # Block sums, in host memory; rewritten wherever the gradient changes.
    has_device_sums: bool = False  # The device has made the sums, and they are being copied to the host.
    event: MaybeEvent = None  # After the work that filled the buffer.
    block: Block | None = None  # The leased memory of the buffer.
    # First elements of the chunks that are still to be stored; None: storing has not begun.
    remaining_chunks: set[int] | None = None
    future: IoFuture[None] | None = None  # The running attempt; None after a failure.

    @property
    def is_done(self) -> bool:
        return self.remaining_chunks is not None and not self.remaining_chunks


class ContributionStore:
    """Stores contributions in their homes. `threads`: of the CPU kernels."""

    def __init__(self, storage: Storage, threads: int) -> None:
        self._storage, self._streams, self._threads = storage, storage.streams, threads

    def can_address(self, memory: torch.Tensor | None, buffer: torch.Tensor) -> bool:
        """True if kernels on the buffer's device can write to `memory`."""
        if memory is None or memory.device != buffer.device:
            return False
        return self._streams.has_unified_memory or memory.device.type != "cpu"

    def store_in_memory(self, item: Contribution, home: torch.Tensor, sums: torch.Tensor) -> None:
        """Store the full contribution in addressable memory, and its sums in `sums` on the same device."""
        stored = home.view(item.dtype)
        if item.block is None:  # it was collected in its home
            zero_gaps(stored, item.unit, item.slots, 0)
            kernels.block_sumsq(stored, sums, threads=self._threads)
        else:
            self._store_run(item, stored, item.buffer, 0, sums)

    def copy_to_host(self, item: Contribution, home: torch.Tensor, sums: torch.Tensor) -> MaybeEvent:
        """Queue the copy of a first contribution from the device to `home`, which is pinned host memory.

        Returns at once: an event after the copies.

        Args:
            item: the first of its step.
            home: the array's memory.
            sums: on the device, as long as item.sums.
        """
        unit, stored = item.unit, home.view(item.dtype)
        zero_gaps(item.buffer, unit, item.slots, 0)
        if item.dtype == item.buffer.dtype:
            kernels.block_sumsq(item.buffer, sums)
            self._streams.copy_to_host(stored, item.buffer, self._streams.record_event())
        else:
            self._widen_to_host(item, stored, sums)
        # After the copy above, which waits for the kernel of the sums.
        return self._streams.copy_to_host(item.sums, sums)

    def sum_on_device(self, item: Contribution, sums: torch.Tensor) -> None:
        """Make the sums of a first contribution on the device, so that `store` need not compute them on the host."""
        if item.is_first and item.dtype == item.buffer.dtype:
            zero_gaps(item.buffer, item.unit, item.slots, 0)
            kernels.block_sumsq(item.buffer, sums)
            self._streams.copy_to_host(item.sums, sums, self._streams.record_event())
            item.has_device_sums = True

    def _widen_to_host(self, item: Contribution, stored: torch.Tensor, sums: torch.Tensor) -> None:
        """Cast and sum on the device, chunk by chunk, among the copies to the host: the model's work goes on."""
        streams, unit, pool, width = self._streams, item.unit, self._storage.gradient_pool, item.dtype.itemsize
        numel = min(WIDE_CHUNK_NUMEL, unit.numel)
        while (block := pool.try_allocate(numel * width)) is None and numel > BLOCK_NUMEL:
            numel = max(numel // 2 // BLOCK_NUMEL, 1) * BLOCK_NUMEL  # other units' gradients may lie in between
        block = block or pool.allocate(numel * width, f"gradient of {unit.name}")
        copy_event: MaybeEvent = None
        with streams.copy_to_host_stream(streams.record_event(), *block.events):
            for lo in range(0, unit.numel, numel):
                hi = min(lo + numel, unit.numel)
                streams.wait_events(copy_event)  # the chunk before is copied; a device's stream has this order anyway
                wide = block.view(item.dtype, hi - lo)
                kernels.cast_sumsq(wide, item.buffer[lo:hi], into=rows_of(sums, lo, hi))
                copy_event = streams.copy_to_host(stored[lo:hi], wide)
        block.free(copy_event)

    async def store(self, item: Contribution) -> None:
        """Store the remaining chunks, or add them: through the host pool, or from the buffer if the disk can take it.

        If the old values of a chunk cannot be read, the chunk is untouched, and the next attempt continues there. If a
        chunk cannot be written, it is complete in memory: the array keeps a copy until the write succeeds. If the
        device is still copying to the same place, that copy arrives before the chunk: copies to the host are ordered.

        Raises StorageError: the error of the first chunk that failed.
        """
        writes_directly = self._can_write_directly(item)
        store_part = self._write_piece if writes_directly else self._store_chunk
        run, width_bytes = (item.unit.begin, item.unit.end), item.buffer.element_size()
        numel = PIECE_NUMEL if writes_directly else self._chunk_numel(item.array.memory(*run), item.dtype, width_bytes)
        if item.remaining_chunks is None:
            item.remaining_chunks = set(range(0, item.unit.numel, numel))
        await _for_each_chunk(
            sorted(item.remaining_chunks), lambda lo: store_part(item, lo, min(lo + numel, item.unit.numel))
        )

    def _can_write_directly(self, item: Contribution) -> bool:
        """True if the disk can take the contribution unchanged from its buffer."""
        if not (self._streams.has_unified_memory and item.is_first and item.dtype == item.buffer.dtype):
            return False
        return item.array.memory(item.unit.begin, item.unit.end) is None

    async def _write_piece(self, item: Contribution, lo: int, hi: int) -> None:
        unit, piece = item.unit, item.buffer[lo:hi]
        zero_gaps(piece, unit, item.slots, lo)
        kernels.block_sumsq(piece, rows_of(item.sums, lo, hi), threads=self._threads)
        if item.remaining_chunks is not None:
            item.remaining_chunks.discard(lo)  # even if the write fails: then the array keeps a copy
        await _write_or_strand(item.array, (unit.begin + lo, unit.begin + hi), piece.view(torch.uint8))

    async def _store_chunk(self, item: Contribution, lo: int, hi: int) -> None:
        unit, dtype, streams = item.unit, item.buffer.dtype, self._streams
        passes = not (streams.has_unified_memory or item.has_device_sums)
        passing_bytes = (hi - lo) * dtype.itemsize if passes else 0
        run = unit.begin + lo, unit.begin + hi
        async with self._staged_chunk(item.array, run, passing_bytes, first=item.is_first) as (raw, passing):
            source = item.buffer[lo:hi]
            if not streams.has_unified_memory:
                copied = passing.view(dtype) if passes else raw.view(dtype)
                await streams.synchronize(streams.copy_to_host(copied, source, item.event))
                source = copied
            if not item.has_device_sums:
                await streams.compute_on_host(
                    partial(self._store_run, item, raw.view(item.dtype), source, lo, item.sums)
                )
            if item.remaining_chunks is not None:
                item.remaining_chunks.discard(lo)

    @asynccontextmanager
    async def _staged_chunk(
        self, array: TieredArray, run: tuple[int, int], passing_bytes: int, *, first: bool
    ) -> AsyncIterator[tuple[torch.Tensor, torch.Tensor]]:
        """(the array's bytes of the run, memory for `passing_bytes`); at the end, unless it failed, the run is stored.

        Raises StorageError: the read failed, and nothing has changed; or the write failed, and the array keeps a copy.
        """
        memory = array.memory(*run)
        stored_bytes = 0 if memory is not None else array.nbytes(*run)
        chunk = await self._storage.host_pool.allocate_async(stored_bytes + passing_bytes, "gradient chunk")
        try:
            raw = chunk.data[:stored_bytes] if memory is None else memory
            if memory is None and not first:
                await array.read(*run, raw)
            yield raw, chunk.data[stored_bytes : stored_bytes + passing_bytes]
            if memory is None:
                await _write_or_strand(array, run, raw)
        finally:
            chunk.free()

    def _chunk_numel(self, home: torch.Tensor | None, dtype: torch.dtype, passing_bytes: int) -> int:
        """Elements handled at a time, whole blocks.

        Args:
            home: memory of the array, if it is in memory: then the stored elements need no room in the host pool.
            dtype: of the stored elements.
            passing_bytes: additional bytes of the host pool for each element.
        """
        if self._streams.has_unified_memory:
            return CHUNK_NUMEL
        pool_bytes = self._storage.plan.host_pool_bytes
        nbytes = device_chunk_bytes(pool_bytes) if home is None else min(SUM_CHUNK_BYTES, pool_bytes // 2)
        width_bytes = passing_bytes + (dtype.itemsize if home is None else 0)
        return max(nbytes // width_bytes // BLOCK_NUMEL, 1) * BLOCK_NUMEL

    def _store_run(
        self, item: Contribution, stored: torch.Tensor, source: torch.Tensor, lo: int, sums: torch.Tensor
    ) -> None:
        """Store or add elements from `lo` on; `stored` and `source` begin there. The sums are rewritten."""
        hi = lo + stored.numel()
        into = rows_of(sums, lo, hi)
        if item.is_first:  # one pass over memory: elements that have not arrived are set to zero in the source
            zero_gaps(source, item.unit, item.slots, lo)
            kernels.cast_sumsq(stored, source, into=into, threads=self._threads)
            return
        if stored.dtype == torch.float32 and all(item.adds) and len(item.slots) == len(item.unit.slots):
            zero_gaps(source, item.unit, item.slots, lo)
            kernels.reduce_ranks(stored, [source], add=True, into=into, threads=self._threads)  # in one pass
            return
        for slot, adds in zip(item.slots, item.adds, strict=True):
            begin, end = max(slot.offset_numel, lo) - lo, min(slot.end_numel, hi) - lo
            if begin < end and adds:
                add_up(stored[begin:end], source[begin:end], self._threads)
            elif begin < end:
                kernels.cast(stored[begin:end], source[begin:end], threads=self._threads)
        kernels.block_sumsq(stored, into, threads=self._threads)

    async def store_sum(
        self,
        unit: Unit,
        home: tuple[TieredArray, torch.dtype],
        sources: list[torch.Tensor],
        scale: float,
        sums: torch.Tensor,
        *,
        first: bool,
        rounds: bool = False,
    ) -> None:
        """Store `scale` times the sum of `sources` as this rank's shard of a gradient, or add it there.

        Raises StorageError: the error of the first chunk that failed.

        Args:
            unit: the unit of the gradient.
            home: its array, and the dtype in which the array holds the gradient.
            sources: (unit.shard_numel,) each, added up in this order.
            scale: factor of the sum.
            sums: rewritten.
            first: the array holds nothing for this step yet.
            rounds: the scaled sum is rounded to the unit's dtype before it is stored or added.
        """
        array, dtype = home
        if rounds and not self._streams.has_unified_memory:
            # On a device only this rank uses the sources: they may be overwritten.
            sources, scale, rounds = [_rounded_sum(sources[0], sources, scale, unit.dtype)], 1.0, False
        memory = array.memory(unit.begin, unit.end)
        if not rounds and self.can_address(memory, sources[0]) and memory is not None:
            into = sums if self._streams.has_unified_memory else torch.empty_like(sums, device=memory.device)
            stored = memory.view(dtype)
            reduce_into(stored, sources, scale, into, self._threads, first=first)
            if into is not sums:
                await self._streams.synchronize(self._streams.copy_to_host(sums, into, self._streams.record_event()))
            return
        if not self._streams.has_unified_memory:  # copy one sum to the host, and not one gradient for each rank
            kernels.reduce_ranks(sources[0], sources, scale=scale)
            sources, scale = sources[:1], 1.0
        numel = self._chunk_numel(memory, dtype, sources[0].element_size())

        async def store(lo: int) -> None:
            parts, factor, hi = [part[lo : lo + numel] for part in sources], scale, min(lo + numel, unit.shard_numel)
            if rounds:
                parts, factor = [_rounded_sum(torch.empty_like(parts[0]), parts, scale, unit.dtype)], 1.0
            passing_bytes = 0 if self._streams.has_unified_memory else parts[0].nbytes
            run = unit.begin + lo, unit.begin + hi
            async with self._staged_chunk(array, run, passing_bytes, first=first) as (raw, passing):
                if passing_bytes:
                    host_part = passing.view(parts[0].dtype)
                    await self._streams.synchronize(
                        self._streams.copy_to_host(host_part, parts[0], self._streams.record_event())
                    )
                    parts = [host_part]
                stored, into = raw.view(dtype), rows_of(sums, lo, hi)
                job = partial(reduce_into, stored, parts, factor, into, self._threads, first=first)
                await self._streams.compute_on_host(job)

        await _for_each_chunk(range(0, unit.shard_numel, numel), store)

    async def widen(self, unit: Unit, narrow: TieredArray, dtype: torch.dtype, wide: TieredArray) -> None:
        """Copy a 16-bit gradient to its fp32 home. Raises StorageError."""
        for lo in range(unit.begin, unit.end, CHUNK_NUMEL):
            hi = min(lo + CHUNK_NUMEL, unit.end)
            source, target = narrow.memory(lo, hi), wide.memory(lo, hi)
            if source is not None and target is not None:
                kernels.cast(target.view(torch.float32), source.view(dtype), threads=self._threads)
                continue
            block = await self._storage.host_pool.allocate_async((hi - lo) * (4 + dtype.itemsize), "gradient chunk")
            try:
                raw = block.data[(hi - lo) * 4 :]
                await narrow.read(lo, hi, raw)
                kernels.cast(block.view(torch.float32, hi - lo), raw.view(dtype), threads=self._threads)
                await wide.write(lo, hi, block.data[: (hi - lo) * 4])
            finally:
                block.free()


async def _write_or_strand(array: TieredArray, run: tuple[int, int], raw: torch.Tensor) -> None:
    """Write to the array. Raises StorageError: the array keeps a copy until the write succeeds."""
    try:
        await array.write(*run, raw)
    except StorageError as error:
        array.keep_failed_write(*run, aligned_copy(raw))
        error.is_in_memory = True
        raise


def add_up(stored: torch.Tensor, source: torch.Tensor, threads: int) -> None:
    """Add (N,) elements; a 16-bit sum is made in fp32 and rounded once."""
    if stored.dtype == torch.float32:
        kernels.accumulate(stored, source, threads=threads)
        return
    wide = torch.empty(min(stored.numel(), CHUNK_NUMEL), dtype=torch.float32, device=stored.device)
    for chunk, part in zip(torch.split(stored, CHUNK_NUMEL), torch.split(source, CHUNK_NUMEL), strict=True):
        total = wide[: chunk.numel()]
        kernels.accumulate(total, part, chunk, threads=threads)
        kernels.cast(chunk, total, threads=threads)


def reduce_into(
    stored: torch.Tensor,
    sources: Sequence[torch.Tensor],
    scale: float,
    into: torch.Tensor,
    threads: int,
    *,
    first: bool,
) -> None:
    """Store `scale` times the sum of `sources`, or add it unless `first`; as `kernels.reduce_ranks`."""
    if first or stored.dtype == torch.float32:
        kernels.reduce_ranks(stored, sources, scale=scale, add=not first, into=into, threads=threads)
        return
    wide = torch.empty(min(stored.numel(), CHUNK_NUMEL), dtype=torch.float32, device=stored.device)
    for lo in range(0, stored.numel(), CHUNK_NUMEL):
        chunk = stored[lo : lo + CHUNK_NUMEL]
        total = wide[: chunk.numel()]
        kernels.reduce_ranks(total, [part[lo : lo + CHUNK_NUMEL] for part in sources], scale=scale, threads=threads)
        add_up(chunk, total, threads)
    kernels.block_sumsq(stored, into, threads=threads)


def _rounded_sum(into: torch.Tensor, sources: list[torch.Tensor], scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The scaled sum, rounded to `dtype`, in `into`; that has the sources' shape and dtype, and may be one of them."""
    kernels.reduce_ranks(into, sources, scale=scale)
    return into if into.dtype == dtype else into.copy_(into.to(dtype))


def zero_gaps(flat: torch.Tensor, unit: Unit, slots: Iterable[Slot], lo: int) -> None:
    """Zero the elements that no slot in `slots` covers; `flat` begins at element `lo` of the unit."""
    hi = lo + flat.numel()
    position = lo
    for slot in sorted(slots, key=lambda s: s.offset_numel):
        if slot.offset_numel > position:
            flat[position - lo : min(slot.offset_numel, hi) - lo].zero_()
        position = max(position, slot.end_numel)
        if position >= hi:
            return
    flat[position - lo :].zero_()


async def _for_each_chunk(chunks: Iterable[int], store_chunk: Callable[[int], Awaitable[None]]) -> None:
    """Call `store_chunk` for each chunk, a few at a time, in this order.

    Raises the first error after all are over; an error that loses something takes precedence.
    """
    errors: list[StorageError] = []
    remaining = iter(chunks)

    async def store_remaining() -> None:
        for lo in remaining:
            try:
                await store_chunk(lo)
            except StorageError as error:
                errors.append(error)

    await await_all([store_remaining() for _ in range(CHUNKS_IN_FLIGHT)])
    if errors:
        raise min(errors, key=lambda error: error.is_in_memory)
