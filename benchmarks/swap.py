"""Our side of the disk questions: records between the swap space and a pool of blocks, as the optimizer moves them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from benchmarks.common import write_incompressible
from offload.array.tiered_array import Disk
from offload.io.aio import AioOptions, open_aio
from offload.io.swapfile import SwapSpace
from offload.memory.pool import BlockPool

RECORDS_IN_FLIGHT = 4


class Swapper:
    """A swap file of random bytes, and the buffers of the records in flight.

    Args:
        folder: on the disk in question.
        capacity_bytes: of the file; whole records.
        record_bytes: moved as one transfer.
        options: of the I/O engine.

    Attributes:
        path: opens the same file again, from any process of this user while this one lives: rivals use the
            very blocks that we use.
        backend: the name of what moves the bytes.
        traffic: bytes moved so far.
    """

    def __init__(self, folder: Path, capacity_bytes: int, record_bytes: int, options: AioOptions) -> None:
        if capacity_bytes % record_bytes:
            raise ValueError(f"expected whole records of {record_bytes:,} bytes, got {capacity_bytes:,}")
        self.record_bytes = record_bytes
        swap = SwapSpace([folder], capacity_bytes)
        self._disk = Disk(open_aio(options), swap)
        fd = next(swap.file_ranges(0, capacity_bytes)).fd
        self.traffic = self._disk.traffic
        self.path, self.backend = f"/proc/{os.getpid()}/fd/{fd}", self._disk.aio.backend
        self._pool = BlockPool(
            "benchmark",
            RECORDS_IN_FLIGHT * record_bytes,
            "--record-bytes",
            torch.device("cpu"),
            register=self._disk.aio.register_memory,
        )
        self._blocks = [self._pool.allocate(record_bytes, "a record") for _ in range(RECORDS_IN_FLIGHT)]
        self._loop = asyncio.new_event_loop()
        write_incompressible(fd, capacity_bytes)
        for block in self._blocks:
            block.data.random_()

    def read(self, nbytes: int) -> None:
        """Read the first `nbytes`, four records at a time."""
        self._run([self._lane(block.data, i, nbytes, write=False) for i, block in enumerate(self._blocks)])

    def write(self, nbytes: int) -> None:
        """Write the first `nbytes`, four records at a time."""
        self._run([self._lane(block.data, i, nbytes, write=True) for i, block in enumerate(self._blocks)])

    def mixed(self, nbytes: int) -> None:
        """Move `nbytes`: two tasks read every other record, two write the ones between."""
        lanes = enumerate(self._blocks)
        self._run([self._lane(block.data, i, nbytes, write=i % 2 == 1) for i, block in lanes])

    def close(self) -> None:
        """Free the file and the memory."""
        self._loop.close()
        self._disk.close()
        for block in self._blocks:
            block.free()
        self._pool.close()

    def __enter__(self) -> Swapper:
        """The swapper itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    async def _lane(self, buffer: torch.Tensor, first: int, nbytes: int, *, write: bool) -> None:
        move = self._disk.write if write else self._disk.read
        for begin in range(first * self.record_bytes, nbytes, RECORDS_IN_FLIGHT * self.record_bytes):
            await move(begin, buffer[: min(self.record_bytes, nbytes - begin)])

    def _run(self, lanes: Sequence[Coroutine[Any, Any, None]]) -> None:
        async def everything() -> None:
            await asyncio.gather(*lanes)

        self._loop.run_until_complete(everything())
