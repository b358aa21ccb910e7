"""Asynchronous I/O in pure Python, on aiofiles' worker threads: for machines without the native library.

It gives the same guarantees as the native engine: short transfers are resumed, EINTR and EAGAIN are retried, a
request ends once, in full or with an errno. Chunks of one request run one after the other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno as errno_names
import fcntl
import itertools
import math
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import torch
from aiofiles.os import wrap

from offload.accelerator import device_initializer
from offload.io.aio_base import Aio, AioFault, AioOptions, AioStats, Op, Request, shield_until_done
from offload.sizes import PAGE_BYTES
from offload.timeline import Stopwatch

TRIES_MAX = 100
RETRY_ERRNOS = (errno_names.EINTR, errno_names.EAGAIN)
AGAIN_PAUSE_SECONDS = 50e-6
STALL_POLL_SECONDS = 0.002  # Between two checks whether a transfer that a fault has stalled may go on.

_preadv = wrap(os.preadv)
_pwritev = wrap(os.pwritev)
_fdatasync = wrap(os.fdatasync)


def _is_direct(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    except (OSError, ValueError):
        return False  # the transfer itself will report the error


class _ShieldingLoop:
    """The only method of an event loop that aiofiles uses; here a call that has begun is always awaited to its end."""

    @staticmethod
    def run_in_executor(executor: concurrent.futures.Executor, call: Callable[[], Any]) -> Awaitable[Any]:
        return shield_until_done(asyncio.wrap_future(executor.submit(call)))


class _Faults:
    """Decides from a seed which transfers fail, are short or are delayed."""

    def __init__(self, plan: AioFault) -> None:
        self.plan = plan
        self._random = random.Random(plan.seed)
        self._matches = self._hits = 0
        self.is_replaced = False

    async def inject(self, op: Op, offset: int, nbytes: int, is_direct: bool) -> int:
        """Raise OSError, wait, or return how many of `nbytes` the transfer at `offset` may move."""
        plan = self.plan
        if op not in plan.ops or (plan.end and not (offset < plan.end and plan.begin < offset + nbytes)):
            return nbytes
        self._matches += 1
        if self._matches <= plan.skip or (plan.count_max and self._hits >= plan.count_max):
            return nbytes
        dice = self._random.random()
        if dice < plan.fail_rate:
            self._hits += 1
            raise OSError(plan.errno, os.strerror(plan.errno))
        unit = PAGE_BYTES if is_direct else 1
        if plan.fail_rate <= dice < plan.fail_rate + plan.short_rate and op != "sync" and nbytes > unit:
            self._hits += 1
            return unit * self._random.randint(1, (nbytes - 1) // unit)
        if 0 <= dice - plan.fail_rate - plan.short_rate < plan.delay_rate:
            self._hits += 1
            await shield_until_done(asyncio.ensure_future(self._delay(plan.delay_seconds)))
        return nbytes

    async def _delay(self, seconds: float) -> None:
        while seconds == math.inf and not self.is_replaced:
            await asyncio.sleep(STALL_POLL_SECONDS)
        await asyncio.sleep(seconds if seconds < math.inf else 0.0)


class AiofilesAio(Aio):
    """Needs only Python; copies no data, but costs a thread switch per chunk.

    Args:
        options: only `threads` and `chunk_bytes` have an effect; one transfer is in flight per thread.
        reason: why this backend was chosen; see `Aio.reason`.
    """

    def __init__(self, options: AioOptions, reason: str) -> None:
        super().__init__()
        self.backend, self.reason = "aiofiles", reason
        self._chunk_bytes = options.chunk_bytes
        self._pool = concurrent.futures.ThreadPoolExecutor(
            options.threads, thread_name_prefix="zero-aio", initializer=device_initializer()
        )
        self._faults: _Faults | None = None
        self._tags = itertools.count()
        self._moved_bytes = {"read": 0, "write": 0}
        self._watches = {"any": Stopwatch(), "read": Stopwatch(), "write": Stopwatch(), "sync": Stopwatch()}
        self._requests = self._chunks = self._resumed = self._retried = 0

    def stats(self) -> AioStats:
        return AioStats(
            read_bytes=self._moved_bytes["read"],
            write_bytes=self._moved_bytes["write"],
            requests=self._requests,
            chunks=self._chunks,
            resumed=self._resumed,
            registered=0,
            retried=self._retried,
            busy_seconds=self._watches["any"].seconds,
            read_seconds=self._watches["read"].seconds,
            write_seconds=self._watches["write"].seconds,
        )

    def inject(self, fault: AioFault | None) -> None:
        if self._faults is not None:
            self._faults.is_replaced = True
        self._faults = None if fault is None else _Faults(fault)

    async def _transfer_request(self, request: Request) -> None:
        with self._count_request(request):
            if request.buffer is None:
                await self._move_chunk(request, memoryview(b""), 0)
                return
            data = request.buffer.detach().reshape(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(data), self._chunk_bytes):
                await self._move_chunk(request, data[begin : begin + self._chunk_bytes], request.offset + begin)

    @contextlib.contextmanager
    def _count_request(self, request: Request) -> Iterator[None]:
        tag = next(self._tags)
        self._pending[tag] = request
        try:
            with self._watches["any"].running(), self._watches[request.op].running():
                yield
        finally:
            del self._pending[tag]
            self._requests += 1

    async def _move_chunk(self, request: Request, data: memoryview, offset: int) -> None:
        """Move all of `data`, or raise; `offset` is its first byte in the file."""
        is_direct = _is_direct(request.fd)
        begin = end = tries = 0
        try:
            while True:
                try:
                    moved_bytes, requested_bytes = await self._transfer(
                        request, data[begin:], offset + begin, is_direct
                    )
                except OSError as error:
                    tries += 1
                    if error.errno not in RETRY_ERRNOS or tries > TRIES_MAX:
                        raise request.error(error.errno or errno_names.EIO, offset + begin) from error
                    self._retried += 1
                    await asyncio.sleep(tries * AGAIN_PAUSE_SECONDS)
                    continue
                if begin + moved_bytes == len(data):
                    end = len(data)
                    return
                if begin + moved_bytes <= end and moved_bytes < requested_bytes:
                    # A read that stops at the same byte twice is at the end of the file.
                    tries += 1
                    if request.op == "read" or tries > TRIES_MAX:
                        errno = errno_names.ENODATA if request.op == "read" else errno_names.EIO
                        raise request.error(errno, offset + end)
                    continue
                tries, end = 0, begin + moved_bytes
                self._resumed += 1
                # O_DIRECT can resume only at an aligned byte.
                begin = end - end % PAGE_BYTES if is_direct else end
        finally:
            self._chunks += 1
            if request.op != "sync":
                self._moved_bytes[request.op] += end

    async def _transfer(self, request: Request, data: memoryview, offset: int, is_direct: bool) -> tuple[int, int]:
        """One system call on a worker thread: (bytes moved, bytes requested)."""
        nbytes = len(data)
        if self._faults is not None:
            nbytes = await self._faults.inject(request.op, offset, nbytes, is_direct)
        wrapper = {"loop": _ShieldingLoop, "executor": self._pool}
        if request.op == "sync":
            await _fdatasync(request.fd, **wrapper)
            return 0, 0
        move = _preadv if request.op == "read" else _pwritev
        return await move(request.fd, [data[:nbytes]], offset, **wrapper), nbytes

    def _close_backend(self) -> None:
        self._pool.shutdown(wait=True)
