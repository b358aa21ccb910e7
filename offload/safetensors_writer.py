"""Safetensors files, written in one pass: no more of a model is in memory than a few blocks, nor in the page cache.

A file is written under a name of its own, beside, past the page cache where the file system allows it. Files of one
model appear together: their index goes first and comes last, so what is there of a broken attempt is no model.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EINVAL, ENOSPC
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError, StateError, StorageError
from offload.safetensors_file import DTYPES
from offload.sizes import PAGE_BYTES, align_up
from offload.swapfile import free_bytes

NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK_BYTES = 4 << 20
"""Of one write. There are two blocks: one is filled while the other is written."""
METADATA = {"format": "pt"}
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file to be written."""

    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return self.shape.numel() * self.dtype.itemsize


def in_file_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Wide dtypes first, else as given: so every tensor begins at a multiple of its element, as readers ask for."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def header_of(tensors: Sequence[Tensor]) -> bytes:
    """Length and header of a file; the values begin on a page.

    Raises:
        ConfigError: a dtype that such files cannot hold.
    """
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for tensor in tensors:
        if tensor.dtype not in NAMES:
            raise ConfigError(
                f"{tensor.name}: {tensor.dtype} cannot be written to a safetensors file; expected one of "
                f"{', '.join(map(str, NAMES))}"
            )
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    padded_bytes = align_up(8 + len(text), PAGE_BYTES) - 8
    return padded_bytes.to_bytes(8, "little") + text.ljust(padded_bytes)


