"""The common part of all asynchronous I/O backends: options, statistics, faults, and the interface."""

from __future__ import annotations

import asyncio
import errno as errno_names
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from offload.errors import ConfigError, StateError, StorageError
from offload.sizes import PAGE_BYTES
from offload.timeline import READS, WRITES, Timeline

T = TypeVar("T")

Op = Literal["read", "write", "sync"]
OPS: tuple[Op, ...] = ("read", "write", "sync")
NATIVE_BACKENDS = ("io_uring", "libaio", "threads")  # Best first; the position is the number in the C header.
BACKENDS = ("auto", *NATIVE_BACKENDS, "aiofiles")
CHUNK_BYTES_MAX = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class AioOptions:
    backend: str = "auto"  # "auto" takes the best that works: io_uring, libaio, threads, aiofiles.
    queue_depth: int = 32  # The most chunks in flight.
    chunk_bytes: int = 2 << 20  # Largest transfer submitted to the kernel; a multiple of the page.
    threads: int = 4  # Workers of the threads and aiofiles backends; the others ignore it.
    requests_max: int = 4096  # Requests accepted at once; further ones wait.
    single_submit: bool = False  # Submit each chunk with its own system call (native backends); costs throughput.
    overlap_events: bool = True  # Chunks start as soon as a slot is free; False: after all earlier ones (native).

    def __post_init__(self) -> None:
        problems = []
        if self.backend not in BACKENDS:
            problems.append(f"backend: expected one of {', '.join(BACKENDS)}, got {self.backend!r}")
        for name, low, high in (
            ("queue_depth", 1, 4096),
            ("threads", 1, 64),
            ("requests_max", 1, 65536),
            ("chunk_bytes", PAGE_BYTES, CHUNK_BYTES_MAX),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                problems.append(f"{name}: expected {low} to {high}, got {value}")
        if self.chunk_bytes % PAGE_BYTES:
            problems.append(f"chunk_bytes: must be a multiple of {PAGE_BYTES}, got {self.chunk_bytes}")
        if problems:
            raise ConfigError("aio: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class AioStats:
    """Counters of a backend since it was opened."""

    read_bytes: int
    write_bytes: int
    requests: int  # Finished, successful or not.
    chunks: int
    resumed: int  # Transfers that moved fewer bytes than requested and were continued.
    retried: int  # Transfers repeated after EINTR or EAGAIN.
    registered: int  # Transfers started through registered memory.
    busy_seconds: float  # With any transfer in flight; `read_seconds`, `write_seconds`: with one of that kind.
    read_seconds: float
    write_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AioFault:
    """Faults for tests, injected below the chunk logic. Rates are probabilities per transfer.

    A test that wants to hit something says what: by the operation, and by the bytes of the file.
    """

    errno: int = errno_names.EIO  # Positive errno that a failing transfer reports.
    fail_rate: float = 0.0
    short_rate: float = 0.0  # Transfers that move fewer bytes than requested.
    delay_rate: float = 0.0
    delay_seconds: float = 0.0  # Infinite: until the next `inject`.
    ops: tuple[Op, ...] = OPS
    skip: int = 0  # Matching transfers that pass before the first fault.
    count_max: int = 0  # The most faults; 0: no limit.
    begin: int = 0  # Only transfers that touch bytes [begin, end) of their file match; end 0: all.
    end: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        rates = (self.fail_rate, self.short_rate, self.delay_rate)
        if not all(0.0 <= rate <= 1.0 for rate in rates):
            raise ConfigError(f"AioFault: rates must be from 0 to 1, got {rates}")
        if self.errno <= 0 or min(self.skip, self.count_max, self.delay_seconds) < 0:
            raise ConfigError(f"AioFault: errno must be positive, counts and delays not negative: {self}")
        if self.begin < 0 or 0 != self.end <= self.begin:
            raise ConfigError(f"AioFault: expected 0 <= begin < end, or end 0, got {self.begin} and {self.end}")


@dataclass(slots=True, eq=False)
class Request:
    """One transfer in flight. It keeps its buffer alive until the last byte has moved."""

    op: Op
    fd: int
    offset: int
    path: str
    buffer: torch.Tensor | None = None
    what: str = ""  # Name in a timeline.
    begin_ns: int = field(default_factory=time.perf_counter_ns)

    def __post_init__(self) -> None:
        buffer = self.buffer
        if buffer is not None and (buffer.device.type != "cpu" or not buffer.is_contiguous()):
            raise TypeError(
                f"{self.op} at {self.path}: expected a contiguous CPU tensor, "
                f"got one on {buffer.device} with strides {buffer.stride()}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes to move; 0 for a sync."""
        return 0 if self.buffer is None else self.buffer.numel() * self.buffer.element_size()

    def __str__(self) -> str:
        what = "sync" if self.op == "sync" else f"{self.op} of {self.nbytes:,} bytes at offset {self.offset:,}"
        return f"{what} of {self.path}" if self.op == "sync" else f"{what} in {self.path}"

    def error(self, errno: int, offset: int) -> StorageError:
        """The error of this request; `offset`: file offset of the part that failed."""
        what = str(self)
        if errno == errno_names.ENODATA:
            what += " reached the end of the file"
        return StorageError(what, errno=errno, path=self.path, offset=offset, free_bytes=free_bytes(self.fd))


def free_bytes(fd: int) -> int | None:
    """Free space for ordinary users on the file system of `fd`; None if unknown."""
    try:
        status = os.fstatvfs(fd)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


async def shield_until_done(future: asyncio.Future[T]) -> T:
    """Await `future` to its end, even if this task is cancelled meanwhile; then raise CancelledError.

    After a cancellation the kernel may still write into the transfer's buffer, so the memory must not be freed
    before the transfer has ended.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return future.result()
    if not future.cancelled():
        future.exception()  # marks the error as retrieved; the caller gets the cancellation that it requested
    raise cancelled


class Aio(ABC):
    """Reads and writes files without blocking the event loop that uses it.

    A transfer moves all bytes of a contiguous CPU tensor of any dtype, or raises StorageError. Files
    opened with O_DIRECT need offsets, sizes and addresses that are multiples of 4096.

    Attributes:
        backend: the name of the backend.
        reason: one line: why this backend was chosen.
        timeline: where transfers are recorded; off until it is replaced by another.
    """

    backend: str
    reason: str

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._pending: dict[int, Request] = {}
        self._closed = False

    async def read(self, fd: int, offset: int, buffer: torch.Tensor, path: str, what: str = "read") -> None:
        """Fill `buffer` from byte `offset` of the file; if the file ends too early, the error is ENODATA.

        `what` is its name in a timeline. Raises StorageError: names `path` and the offset of the part that failed.
        """
        await self._run_request(Request("read", fd, offset, path, buffer, what))

    async def write(self, fd: int, offset: int, buffer: torch.Tensor, path: str, what: str = "write") -> None:
        """Write `buffer` at byte `offset` of the file; `what` is its name in a timeline.

        Raises StorageError: names `path` and the offset of the part that failed.
        """
        await self._run_request(Request("write", fd, offset, path, buffer, what))

    async def sync(self, fd: int, path: str) -> None:
        """Sync the data of finished writes to stable storage (fdatasync). Raises StorageError: names `path`."""
        await self._run_request(Request("sync", fd, 0, path))

    def register_memory(self, memory: torch.Tensor) -> Callable[[], None]:
        """Register `memory` for later transfers: if the kernel can, it pins the pages once.

        Transfers work without it too; if it fails, `reason` says why. Returns a function that undoes it; call it when
        no transfer in that memory is in flight. The engine keeps the memory alive until then.
        """
        del memory
        return lambda: None

    def in_flight(self) -> list[str]:
        """One line per transfer in flight: operation, file, bytes, and seconds since its start."""
        now = time.perf_counter_ns()
        return [f"{request}, for {(now - request.begin_ns) / 1e9:.1f} s" for request in tuple(self._pending.values())]

    def close(self) -> None:
        """Release all resources. Call it from the thread of the event loop, or after the loop has ended. Idempotent.

        Raises StateError: transfers are in flight; nothing was closed.
        """
        if self._closed:
            return
        if self._pending:
            raise StateError(f"closing {self.backend}: requests are still in flight: {'; '.join(self.in_flight())}")
        self._close_backend()
        self._closed = True

    async def _run_request(self, request: Request) -> None:
        if self._closed:
            raise StateError(f"{request}: the I/O engine is closed")
        await self._transfer_request(request)
        if self.timeline.is_on and request.op != "sync":
            track = READS if request.op == "read" else WRITES
            self.timeline.add(track, request.what, request.begin_ns, request.nbytes)

    @abstractmethod
    def stats(self) -> AioStats:
        """The counters so far."""

    @abstractmethod
    def inject(self, fault: AioFault | None) -> None:
        """Set the fault plan for all further transfers; None: no faults."""

    @abstractmethod
    async def _transfer_request(self, request: Request) -> None: ...

    @abstractmethod
    def _close_backend(self) -> None: ...
