"""Writes bytes to a file in order, with several writes in flight, and with O_DIRECT if the file is open so."""

from __future__ import annotations

import os
from collections import deque

import torch

from offload.disk.aio import AioOptions, open_aio_loop
from offload.files.durable import DurableFile, Files
from offload.io_loop import IoFuture
from offload.memory.host_memory import map_host, tensor_over
from offload.sizes import PAGE_BYTES, align_up

BLOCK_BYTES = 4 << 20  # Size of one write.
BLOCKS = 4  # One is filled while the others are written.


class WriteStream:
    """Writes a new file from its first byte to its last; the last write is padded to a page.

    `file`: empty, or with room reserved; it stays open.
    """

    def __init__(self, files: Files, file: DurableFile) -> None:
        self._files, self._file = files, file
        self._free = [tensor_over(map_host(BLOCK_BYTES)) for _ in range(BLOCKS)]
        self._aio, self._io_loop = open_aio_loop(AioOptions())
        self._filled_bytes = self._offset = 0
        self._writes: deque[tuple[IoFuture[None], torch.Tensor, int, int]] = deque()

    def append(self, data: torch.Tensor) -> None:
        """Append bytes: uint8, 1-D, on the host; they are copied.

        Raises StorageError: a write has failed; later bytes are not written.
        """
        position = 0
        while position < data.numel():
            count = min(data.numel() - position, BLOCK_BYTES - self._filled_bytes)
            self._free[-1][self._filled_bytes : self._filled_bytes + count] = data[position : position + count]
            self._filled_bytes, position = self._filled_bytes + count, position + count
            if self._filled_bytes == BLOCK_BYTES:
                self._flush()

    def finish(self) -> None:
        """Write the last bytes, and wait for all writes. Raises StorageError."""
        if self._filled_bytes:
            self._flush()
        while self._writes:
            self._finish_oldest()

    def close(self) -> None:
        """Wait until no write is in flight; end the threads and free the memory. Idempotent."""
        while self._writes:
            self._writes.popleft()[0].wait()
        self._io_loop.close()
        self._aio.close()
        self._free = []

    def _flush(self) -> None:
        """Start to write the filled block; wait for earlier writes if no block is free."""
        block, nbytes = self._free.pop(), align_up(self._filled_bytes, PAGE_BYTES)
        job = self._aio.write(self._file.fd, self._offset, block[:nbytes], str(self._file.path))
        future = self._io_loop.submit(f"writing {self._file.path}", job)
        self._writes.append((future, block, self._offset, nbytes))
        self._offset += nbytes
        self._filled_bytes = 0
        while not self._free or (self._writes and not self._file.direct):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest write."""
        future, block, offset, nbytes = self._writes.popleft()
        self._free.insert(0, block)
        future.result()
        self._files.on_write(self._file, offset, block[:nbytes])
        if not self._file.direct:  # drop pages from the cache once the disk has them: a memory cgroup counts them
            os.fdatasync(self._file.fd)
            os.posix_fadvise(self._file.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