class SafetensorsWriter:
    """One file in the making.

    Args:
        path: its final name.
        tensors: in the order in which their values will come; see `in_file_order`.

    Attributes:
        draft: where it is written until `publish`.
        nbytes: length of the whole file.

    Raises:
        ConfigError: a dtype that such files cannot hold.
        StorageError: the file cannot be created.
    """

    def __init__(self, path: Path, tensors: Sequence[Tensor]) -> None:
        self.path, self.draft = path, draft_of(path)
        header = header_of(tensors)
        self.nbytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        self._coming = iter([tensor for tensor in tensors if tensor.nbytes])
        self._current: Tensor | None = next(self._coming, None)
        self._missing_numel = self._current.shape.numel() if self._current else 0
        self._blocks = [mmap.mmap(-1, BLOCK_BYTES), mmap.mmap(-1, BLOCK_BYTES)]
        self._filled_bytes = self._offset = 0
        self._thread = ThreadPoolExecutor(1, "zero-infinity weights")
        self._writing: Future[None] | None = None
        self._fd = -1
        try:
            self._fd, self._direct = self._open()
            self._take(memoryview(header))
        except BaseException:
            self.abandon()
            raise

    def append(self, values: torch.Tensor) -> None:
        """The next values of the tensor whose turn it is, of its dtype, on the host; any shape.

        Raises:
            StateError: another dtype, or more than are missing.
            StorageError: this write, or one before, has failed.
        """
        if not values.numel():
            return
        tensor = self._current
        if tensor is None or values.dtype != tensor.dtype or values.numel() > self._missing_numel:
            expected = f"up to {self._missing_numel:,} of {tensor.name}, {tensor.dtype}" if tensor else "nothing"
            raise StateError(f"{self.path}: expected {expected}, got {values.numel():,} elements of {values.dtype}")
        array: Any = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
        self._take(memoryview(array))
        self._missing_numel -= values.numel()
        if not self._missing_numel:
            self._current = next(self._coming, None)
            self._missing_numel = self._current.shape.numel() if self._current else 0

    def finish(self) -> None:
        """Everything has come: write the rest, and wait until the disk has all of it.

        Raises:
            StateError: values are missing.
            StorageError: a write has failed.
        """
        if self._current is not None:
            raise StateError(f"{self.path}: {self._missing_numel:,} elements of {self._current.name} are missing")
        if self._filled_bytes:
            self._flush()
        self._settle()
        with self._failing("writing"):
            os.ftruncate(self._fd, self.nbytes)
            os.fsync(self._fd)
        self._close()

    def publish(self) -> None:
        """After `finish`: give it its name. Raises StorageError."""
        with self._failing("renaming"):
            os.replace(self.draft, self.path)

    def abandon(self) -> None:
        """Remove what has been written, unless it is published. Idempotent."""
        if self._writing is not None:
            self._writing.exception()
            self._writing = None
        self._close()
        with suppress(OSError):
            os.unlink(self.draft)

    def _open(self) -> tuple[int, bool]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with self._failing("creating"):
            try:
                return os.open(self.draft, flags | os.O_DIRECT, 0o666), True
            except OSError as error:
                # tmpfs and some network file systems have no O_DIRECT; the page cache then sits between.
                if error.errno != EINVAL:
                    raise
                return os.open(self.draft, flags, 0o666), False

    def _take(self, data: memoryview) -> None:
        """Copy to the block; write it as often as it is full."""
        position = 0
        while position < len(data):
            count = min(len(data) - position, BLOCK_BYTES - self._filled_bytes)
            end = self._filled_bytes + count
            self._blocks[0][self._filled_bytes : end] = data[position : position + count]
            self._filled_bytes, position = end, position + count
            if end == BLOCK_BYTES:
                self._flush()

    def _flush(self) -> None:
        self._settle()
        size = align_up(self._filled_bytes, PAGE_BYTES)
        self._writing = self._thread.submit(self._write, memoryview(self._blocks[0])[:size], self._offset)
        self._offset += size
        self._filled_bytes = 0
        self._blocks.reverse()

    def _settle(self) -> None:
        """Wait for the write that is under way."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, data: memoryview, offset: int) -> None:
        with data, self._failing("writing", offset):
            position = 0
            while position < len(data):
                position += os.pwrite(self._fd, data[position:], offset + position)
            if not self._direct:  # pages are given back once the disk has them: a memory cgroup counts them
                os.fdatasync(self._fd)
                os.posix_fadvise(self._fd, offset, len(data), os.POSIX_FADV_DONTNEED)

    def _close(self) -> None:
        self._thread.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @contextmanager
    def _failing(self, doing: str, offset: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _failure(f"{doing} {self.path.name}", error, self.draft, offset) from error


class WeightsDraft:
    """The files of one model, which appear in a folder together.

    Args:
        folder: made if it is not there.
        stem: what their names begin with: STEM.safetensors, or STEM-00001-of-00003.safetensors and
            STEM.safetensors.index.json. Such files of an earlier model are replaced.
        expected_bytes: of all files together.

    Raises:
        StorageError: the folder cannot be made, or the file system has less room than that.
    """

    def __init__(self, folder: Path, stem: str, expected_bytes: int) -> None:
        self._folder, self._stem = folder, stem
        self._files: list[SafetensorsWriter] = []
        with _failing_in(folder, "making the folder of"):
            folder.mkdir(parents=True, exist_ok=True)
            for path in self._present(rf"\.{re.escape(stem)}.*\.partial"):
                path.unlink()
            room = free_bytes(folder)
        if room < expected_bytes:
            raise StorageError(
                f"writing {expected_bytes:,} bytes of weights",
                errno=ENOSPC,
                path=str(folder),
                offset=0,
                free_bytes=room,
            )

    def file(self, name: str, tensors: Sequence[Tensor]) -> SafetensorsWriter:
        """The next file. Raises StorageError."""
        file = SafetensorsWriter(self._folder / name, tensors)
        self._files.append(file)
        return file

    def publish(self, index: dict[str, Any] | None) -> None:
        """All files are finished: they and the index get their names, and what an earlier model left is removed.

        Raises:
            StorageError: some may have their names already; without an index they are no model.
        """
        place = self._folder / f"{self._stem}{SUFFIX}.index.json"
        names = {file.path.name for file in self._files}
        stem = re.escape(self._stem)
        with _failing_in(self._folder, "publishing"):
            place.unlink(missing_ok=True)
            if index is not None:  # shards of two models under one index would look like one model
                (self._folder / f"{self._stem}{SUFFIX}").unlink(missing_ok=True)
            for file in self._files:
                file.publish()
            if index is not None:
                draft = draft_of(place)
                _write_text(draft, json.dumps(index, indent=2, sort_keys=True) + "\n")
                os.replace(draft, place)
            for path in self._present(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors"):
                if path.name not in names:
                    path.unlink()
            _sync_folder(self._folder)

    def abandon(self) -> None:
        """Remove what has not been published. Idempotent."""
        for file in self._files:
            file.abandon()

    def _present(self, pattern: str) -> list[Path]:
        return [path for path in self._folder.iterdir() if re.fullmatch(pattern, path.name)]


def draft_of(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f".{path.name}.partial")


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _failing_in(folder: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _failure(f"{doing} weights", error, folder, 0) from error


def _failure(what: str, error: OSError, path: Path, offset: int) -> StorageError:
    room = None
    with suppress(OSError):
        room = free_bytes(path.parent)
    return StorageError(what, errno=error.errno or 0, path=str(path), offset=offset, free_bytes=room)
