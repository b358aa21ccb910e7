"""Measures the disk of a folder as the optimizer uses it: states are read and written back, several in flight.

All figures come from the engine itself: O_DIRECT transfers on registered huge pages, in short bursts that walk over
a file of random bytes. Candidates take turns, so that drift of the disk's speed affects all of them alike.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from offload.disk.aio import Aio, AioOptions, open_aio
from offload.errors import ConfigError, StorageError
from offload.memory.host_memory import map_host, tensor_over
from offload.system import linux

Workload = Literal["read", "write", "mixed"]

FILE_BYTES_MAX = 1_000_000_000
QUICK_FILE_BYTES_MAX = 512 << 20
RECORDS_IN_FLIGHT = 4  # Records in flight, as in an optimizer step.
RECORD_BYTES_MAX = 16 << 20
RECORD_BYTES_MIN = 1 << 20
BURST_SECONDS = 0.15


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    backend: str
    chunk_bytes: int
    queue_depth: int

    def options(self) -> AioOptions:
        return AioOptions(backend=self.backend, chunk_bytes=self.chunk_bytes, queue_depth=self.queue_depth)

    def __str__(self) -> str:
        return f"{self.backend}, {self.chunk_bytes / (1 << 20):g} MiB x {self.queue_depth}"


class ProbeFile:
    """A file without a name, filled with random bytes, and the memory to move it through.

    Raises ConfigError: no room; StorageError: the disk failed.

    Args:
        folder: on the disk to measure.
        fill_seconds: time limit for filling; bursts use only the part that was filled.
        file_bytes_max: the file is at most this long, and at most half of the free space.
    """

    def __init__(self, folder: Path, fill_seconds: float, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        self._path = str(folder)
        status = os.statvfs(folder)
        nbytes = min(file_bytes_max, status.f_bavail * status.f_frsize // 2)
        nbytes_min = RECORDS_IN_FLIGHT * RECORD_BYTES_MIN
        if nbytes < nbytes_min:
            raise ConfigError(
                f"probing {folder}: expected at least {2 * nbytes_min:,} free bytes, because a probe uses half of "
                "them; free some space, or choose another folder"
            )
        self._memory = tensor_over(map_host(RECORDS_IN_FLIGHT * RECORD_BYTES_MAX))
        self._memory.view(torch.int64).random_()
        self._loop = asyncio.new_event_loop()
        self._fd, _ = linux.nameless_file(folder, direct=True)  # else through the page cache, as in training
        self._cursor = 0
        self.record_bytes = RECORD_BYTES_MIN
        try:
            self._records = nbytes // RECORD_BYTES_MIN
            self._reserve(self._records * RECORD_BYTES_MIN)
            self._fill(fill_seconds)
        except BaseException:
            self.close()
            raise

    def open(self, setting: Setting) -> Aio:
        """An engine with the memory registered; the caller closes it. Raises ConfigError: it cannot be opened."""
        aio = open_aio(setting.options())
        aio.register_memory(self._memory)
        return aio

    def burst(self, aio: Aio, kind: Workload, seconds: float = BURST_SECONDS) -> float:
        """Bytes per second, reads and writes together, in a burst of about `seconds`."""
        begin = time.perf_counter()
        task = self._loop.create_task(self._run(aio, kind, begin + seconds))
        try:
            moved_bytes = self._loop.run_until_complete(task)
        except BaseException:  # an interrupt: the transfers in flight must end before the engine is closed
            if not task.done():
                self._loop.run_until_complete(asyncio.wait([task]))
            raise
        return moved_bytes / (time.perf_counter() - begin)

    def close(self) -> None:
        os.close(self._fd)
        self._loop.close()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _reserve(self, nbytes: int) -> None:
        try:
            linux.reserve(self._fd, 0, nbytes)
        except OSError as error:
            raise StorageError.from_os_error(error, f"probing: reserving {nbytes:,} bytes", Path(self._path)) from error

    def _fill(self, seconds: float) -> None:
        """Write from the start until the time is over; then size the records so that bursts are short on slow disks."""
        aio = open_aio(AioOptions())
        deadline, records = time.perf_counter() + seconds, self._records
        try:
            speed = self.burst(aio, "write", seconds / 4)
            while self._cursor < records and time.perf_counter() < deadline:
                speed = self.burst(aio, "write", min(seconds / 4, deadline - time.perf_counter()))
        finally:
            aio.close()
        written_bytes = min(self._cursor, records) * RECORD_BYTES_MIN
        wanted_bytes = speed * 2 * BURST_SECONDS / (2 * RECORDS_IN_FLIGHT)
        while self.record_bytes < RECORD_BYTES_MAX and 2 * self.record_bytes <= min(
            wanted_bytes, written_bytes // RECORDS_IN_FLIGHT
        ):
            self.record_bytes *= 2
        self._records, self._cursor = written_bytes // self.record_bytes, 0

    async def _run(self, aio: Aio, kind: Workload, deadline: float) -> int:
        moved_bytes = 0

        async def move_records(buffer: torch.Tensor) -> None:
            nonlocal moved_bytes
            while True:  # at least one record, so that there is always a result
                offset = self._cursor % self._records * self.record_bytes
                self._cursor += 1
                if kind != "write":
                    await aio.read(self._fd, offset, buffer, self._path)
                    moved_bytes += self.record_bytes
                if kind != "read":
                    await aio.write(self._fd, offset, buffer, self._path)
                    moved_bytes += self.record_bytes
                if time.perf_counter() >= deadline:
                    return

        starts = range(0, RECORDS_IN_FLIGHT * RECORD_BYTES_MAX, RECORD_BYTES_MAX)
        moves = [move_records(self._memory[begin : begin + self.record_bytes]) for begin in starts]
        for error in await asyncio.gather(*moves, return_exceptions=True):  # all have ended before an error is raised
            if error is not None:
                raise error
        return moved_bytes


def measure_interleaved(
    file: ProbeFile, settings: Sequence[Setting], rounds: int, has_time: Callable[[], bool]
) -> dict[Setting, list[float]]:
    """Mixed bytes per second of each setting in each round; settings that cannot be opened are left out.

    `has_time` is called before each round except the first; if it returns False, the rounds end.
    """
    engines: dict[Setting, Aio] = {}
    speeds: dict[Setting, list[float]] = {}
    with ExitStack() as ends:
        for setting in settings:
            try:
                engines[setting] = file.open(setting)
            except ConfigError:
                continue
            ends.callback(engines[setting].close)
            speeds[setting] = []
        for number in range(rounds):
            if number and not has_time():
                break
            for setting, aio in engines.items():
                speeds[setting].append(file.burst(aio, "mixed"))
    return speeds


def measure_workload(file: ProbeFile, setting: Setting, kind: Workload, rounds: int) -> float:
    """Median bytes per second of one kind of traffic."""
    aio = file.open(setting)
    try:
        return statistics.median(file.burst(aio, kind) for _ in range(rounds))
    finally:
        aio.close()


def mixed_speed(folder: Path) -> float:
    """Bytes per second of reads and writes mixed, measured for one or two seconds; used to weight drives in stripes.

    Raises ConfigError: no room; StorageError: the disk failed.
    """
    begin = time.perf_counter()
    defaults = AioOptions()
    with ExitStack() as ends:
        file = ProbeFile(folder, fill_seconds=0.4, file_bytes_max=QUICK_FILE_BYTES_MAX)
        ends.callback(file.close)
        aio = file.open(Setting("auto", defaults.chunk_bytes, defaults.queue_depth))
        ends.callback(aio.close)
        file.burst(aio, "mixed")
        # One long burst: a short-lived speed-up of the device (caches, token buckets) must not count.
        return file.burst(aio, "mixed", max(1.5 - (time.perf_counter() - begin), BURST_SECONDS))
