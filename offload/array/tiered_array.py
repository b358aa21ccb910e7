"""Tiered arrays: one array over an address space, each run of coordinates with a home in some tier.

A tiered array knows where the bytes of a coordinate range are: in memory (of the host or of a device)
or in the swap space. Callers pass coordinates and buffers; they never see an offset or a file. So a
tier is data and not a code path.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from offload.errors import StateError, StorageError
from offload.io.aio import Aio
from offload.io.swapfile import SwapSpace
from offload.memory.pool import Relocate
from offload.streams import Streams


@dataclass(frozen=True, slots=True)
class Home:
    """Where coordinates [begin, end) of a tiered array are stored."""

    begin: int
    end: int
    memory: torch.Tensor | None
    """uint8, of as many bytes as the array needs for [begin, end); None when the home is the swap space."""
    swap_offset: int = -1
    host_offset: int = -1
    """Where `memory` begins in the array's host memory; -1 if it is not there."""


@dataclass(slots=True)
class Traffic:
    """Bytes read from and written to the swap space; only the thread that moves them counts them."""

    read_bytes: int = 0
    write_bytes: int = 0
    earlier_read_seconds: float = 0.0
    """Seconds with reads in flight on an earlier disk, before this one took over."""
    earlier_write_seconds: float = 0.0


@dataclass(slots=True)
class Disk:
    """The swap space and the engine that moves bytes to and from it."""

    aio: Aio
    swap: SwapSpace
    traffic: Traffic = field(default_factory=Traffic)

    async def read(self, offset: int, buffer: torch.Tensor, what: str = "read") -> None:
        """Fill `buffer` (uint8, host) from the swap space; `what` is its name in a timeline. Raises StorageError."""
        await self._transfer_ranges(self.aio.read, offset, buffer, what)
        self.traffic.read_bytes += buffer.numel()

    async def write(self, offset: int, buffer: torch.Tensor, what: str = "write") -> None:
        """Write `buffer` (uint8, host) to the swap space; `what` is its name in a timeline.

        Raises StorageError: the first part that failed. Raises StateError: the swap space belongs to another process.
        """
        if self.swap.read_only:
            raise StateError(f"{what}: this process can only read the swap space of another process, not write to it")
        await self._transfer_ranges(self.aio.write, offset, buffer, what)
        self.traffic.write_bytes += buffer.numel()

    async def sync(self) -> None:
        """Sync all finished writes to stable storage. Raises StorageError."""
        files = zip(self.swap.descriptors, self.swap.paths, strict=True)
        await await_all([self.aio.sync(descriptor, path) for descriptor, path in files])

    def take_over_counters(self, other: Disk) -> None:
        """Continue the counters of `other`, which has no transfer in flight any more."""
        traffic, earlier, stats = self.traffic, other.traffic, other.aio.stats()
        traffic.read_bytes += earlier.read_bytes
        traffic.write_bytes += earlier.write_bytes
        traffic.earlier_read_seconds += earlier.earlier_read_seconds + stats.read_seconds
        traffic.earlier_write_seconds += earlier.earlier_write_seconds + stats.write_seconds

    def close(self) -> None:
        """Close the engine, and free the files even if that raises. No transfer may be in flight."""
        try:
            self.aio.close()
        finally:
            self.swap.close()

    async def _transfer_ranges(self, move: Callable[..., Any], offset: int, buffer: torch.Tensor, what: str) -> None:
        await await_all(
            [
                move(span.fd, span.file_offset, buffer[span.begin : span.begin + span.nbytes], span.path, what)
                for span in self.swap.file_ranges(offset, buffer.numel())
            ]
        )


