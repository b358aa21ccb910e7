"""Bytes between a plane and memory that the disk cannot reach: chunk by chunk through the host arena."""

from __future__ import annotations

import torch

from offload.arena import Arena
from offload.planes import Plane

CHUNK_BYTES = 2 << 20


async def read_plane(plane: Plane, begin: int, end: int, into: torch.Tensor, arena: Arena, direct: bool) -> None:
    """Fill `into` (uint8) with [begin, end) of `plane`.

    With `direct` the disk may write into `into` itself: it is host memory, page-aligned. Otherwise
    (device memory, memory of a user) the bytes pass through leased chunks of the arena.
    """
    if direct or plane.swap_bytes(begin, end) == 0:
        await plane.read(begin, end, into)
        return
    step = max(CHUNK_BYTES // plane.bytes_per_element // 4096, 1) * 4096
    for lo in range(begin, end, step):
        hi = min(lo + step, end)
        nbytes = (hi - lo) * plane.bytes_per_element
        block = await arena.lease_when_free(nbytes, f"chunk of {plane.name}")
        try:
            await plane.read(lo, hi, block.data)
            target = into[(lo - begin) * plane.bytes_per_element :][:nbytes]
            target.copy_(block.data)
        finally:
            block.release()


async def write_plane(plane: Plane, begin: int, end: int, source: torch.Tensor, arena: Arena, direct: bool) -> None:
    """Store `source` (uint8) as [begin, end) of `plane`; the mirror of `read_plane`."""
    if direct or plane.swap_bytes(begin, end) == 0:
        await plane.write(begin, end, source)
        return
    step = max(CHUNK_BYTES // plane.bytes_per_element // 4096, 1) * 4096
    for lo in range(begin, end, step):
        hi = min(lo + step, end)
        nbytes = (hi - lo) * plane.bytes_per_element
        block = await arena.lease_when_free(nbytes, f"chunk of {plane.name}")
        try:
            block.data.copy_(source[(lo - begin) * plane.bytes_per_element :][:nbytes])
            await plane.write(lo, hi, block.data)
        finally:
            block.release()
