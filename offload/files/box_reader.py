"""Reads boxes of files ahead of their use, verifies checksums, and needs only a few blocks of memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.errors import DamagedError
from offload.files.durable import DurableFile, Files
from offload.io.aio import AioOptions, open_aio_loop
from offload.kernels import kernels
from offload.memory.pool import Block, BlockPool
from offload.sizes import PAGE_BYTES, align_up

BLOCKS = 10
ENTRIES_MAX = 64  # Boxes in memory or being read.
STABLE_BOXES = 4  # A box that was returned stays unchanged until so many further boxes were requested.


@dataclass(frozen=True, slots=True)
class StoredBox:
    """Some bytes of a file that are read together."""

    file: int  # Index of the file in the reader.
    offset: int  # A multiple of 4096; the file extends at least to the next multiple after the last byte.
    nbytes: int
    crc: int  # CRC-32C.


@dataclass(slots=True, eq=False)
class _Entry:
    block: Block | None
    reading: asyncio.Task[torch.Tensor]
    data: torch.Tensor | None = None  # Set once the box is read.
    is_requested: bool = False  # Set by the calling thread.
    is_used: bool = False  # Set by the reader; only then the block can be reclaimed.


class BoxReader:
    """A thread that reads, and a ring of blocks. Its methods may be called on any other thread, one at a time.

    Raises StorageError: a file cannot be opened. `block_bytes`: of a block; larger boxes are not read ahead.
    """

    def __init__(self, paths: Sequence[Path], block_bytes: int, files: Files) -> None:
        self._paths, self._block_bytes = paths, align_up(block_bytes, PAGE_BYTES)
        self._files: list[DurableFile] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_files)
            for path in paths:
                self._files.append(files.open(path))
            self._aio, self._io_loop = open_aio_loop(AioOptions())
            undo.callback(self._aio.close)
            undo.callback(self._io_loop.close)
            self._pool = BlockPool(
                "reading",
                BLOCKS * self._block_bytes,
                "nothing: it is fixed",
                torch.device("cpu"),
                register=self._aio.register_memory,
            )
            undo.pop_all()
        self._entries: dict[StoredBox, _Entry] = {}
        self._recent: deque[_Entry] = deque(maxlen=STABLE_BOXES)
        self._prefetch_task: asyncio.Task[None] | None = None
        self._change_event: asyncio.Event = asyncio.Event()
        self._closed = False

    def prefetch(self, boxes: Iterable[StoredBox]) -> None:
        """Announce the boxes that will be requested, in that order; this replaces all earlier announcements."""
        self._io_loop.run("reading ahead", self._restart_prefetch(list(boxes)))

    def get(self, box: StoredBox) -> torch.Tensor:
        """The box's bytes, uint8; they stay unchanged until `STABLE_BOXES` further boxes have been requested.

        Raises StorageError: the read failed; DamagedError: the bytes differ from the written ones.
        """
        entry = self._entries.get(box)
        if entry is not None and entry.data is not None and not entry.is_requested and not entry.is_used:
            entry.is_requested = True
            self._io_loop.call_soon(lambda: self._mark_used(box))
            return entry.data
        return self._io_loop.run(f"reading {self._paths[box.file]}", self._get(box))

    def get_parts(self, parts: Sequence[tuple[StoredBox, int, int]]) -> torch.Tensor:
        """Bytes [begin, end) of each of these boxes, one after another, uint8, copied to new memory.

        There may be any number of parts; results of `get` stay unchanged. Raises as `get`.
        """
        out = torch.empty(sum(end - begin for _, begin, end in parts), dtype=torch.uint8, device="cpu")
        self._io_loop.run(f"reading {len(parts)} boxes", self._get_parts(parts, out))
        return out

    def close(self) -> None:
        """End the threads, free the memory and close the files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._io_loop.run("closing a reader", self._finish_reads())
        self._io_loop.close()
        self._aio.close()
        self._pool.close()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    async def _restart_prefetch(self, boxes: list[StoredBox]) -> None:
        await self._stop_prefetch()
        self._prefetch_task = asyncio.create_task(self._read_ahead(boxes))

    async def _stop_prefetch(self) -> None:
        if self._prefetch_task is not None:
            self._prefetch_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._prefetch_task
            self._prefetch_task = None

    async def _finish_reads(self) -> None:
        await self._stop_prefetch()
        await asyncio.gather(*(entry.reading for entry in self._entries.values()), return_exceptions=True)
        for entry in self._entries.values():
            if entry.block is not None:
                entry.block.free()
        self._entries.clear()

    async def _read_ahead(self, boxes: list[StoredBox]) -> None:
        for box in boxes:
            while box not in self._entries and box.nbytes <= self._block_bytes:
                block = self._allocate_block(align_up(box.nbytes, PAGE_BYTES))
                if block is not None:
                    self._entries[box] = self._start_read(box, block, block.data)
                    break
                self._change_event.clear()
                await self._change_event.wait()

    def _allocate_block(self, nbytes: int) -> Block | None:
        """Memory for one more box, free or reclaimed; None if there is none. Many small boxes may fit in."""
        while True:
            block = self._pool.try_allocate(nbytes) if len(self._entries) < ENTRIES_MAX else None
            if block is not None or not self._reclaim():
                return block

    def _reclaim(self) -> bool:
        """Free the box that was requested longest ago and may change now; False if there is none."""
        for box, entry in self._entries.items():
            if entry.is_used and entry.reading.done() and entry not in self._recent:
                del self._entries[box]
                if entry.block is not None:
                    entry.block.free()
                return True
        return False

    async def _get(self, box: StoredBox) -> torch.Tensor:
        return await self._data_of(self._mark_used(box))

    def _mark_used(self, box: StoredBox) -> _Entry:
        """Mark the box as requested."""
        entry = self._entry(box)
        if entry not in self._recent:
            self._recent.append(entry)
        entry.is_used = True
        self._change_event.set()
        return entry

    async def _get_parts(self, parts: Sequence[tuple[StoredBox, int, int]], out: torch.Tensor) -> None:
        position = 0
        for box, begin, end in parts:
            entry = self._entry(box)
            entry.is_used = False  # the block must not be reclaimed before the copy is made
            try:
                out[position : position + end - begin].copy_((await self._data_of(entry))[begin:end])
            finally:
                entry.is_used = True
            position += end - begin

    def _entry(self, box: StoredBox) -> _Entry:
        entry = self._entries.pop(box, None)
        if entry is None:  # not announced, or not reached by reading ahead
            memory = torch.empty(align_up(box.nbytes, PAGE_BYTES) + PAGE_BYTES, dtype=torch.uint8, device="cpu")
            skip = -memory.data_ptr() % PAGE_BYTES
            entry = self._start_read(box, None, memory[skip:])
        self._entries = {b: e for b, e in self._entries.items() if e.block is not None or e in self._recent}
        self._entries[box] = entry  # after all boxes requested before
        return entry

    async def _data_of(self, entry: _Entry) -> torch.Tensor:
        try:
            return await asyncio.shield(entry.reading)
        finally:
            self._change_event.set()

    def _start_read(self, box: StoredBox, block: Block | None, memory: torch.Tensor) -> _Entry:
        entry = _Entry(block, asyncio.create_task(self._read(box, memory)))

        def on_read(task: asyncio.Task[torch.Tensor]) -> None:
            if not task.cancelled() and task.exception() is None:
                entry.data = task.result()
            self._change_event.set()

        entry.reading.add_done_callback(on_read)
        return entry

    async def _read(self, box: StoredBox, memory: torch.Tensor) -> torch.Tensor:
        path = self._paths[box.file]
        if box.nbytes:
            pages = memory[: align_up(box.nbytes, PAGE_BYTES)]
            await self._aio.read(self._files[box.file].fd, box.offset, pages, str(path), "checkpoint")
        data = memory[: box.nbytes]
        checksum = kernels.crc32c(data)
        if checksum != box.crc:
            raise DamagedError(
                f"{path}: {box.nbytes:,} bytes at offset {box.offset:,} are damaged: expected the checksum "
                f"{box.crc:#010x}, got {checksum:#010x}; load another checkpoint, or restore the file"
            )
        return data
