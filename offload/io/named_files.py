"""Tensors to and from files with names, through the I/O engine; transfers run in the background until `wait`.

Whole pages bypass the page cache if buffer, offset and file system allow it. Other bytes, such as the end of a file of
an odd length, passes through the cache. The two never share a page.
"""

from __future__ import annotations

import asyncio
import errno as errno_names
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from offload.errors import ConfigError, StorageError
from offload.io.aio import Aio, AioOptions, open_aio_loop
from offload.io.aio_base import free_bytes
from offload.io.io_loop import IoFuture, IoLoop
from offload.memory.host_memory import map_host, pin, tensor_over
from offload.sizes import PAGE_BYTES
from offload.system.linux import reopen

Operation = Literal["read", "write"]
PathOrDescriptor = str | int  # The path of a file, or an open descriptor, which stays open.


@dataclass(frozen=True, slots=True)
class RegisteredMemory:
    memory: torch.Tensor  # Referenced here: registered or pinned memory must not be unmapped before.
    registrations: ExitStack

    def unregister(self) -> None:
        self.registrations.close()


class NamedFiles:
    """An I/O engine with its own thread, for files of the caller. If the caller does not close it, it is closed when
    it is collected, at the latest when the interpreter ends.

    Raises ConfigError: the options cannot be met here.
    """

    def __init__(self, options: AioOptions) -> None:
        self._aio, self._io_loop = open_aio_loop(options)
        self._futures: list[IoFuture[None]] = []
        self._done_count = 0  # How many of them have ended; `_error` is the first error of these.
        self._error: BaseException | None = None
        self._registered: dict[int, RegisteredMemory] = {}
        self._finish = weakref.finalize(self, _close, self._io_loop, self._aio, self._registered)

    def start(
        self, kind: Operation, buffer: torch.Tensor, where: PathOrDescriptor, offset: int, *, validate: bool = False
    ) -> None:
        """Move all bytes of a tensor, from or to byte `offset` of the file; returns at once.

        A write creates a missing file, and keeps the file's bytes outside of the range. A tensor on another device is
        copied through host memory. Leave `buffer` unchanged until `wait`, which raises all later errors.

        Raises ConfigError: the tensor is not contiguous, or the offset is negative.

        Args:
            kind: "read" fills the tensor; if the file ends too early, this is an error.
            validate: read the file once more at the end and compare.
        """
        if not buffer.is_contiguous() or offset < 0:
            raise ConfigError(
                f"{kind} of {where}: expected a contiguous tensor and an offset of at least 0, got strides "
                f"{buffer.stride()} and offset {offset}; call contiguous()"
            )
        job = _run(self._aio, kind, buffer, where, offset, validate)
        self._futures.append(self._io_loop.submit(f"{kind} of {where}", job))

    def wait(self) -> int:
        """Wait for all started transfers; returns their number. Raises StorageError: the first that failed."""
        while self._done_count < len(self._futures):  # an interrupt in here leaves the other transfers to the next call
            error = self._futures[self._done_count].wait()
            self._error = self._error or error
            self._done_count += 1
        count, error = self._done_count, self._error
        self._futures, self._done_count, self._error = [], 0, None
        if error is not None:
            raise error
        return count

    def new_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed page-aligned host memory, 1-D, registered with the I/O engine, and pinned if there is a GPU.

        Raises BudgetError: the kernel has no memory.
        """
        memory = tensor_over(map_host(numel * dtype.itemsize))
        registrations = ExitStack()
        registrations.callback(self._aio.register_memory(memory))
        unpin = pin(memory)
        if unpin is not None:
            registrations.callback(unpin)
        self._registered[memory.data_ptr()] = RegisteredMemory(memory, registrations)
        return memory[: numel * dtype.itemsize].view(dtype)

    def has_memory(self, tensor: torch.Tensor) -> bool:
        """True: the tensor views memory from `new_memory` that is still registered."""
        return tensor.untyped_storage().data_ptr() in self._registered

    def free_memory(self, memory: torch.Tensor) -> bool:
        """Unregister memory of `new_memory`; False: it is not such memory. It is freed with the last tensor over it."""
        registered = self._registered.pop(memory.data_ptr(), None)
        if registered is not None:
            registered.unregister()
        return registered is not None

    def close(self) -> None:
        """Wait for running transfers, and end the thread. Idempotent."""
        self._finish()


def _close(io_loop: IoLoop, aio: Aio, registered: dict[int, RegisteredMemory]) -> None:
    def end() -> None:
        for memory in registered.values():
            memory.unregister()
        aio.close()

    if io_loop.is_forked:
        return
    if io_loop.is_current_thread():  # the garbage collector runs on any thread
        io_loop.close_soon(end)
        return
    io_loop.close()
    end()


# Not a method: a running job must not keep the object alive, or it would be closed on the I/O loop's thread.
async def _run(
    aio: Aio, kind: Operation, buffer: torch.Tensor, where: PathOrDescriptor, offset: int, validate: bool
) -> None:
    host, path = buffer if buffer.device.type == "cpu" else buffer.to("cpu"), str(where)
    data = host.detach().reshape(-1).view(torch.uint8)
    with _open_file(kind, where, validate) as fd:
        await _move(aio, kind, fd, data, path, offset)
        if validate:
            stored = torch.empty_like(data)
            await aio.read(fd, offset, stored, path)
            if not torch.equal(stored, data):
                what = f"{kind} of {data.numel():,} bytes: the file has other contents"
                raise StorageError(what, errno=errno_names.EIO, path=path, offset=offset, free_bytes=free_bytes(fd))
    if kind == "read" and host is not buffer:
        buffer.copy_(host)


async def _move(aio: Aio, kind: Operation, fd: int, data: torch.Tensor, path: str, offset: int) -> None:
    move = aio.read if kind == "read" else aio.write
    direct_bytes = data.numel() // PAGE_BYTES * PAGE_BYTES
    aligned = not (offset % PAGE_BYTES or data.data_ptr() % PAGE_BYTES)
    mode = os.O_DIRECT | (os.O_RDONLY if kind == "read" else os.O_WRONLY)
    direct = reopen(fd, mode) if direct_bytes and aligned else None
    if direct is None:
        await move(fd, offset, data, path)
        return
    try:
        jobs = [move(direct, offset, data[:direct_bytes], path)]
        if direct_bytes < data.numel():
            jobs.append(move(fd, offset + direct_bytes, data[direct_bytes:], path))
        # All must end before the descriptor is closed, and before an error reaches the caller.
        results = await asyncio.gather(*jobs, return_exceptions=True)
    finally:
        os.close(direct)
    for result in results:
        if result is not None:
            raise result


@contextmanager
def _open_file(kind: Operation, where: PathOrDescriptor, validate: bool) -> Iterator[int]:
    if isinstance(where, int):
        yield where
        return
    mode = os.O_RDONLY if kind == "read" else os.O_CREAT | (os.O_RDWR if validate else os.O_WRONLY)
    try:
        fd = os.open(where, mode | os.O_CLOEXEC, 0o664)
    except OSError as error:
        raise StorageError.from_os_error(error, f"opening the file for a {kind}", Path(where)) from error
    try:
        yield fd
    finally:
        os.close(fd)
