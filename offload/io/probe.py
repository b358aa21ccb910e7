"""Measures the disk of a folder as the optimizer uses it: records are read and written back, several in flight.

All figures come from the engine's own I/O: O_DIRECT transfers on registered huge pages, in a file of random bytes.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from offload.errors import ConfigError, StorageError
from offload.io.aio import AioOptions, open_aio_loop
from offload.memory.host_memory import map_host, tensor_over
from offload.sizes import format_bytes
from offload.system import linux

Workload = Literal["read", "write", "mixed"]

FILE_BYTES_MAX = 1_000_000_000
QUICK_FILE_BYTES_MAX = 512 << 20
RECORD_BYTES = 8 << 20
RECORDS_IN_FLIGHT = 8  # As many transfers as the engine has in flight.
FREE_BYTES_MIN = 2 * RECORD_BYTES * RECORDS_IN_FLIGHT


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes per second; `mixed`: reads and writes together, when every record is read and written back."""

    read: float
    write: float
    mixed: float

    def __str__(self) -> str:
        rates = {"read": self.read, "write": self.write, "mixed": self.mixed}
        return ", ".join(f"{name} {format_bytes(round(rate))}/s" for name, rate in rates.items())


def measure_disk(folder: Path) -> DiskSpeed:
    """The speed of the disk below `folder`, measured for about five seconds.

    Raises ConfigError: no room; StorageError: the disk failed.
    """
    with ProbeFile(folder, FILE_BYTES_MAX, fill_seconds=1.5) as file:
        return DiskSpeed(file.measure("read", 1.0), file.measure("write", 1.0), file.measure("mixed", 1.5))


def mixed_speed(folder: Path) -> float:
    """Bytes per second of reads and writes mixed, measured for one or two seconds; used to weight drives in stripes.

    Raises ConfigError: no room; StorageError: the disk failed.
    """
    with ProbeFile(folder, QUICK_FILE_BYTES_MAX, fill_seconds=0.4) as file:
        # Long enough that a short-lived speed-up of the device (caches, token buckets) does not count.
        return file.measure("mixed", 1.0)


class ProbeFile:
    """A file without a name, filled with random bytes, and the memory to move it through; a context.

    Raises ConfigError: no room; StorageError: the disk failed.

    Args:
        folder: on the disk to measure.
        file_bytes_max: the file is at most this long, and at most half of the free space.
        fill_seconds: time limit for filling; only the part that was filled is used.
    """

    def __init__(self, folder: Path, file_bytes_max: int, fill_seconds: float) -> None:
        self._path = str(folder)
        status = os.statvfs(folder)
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes < FREE_BYTES_MIN:
            raise ConfigError(
                f"probing {folder}: expected at least {FREE_BYTES_MIN:,} free bytes, because a probe uses half of "
                f"them, got {free_bytes:,}; free some space, or choose another folder"
            )
        self._records = min(file_bytes_max, free_bytes // 2) // RECORD_BYTES
        self._next_record = 0
        self._memory = tensor_over(map_host(RECORDS_IN_FLIGHT * RECORD_BYTES))
        self._memory.view(torch.int64).random_()
        with ExitStack() as opened:
            self._fd, _ = linux.nameless_file(folder, direct=True)  # else through the page cache, as in training
            opened.callback(os.close, self._fd)
            self._reserve(self._records * RECORD_BYTES)
            self._aio, self._loop = open_aio_loop(AioOptions())
            opened.callback(self._aio.close)
            opened.callback(self._loop.close)  # first of all: it waits for the transfers in flight
            self._aio.register_memory(self._memory)
            self._run("write", fill_seconds, self._records)
            self._records = min(self._next_record, self._records)
            self._opened = opened.pop_all()

    def __enter__(self) -> ProbeFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()

    def measure(self, kind: Workload, seconds: float) -> float:
        """Bytes per second, reads and writes together, in about `seconds`."""
        begin = time.perf_counter()
        moved_bytes = self._run(kind, seconds)
        return moved_bytes / (time.perf_counter() - begin)

    def _reserve(self, nbytes: int) -> None:
        try:
            linux.reserve(self._fd, 0, nbytes)
        except OSError as error:
            raise StorageError.from_os_error(error, f"probing: reserving {nbytes:,} bytes", Path(self._path)) from error

    def _run(self, kind: Workload, seconds: float, records_max: int | None = None) -> int:
        return self._loop.run("probing", self._move(kind, time.perf_counter() + seconds, records_max))

    async def _move(self, kind: Workload, deadline: float, records_max: int | None) -> int:
        """Bytes moved until the deadline, or until `records_max` were begun; each buffer moves one record at least."""
        moved_bytes = 0
        begin = self._next_record

        async def move_records(buffer: torch.Tensor) -> None:
            nonlocal moved_bytes
            while True:  # so that there is always a result
                offset = self._next_record % self._records * RECORD_BYTES
                self._next_record += 1
                if kind != "write":
                    await self._aio.read(self._fd, offset, buffer, self._path)
                    moved_bytes += RECORD_BYTES
                if kind != "read":
                    await self._aio.write(self._fd, offset, buffer, self._path)
                    moved_bytes += RECORD_BYTES
                is_enough = records_max is not None and self._next_record - begin >= records_max
                if is_enough or time.perf_counter() >= deadline:
                    return

        starts = range(0, self._memory.numel(), RECORD_BYTES)
        buffers = [self._memory[start : start + RECORD_BYTES] for start in starts]
        # All have ended before an error is raised: the memory is theirs until then.
        for error in await asyncio.gather(*map(move_records, buffers), return_exceptions=True):
            if error is not None:
                raise error
        return moved_bytes