async def await_all(moves: Sequence[Awaitable[None]]) -> None:
    """Run all moves; raise the first error only after every one has ended.

    Until then bytes may still move, and the buffer must not be reused.
    """
    if len(moves) < 2:  # to create a task would take longer than most moves
        for move in moves:
            await move
        return
    for result in await asyncio.gather(*moves, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


@dataclass(frozen=True, slots=True, eq=False)
class FailedWrite:
    """The newest values of coordinates [begin, end): their write failed, so they stay in memory."""

    begin: int
    end: int
    data: torch.Tensor


class TieredArray:
    """One array over [0, numel) coordinates.

    Args:
        name: appears in errors and in the plan.
        width: bytes per element; for states a function: elements of a home -> its bytes. `read` and `write` move whole
            states; `read_part`, `write_part` and `write_front` move some of their bytes.
        homes: disjoint and sorted; coordinates outside of all homes cannot be read or written.
        disk: needed when a home lies in the swap space.
        streams: needed when a home lies on a device; copies to and from it wait for the I/O loop's earlier work there.

    Attributes:
        host: uint8 memory that contains all homes in host memory; None if unknown, or if there are no such homes.
        starts_as_zeros: bytes that were never written are zeros.
    """

    host: torch.Tensor | None = None
    starts_as_zeros = True

    def __init__(
        self,
        name: str,
        width: int | Callable[[int], int],
        homes: list[Home],
        disk: Disk | None,
        streams: Streams | None = None,
    ) -> None:
        self.name, self._width = name, width
        self._streams = streams or Streams()
        self._homes, self._disk = homes, disk
        self._begins = [home.begin for home in homes]
        self._failed_writes: list[FailedWrite] = []
        self._writing: dict[asyncio.Future[None], tuple[int, int]] = {}  # Range of each write in flight.
        if disk is None and any(home.memory is None for home in homes):
            raise StateError(f"tiered array {name}: a part of it is in swap space, but there is no swap space")

    @property
    def homes(self) -> tuple[Home, ...]:
        """The homes as they are now."""
        return tuple(self._homes)

    def relocate(self, relocate: Relocate) -> None:
        """Point the homes to memory that was moved. No transfer of the array may be in flight."""
        self._homes = [
            home if home.memory is None else replace(home, memory=relocate(home.memory)) for home in self._homes
        ]

    @property
    def numel(self) -> int:
        """Coordinates covered."""
        return self._homes[-1].end if self._homes else 0

    def nbytes(self, begin: int, end: int) -> int:
        """Bytes of [begin, end). Raises StateError: the range holds only a part of an optimizer state."""
        if isinstance(self._width, int):
            return (end - begin) * self._width
        total = 0
        for home, lo, hi in self._pieces(begin, end):
            if (lo, hi) != (home.begin, home.end):
                raise StateError(
                    f"tiered array {self.name}: [{lo:,}, {hi:,}) is a part of the optimizer state "
                    f"[{home.begin:,}, {home.end:,}), which moves as a whole"
                )
            total += self._width(hi - lo)
        return total

    def close(self) -> None:
        """Drop all homes and their memory; the array is empty afterwards."""
        self._homes = []
        self._begins = []
        self._failed_writes = []
        self._disk = None
        self.host = None

    def memory(self, begin: int, end: int) -> torch.Tensor | None:
        """A view of the bytes of [begin, end), if one memory home holds them all; else None."""
        if begin == end:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        home = self._home_at(begin)
        if home.memory is None or end > home.end:
            return None
        return self._memory_view(home, begin, end)

    def host_range(self, begin: int, end: int) -> tuple[int, int] | None:
        """Which bytes of `host` hold [begin, end), if one home there holds them all; else None."""
        home = self._home_at(begin)
        if home.host_offset < 0 or end > home.end:
            return None
        return home.host_offset + self.nbytes(home.begin, begin), home.host_offset + self.nbytes(home.begin, end)

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, torch.Tensor | None]]:
        """(first, last, view of the bytes or None if not in memory) of each home's part of [begin, end), in order."""
        for home, lo, hi in self._pieces(begin, end):
            yield lo, hi, None if home.memory is None else self._memory_view(home, lo, hi)

    def swap_bytes(self, begin: int, end: int) -> int:
        """How many bytes of [begin, end) are in the swap space."""
        return sum(self.nbytes(lo, hi) for home, lo, hi in self._pieces(begin, end) if home.memory is None)

    async def read(self, begin: int, end: int, into: torch.Tensor) -> None:
        """Copy [begin, end) into `into` (uint8; host memory if any of it is in the swap space)."""
        await self._transfer(begin, end, into, write=False)

    async def write(self, begin: int, end: int, source: torch.Tensor) -> None:
        """Copy `source` (uint8) to [begin, end)."""
        await self._transfer(begin, end, source, write=True)

    async def write_front(self, begin: int, end: int, source: torch.Tensor) -> None:
        """Copy `source` (uint8, whole pages) to the first bytes of [begin, end), all in one home; the others stay.

        Raises StorageError. Raises StateError: an array with two slots or with failed writes cannot write only a part.
        """
        home = self._home_at(begin)
        if source.numel() == self.nbytes(begin, end):
            await self.write(begin, end, source)
        elif self._failed_writes or not self.starts_as_zeros:
            raise StateError(f"tiered array {self.name}: [{begin:,}, {end:,}) can only be written as a whole")
        elif home.memory is not None:
            await self._transfer_device(self._memory_view(home, begin, end)[: source.numel()], source)
        elif self._disk is not None:
            await self._disk.write(home.swap_offset + self.nbytes(home.begin, begin), source, self.name)

    async def read_part(self, begin: int, end: int, at: int, into: torch.Tensor) -> None:
        """Fill `into` (uint8, host, whole pages) with the bytes of an optimizer state from byte `at` on.

        Raises StorageError. Raises StateError: the state is not in the swap space. `begin`, `end`: of the state.
        """
        disk, offset = self._swap_location(begin, end)
        newer = next((s for s in self._failed_writes if (s.begin, s.end) == (begin, end)), None)
        if newer is not None:
            into.copy_(newer.data[at : at + into.numel()])
        else:
            await disk.read(offset + at, into, self.name)

    async def write_part(self, begin: int, end: int, at: int, source: torch.Tensor) -> None:
        """The mirror of `read_part`. Raises StateError: the state is not in swap space, or not written in parts."""
        disk, offset = self._swap_location(begin, end)
        if not self.can_write_part(begin, end):
            raise StateError(f"tiered array {self.name}: [{begin:,}, {end:,}) can only be written as a whole")
        await disk.write(offset + at, source, self.name)

    def can_write_part(self, begin: int, end: int) -> bool:
        """True if `write_part` can write to an optimizer state: no newer values of it wait in memory."""
        return all((s.begin, s.end) != (begin, end) for s in self._failed_writes)

    def _swap_location(self, begin: int, end: int) -> tuple[Disk, int]:
        """The disk that holds an optimizer state, and where the state begins in the swap space."""
        home = self._home_at(begin)
        if self._disk is None or home.memory is not None or (begin, end) != (home.begin, home.end):
            raise StateError(f"tiered array {self.name}: [{begin:,}, {end:,}) is not an optimizer state in swap space")
        return self._disk, self._offset_of(home)

    def _offset_of(self, home: Home) -> int:
        """Where the newest bytes of a home begin in the swap space."""
        return home.swap_offset

    def keep_failed_write(self, begin: int, end: int, data: torch.Tensor) -> None:
        """After a failed write of [begin, end): `data` holds the array's values there until a write succeeds."""
        self._supersede(begin, end, data)
        self._failed_writes.append(FailedWrite(begin, end, data))

    async def retry_failed_writes(self) -> None:
        """Try the failed writes again. Raises the first StorageError."""
        failure: StorageError | None = None
        for s in list(self._failed_writes):  # one by one: a write also removes the entries that it supersedes
            await self._wait_for_writes(s.begin, s.end)  # a newer write in flight may supersede the entry
            if s not in self._failed_writes:
                continue
            try:
                await self.write(s.begin, s.end, s.data)
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    async def _transfer(self, begin: int, end: int, buffer: torch.Tensor, *, write: bool) -> None:
        pieces = list(self._pieces(begin, end))  # a range outside of the homes must fail before a byte moves
        if buffer.numel() != self.nbytes(begin, end):
            raise StateError(
                f"tiered array {self.name}: [{begin:,}, {end:,}) is {self.nbytes(begin, end):,} bytes, "
                f"got a buffer of {buffer.numel():,}"
            )
        if write:  # a failed write that is being repeated must not land after newer values
            await self._wait_for_writes(begin, end)
        moves = []
        for home, lo, hi in pieces:
            part = buffer[self.nbytes(begin, lo) : self.nbytes(begin, hi)]
            if home.memory is not None:
                stored = self._memory_view(home, lo, hi)
                target, source = (stored, part) if write else (part, stored)
                if target.device == source.device:
                    target.copy_(source)
                else:
                    moves.append(self._transfer_device(target, source))
            else:
                moves.append(self._transfer_swap(home, lo, hi, part, write=write))
        if moves and write:
            self._writing[done := asyncio.get_running_loop().create_future()] = begin, end
            try:
                await await_all(moves)
            finally:
                del self._writing[done]
                done.set_result(None)
        elif moves:
            await await_all(moves)
        if write:
            self._supersede(begin, end, buffer)

    async def _wait_for_writes(self, begin: int, end: int) -> None:
        """Wait until no write to any of [begin, end) is in flight."""
        while writes := [future for future, (lo, hi) in self._writing.items() if lo < end and begin < hi]:
            await asyncio.wait(writes)

    async def _transfer_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy = self._streams.copy_to_host if target.device.type == "cpu" else self._streams.copy_to_device
        await self._streams.synchronize(copy(target, source, self._streams.record_event()))

    async def _transfer_swap(self, home: Home, lo: int, hi: int, part: torch.Tensor, *, write: bool) -> None:
        if self._disk is None:
            raise StateError(f"tiered array {self.name}: there is no swap space")
        if write:
            await self._disk.write(self._offset_of(home) + self.nbytes(home.begin, lo), part, self.name)
            return
        while True:
            failed = [s for s in self._failed_writes if s.begin < hi and lo < s.end]
            if not any(s.begin <= lo and hi <= s.end for s in failed):
                await self._disk.read(self._offset_of(home) + self.nbytes(home.begin, lo), part, self.name)
            if all(s in self._failed_writes for s in failed):
                break
            # A repeated write ended during the read: its bytes are on the disk now, in another slot.
            home = self._home_at(lo)
        for failed_bytes, target in self._overlaps(lo, hi, part):
            target.copy_(failed_bytes)

    def _supersede(self, begin: int, end: int, newer: torch.Tensor) -> None:
        """`newer` holds the newest values: drop failed writes inside the range, and update those that overlap it."""
        self._failed_writes = [s for s in self._failed_writes if not (begin <= s.begin and s.end <= end)]
        for failed_bytes, source in self._overlaps(begin, end, newer):
            failed_bytes.copy_(source)

    def _overlaps(self, begin: int, end: int, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(bytes of a failed write, bytes of `buffer`) for each part of [begin, end) in both; the newest is last."""
        for s in self._failed_writes:
            first, last = max(begin, s.begin), min(end, s.end)
            if first < last:
                yield (
                    s.data[self.nbytes(s.begin, first) : self.nbytes(s.begin, last)],
                    buffer[self.nbytes(begin, first) : self.nbytes(begin, last)],
                )

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[Home, int, int]]:
        position = begin
        while position < end:
            home = self._home_at(position)
            stop = min(end, home.end)
            yield home, position, stop
            position = stop

    def _home_at(self, coordinate: int) -> Home:
        index = bisect_right(self._begins, coordinate) - 1
        if index < 0 or coordinate >= self._homes[index].end:
            raise StateError(
                f"tiered array {self.name}: coordinate {coordinate:,} is outside its {self.numel:,} elements"
            )
        return self._homes[index]

    def _memory_view(self, home: Home, begin: int, end: int) -> torch.Tensor:
        if home.memory is None:
            raise StateError(f"tiered array {self.name}: coordinates {begin:,} to {end:,} are not in memory")
        return home.memory[self.nbytes(home.begin, begin) : self.nbytes(home.begin, end)]
