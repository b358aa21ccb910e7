"""Initial values, kept on disk until the layout is known.

While a model is being built, its layout is not known yet. Its parameters are spilled to one file
without a name as soon as their constructor returns, and read back by range when the tiered arrays exist. The ranks of
one node share the file, see `shared_init_file`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError, StorageError
from offload.io.swapfile import check_folder
from offload.sizes import PAGE_BYTES, align_up
from offload.system.linux import memory_file, nameless_file, punch_hole


class InitFile:
    """An append-only file without a name; its space is freed by `free` or `close`, or when the process ends.

    Args:
        descriptor: of a file that has no name; this object owns it from now on.
        where: the folder of the file, or a description of its place.
        can_free_parts: see below; None: it is tried, on the file while it is empty.

    Attributes:
        descriptor: of the file; -1 once closed.
        can_free_parts: the file system can free parts of the file before it is closed.
    """

    def __init__(self, descriptor: int, where: Path | str, can_free_parts: bool | None = None) -> None:
        self.descriptor, self.where = descriptor, where
        self._end_bytes = 0
        self.can_free_parts = _can_punch(descriptor) if can_free_parts is None else can_free_parts

    @classmethod
    def on_disk(cls, paths: Sequence[Path | str]) -> InitFile:
        """A file in the first of the folders. Raises ConfigError when nothing can be stored there."""
        if not paths:
            raise ConfigError("initial values: nvme_path is empty; give at least one folder")
        folder = check_folder(paths[0])
        return cls(nameless_file(folder, direct=False)[0], folder)

    @classmethod
    def in_memory(cls) -> InitFile:
        """A file in host memory, which another process can read. Raises OSError: the kernel has no such files."""
        return cls(memory_file(), "host memory")

    def append(self, values: torch.Tensor) -> int:
        """Store a tensor's bytes; returns their offset. Raises StorageError: the file system has no room."""
        offset = self.reserve(values.numel() * values.element_size())
        self.write(offset, values)
        return offset

    def reserve(self, nbytes: int) -> int:
        """Set the next `nbytes` aside; returns their offset. Another process may write them."""
        offset = self._end_bytes
        self._end_bytes += nbytes
        return offset

    def write(self, offset: int, values: torch.Tensor) -> None:
        """Overwrite the bytes at `offset`. Raises StorageError."""
        data = _bytes_of(values.detach().cpu().contiguous())
        position = 0
        while position < len(data):
            try:
                position += os.pwrite(self.descriptor, data[position : position + (64 << 20)], offset + position)
            except OSError as error:
                raise StorageError.from_os_error(
                    error, "spilling initial values", self.where, offset + position
                ) from error
        # Drop the bytes from the page cache: they are not needed there, and a memory cgroup would count them.
        os.posix_fadvise(self.descriptor, offset, len(data), os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements of `dtype` stored at `offset`. Raises StorageError."""
        return read_tensor(self.descriptor, offset, numel, dtype, "reading initial values", self.where)

    def free(self, offset: int, nbytes: int) -> None:
        """These bytes are not read any more: the space of the whole pages in them is freed."""
        begin, end = align_up(offset, PAGE_BYTES), (offset + nbytes) // PAGE_BYTES * PAGE_BYTES
        if self.can_free_parts and self.descriptor >= 0 and begin < end:
            punch_hole(self.descriptor, begin, end - begin)

    @property
    def device(self) -> int:
        """Number of the file system's device."""
        return os.fstat(self.descriptor).st_dev

    def close(self) -> None:
        """Free the space. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def read_tensor(fd: int, offset: int, numel: int, dtype: torch.dtype, what: str, where: Path | str) -> torch.Tensor:
    """`numel` elements of `dtype` at byte `offset` of a file, 1-D; see `read_into`."""
    out = torch.empty(numel, dtype=dtype, device="cpu")
    read_into(fd, offset, out, what, where)
    return out


def read_into(fd: int, offset: int, out: torch.Tensor, what: str, where: Path | str) -> None:
    """Fill `out`, contiguous, from byte `offset` of a file.

    The bytes are then dropped from the page cache, since a memory cgroup would count them. Raises StorageError, of
    `what` at `where`.
    """
    data, position = _bytes_of(out), 0
    while position < len(data):
        try:
            count = os.preadv(fd, [data[position : position + (64 << 20)]], offset + position)
        except OSError as error:
            raise StorageError.from_os_error(error, what, where, offset + position) from error
        if count == 0:
            raise StorageError.from_os_error(OSError(errno.ENODATA, "end of file"), what, where, offset + position)
        position += count
    os.posix_fadvise(fd, offset, len(data), os.POSIX_FADV_DONTNEED)


def _bytes_of(values: torch.Tensor) -> memoryview:
    array: Any = values.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _can_punch(fd: int) -> bool:
    try:
        punch_hole(fd, 0, PAGE_BYTES)
    except OSError:
        return False
    return True
