"""Bytes between a plane and memory that the disk cannot reach: chunk by chunk through the host arena."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TypeAlias

import torch

from offload.arena import Arena
from offload.planes import Plane
from offload.sizes import BLOCK_NUMEL
from offload.timeline import COPIES, Timeline

CHUNK_BYTES = 2 << 20


Fence: TypeAlias = "torch.cuda.Event | None"
"""A mark in the order of work on a device; None on a CPU-only machine."""


class CopyLane:
    """Orders copies to a device after the work that last used their target.

    On a CPU-only machine a copy is done when it returns, and nothing here does anything.
    """

    def __init__(self, device: torch.device, timeline: Timeline | None = None) -> None:
        self._timeline = timeline or Timeline()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fence(self) -> Fence:
        """A mark behind everything the calling thread has enqueued: a block it released is free after it."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    async def copy(self, target: torch.Tensor, source: torch.Tensor, *fences: Fence) -> None:
        """Copy on the lane's own stream, beside the computation, and wait for it; the loop goes on meanwhile.

        Args:
            target: what it is written to.
            source: as long.
            fences: behind the last use of `target`, and behind what makes `source` if that is on a device.
        """
        with self._timeline.span(COPIES, f"to {target.device}", source.nbytes):
            await self._copy(target, source, fences)

    async def _copy(self, target: torch.Tensor, source: torch.Tensor, fences: tuple[Fence, ...]) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            for fence in fences:
                if fence is not None:
                    self._stream.wait_event(fence)
            target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        await asyncio.get_running_loop().run_in_executor(None, copied.synchronize)


async def fetch_plane(
    plane: Plane,
    begin: int,
    end: int,
    into: torch.Tensor,
    arena: Arena,
    lane: CopyLane,
    fence: Fence,
) -> None:
    """Fill `into` (uint8, on the compute device) with [begin, end) of `plane`.

    On the CPU the disk writes into `into` itself; to a GPU the bytes go through chunks of the arena,
    so a unit may be larger than the arena.
    """
    if into.device.type == "cpu":
        await plane.read(begin, end, into)
        return
    for first, last, memory in plane.runs(begin, end):
        if memory is not None:
            await lane.copy(into[plane.nbytes(begin, first) : plane.nbytes(begin, last)], memory, fence)
            continue
        for lo, hi in _chunks(plane, first, last):
            block = await arena.lease_when_free(plane.nbytes(lo, hi), f"chunk of {plane.name}")
            try:
                await plane.read(lo, hi, block.data)
                await lane.copy(into[plane.nbytes(begin, lo) : plane.nbytes(begin, hi)], block.data, fence)
            finally:
                block.release()


async def read_plane(plane: Plane, begin: int, end: int, into: torch.Tensor, arena: Arena) -> None:
    """Fill `into` (uint8, any memory, aligned or not) with [begin, end) of `plane`, through the arena."""
    if plane.swap_bytes(begin, end) == 0:
        await plane.read(begin, end, into)
        return
    for lo, hi in _chunks(plane, begin, end):
        nbytes = plane.nbytes(lo, hi)
        block = await arena.lease_when_free(nbytes, f"chunk of {plane.name}")
        try:
            await plane.read(lo, hi, block.data)
            target = into[plane.nbytes(begin, lo) :][:nbytes]
            target.copy_(block.data)
        finally:
            block.release()


async def write_plane(plane: Plane, begin: int, end: int, source: torch.Tensor, arena: Arena) -> None:
    """Store `source` (uint8, any memory) as [begin, end) of `plane`; the mirror of `read_plane`."""
    if plane.swap_bytes(begin, end) == 0:
        await plane.write(begin, end, source)
        return
    for lo, hi in _chunks(plane, begin, end):
        nbytes = plane.nbytes(lo, hi)
        block = await arena.lease_when_free(nbytes, f"chunk of {plane.name}")
        try:
            block.data.copy_(source[plane.nbytes(begin, lo) :][:nbytes])
            await plane.write(lo, hi, block.data)
        finally:
            block.release()


def _chunks(plane: Plane, begin: int, end: int) -> Iterator[tuple[int, int]]:
    block_bytes = plane.nbytes(begin, begin + BLOCK_NUMEL)
    step = max(CHUNK_BYTES // block_bytes, 1) * BLOCK_NUMEL
    return ((lo, min(lo + step, end)) for lo in range(begin, end, step))
