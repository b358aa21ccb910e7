"""Copies between a tiered array and memory that the disk cannot reach: chunk by chunk, through a pool on the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from offload.array.tiered_array import TieredArray, await_all
from offload.memory.pool import BlockPool
from offload.sizes import BLOCK_NUMEL, PAGE_BYTES, align_up
from offload.streams import MaybeEvent, Streams

CHUNK_BYTES = 2 << 20
DEVICE_CHUNK_BYTES = 8 << 20
"""For copies to and from a device; one takes 0.3 ms at 25 GB/s."""
CHUNKS_IN_FLIGHT = 4
"""Per fetch: some chunks are read while others are copied to the device."""


def copy_single_threaded(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy to a tensor of the same dtype and length; if both are on the host, only the calling thread works.

    torch would split the work among its threads and wait for all of them. They are late while other threads compute,
    and one core often reaches the memory bandwidth of all cores.
    """
    if target.device.type == "cpu" and source.device.type == "cpu" and target.dtype == source.dtype:
        np.copyto(target.view(torch.uint8).numpy(), source.detach().view(torch.uint8).numpy())
    else:
        target.copy_(source)


def zero_single_threaded(target: torch.Tensor) -> None:
    """Zero a tensor; if it is on the host, only the calling thread works, see `copy_single_threaded`."""
    if target.device.type == "cpu":
        target.view(torch.uint8).numpy().fill(0)
    else:
        target.zero_()


async def fetch_array(
    array: TieredArray,
    begin: int,
    end: int,
    into: torch.Tensor,
    pool: BlockPool,
    streams: Streams,
    after: tuple[MaybeEvent, ...],
) -> None:
    """Fill `into` (uint8, on the compute device) with [begin, end) of `array`, any range of its elements.

    On the CPU the disk writes into `into` itself, if the range is whole blocks. On a GPU the bytes pass through chunks
    of the pool, so a unit may be larger than the pool. Returns once the last copy is queued on the device; the event
    `streams.record_copy_event()` then covers all of them. `after`: events that cover the last uses of `into`.
    """
    if streams.has_unified_memory:
        is_direct = (begin, end) == blocks_around(begin, end) and into.data_ptr() % PAGE_BYTES == 0
        await (array.read(begin, end, into) if is_direct else read_array(array, begin, end, into, pool))
        return
    chunks: list[tuple[int, int]] = []
    for first, last, memory in array.runs(begin, end):
        if memory is None:
            chunks += _chunks(array, first, last, device_chunk_bytes(pool.capacity_bytes))
        else:  # the copy waits for the I/O loop's own work: an update may have been the last to write this memory
            streams.copy_to_device(
                into[array.nbytes(begin, first) : array.nbytes(begin, last)], memory, *after, streams.record_event()
            )
    remaining = iter(chunks)

    async def fetch_chunks() -> None:
        for lo, hi in remaining:
            block = await pool.allocate_async(array.nbytes(lo, hi), f"chunk of {array.name}")
            copied: MaybeEvent = None
            try:
                await array.read(lo, hi, block.data)
                copied = streams.copy_to_device(*_overlap(array, (begin, end), into, (lo, hi), block.data), *after)
            finally:
                streams.free_after(block, copied)

    await await_all([fetch_chunks() for _ in range(min(CHUNKS_IN_FLIGHT, len(chunks)))])


async def read_array(array: TieredArray, begin: int, end: int, into: torch.Tensor, pool: BlockPool) -> None:
    """Fill `into` (uint8, any memory, aligned or not) with [begin, end) of `array`, any range, through the pool."""
    if array.swap_bytes(begin, end) == 0:
        await array.read(begin, end, into)
        return
    for lo, hi in _chunks(array, begin, end):
        block = await pool.allocate_async(array.nbytes(lo, hi), f"chunk of {array.name}")
        try:
            await array.read(lo, hi, block.data)
            target, source = _overlap(array, (begin, end), into, (lo, hi), block.data)
            target.copy_(source)
        finally:
            block.free()


async def load_array(array: TieredArray, begin: int, end: int, pool: BlockPool) -> torch.Tensor:
    """[begin, end) of `array`, any range, uint8: its own memory if one home there holds it all, else a host copy."""
    memory = array.memory(begin, end)
    if memory is None:
        memory = torch.empty(array.nbytes(begin, end), dtype=torch.uint8, device="cpu")
        await read_array(array, begin, end, memory, pool)
    return memory


async def write_array(array: TieredArray, begin: int, end: int, source: torch.Tensor, pool: BlockPool) -> None:
    """Store `source` (uint8, any memory) as [begin, end) of `array`, whole blocks; the mirror of `read_array`."""
    if array.swap_bytes(begin, end) == 0:
        await array.write(begin, end, source)
        return
    for lo, hi in _chunks(array, begin, end):
        nbytes = array.nbytes(lo, hi)
        block = await pool.allocate_async(nbytes, f"chunk of {array.name}")
        try:
            block.data.copy_(source[array.nbytes(begin, lo) :][:nbytes])
            await array.write(lo, hi, block.data)
        finally:
            block.free()


def blocks_around(begin: int, end: int) -> tuple[int, int]:
    """[begin, end) of whole blocks: so the disk is read, and every home begins and ends with a block."""
    return begin // BLOCK_NUMEL * BLOCK_NUMEL, align_up(end, BLOCK_NUMEL)


def device_chunk_bytes(pool_bytes: int) -> int:
    """Bytes of the pool that one copy to or from a device uses; the pool has room for two such chunks at once."""
    return min(DEVICE_CHUNK_BYTES, pool_bytes // 2)


def _chunks(array: TieredArray, begin: int, end: int, chunk_bytes: int | None = None) -> Iterator[tuple[int, int]]:
    """Ranges of whole blocks that cover [begin, end)."""
    begin, end = blocks_around(begin, end)
    block_bytes = array.nbytes(begin, begin + BLOCK_NUMEL)
    step = max((chunk_bytes or CHUNK_BYTES) // block_bytes, 1) * BLOCK_NUMEL
    return ((lo, min(lo + step, end)) for lo in range(begin, end, step))


def _overlap(
    array: TieredArray, wanted: tuple[int, int], into: torch.Tensor, chunk: tuple[int, int], data: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(part of `into`, part of `data`) that hold the elements in both ranges."""
    first, last = max(wanted[0], chunk[0]), min(wanted[1], chunk[1])
    return (
        into[array.nbytes(wanted[0], first) : array.nbytes(wanted[0], last)],
        data[array.nbytes(chunk[0], first) : array.nbytes(chunk[0], last)],
    )
