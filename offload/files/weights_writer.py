"""Files of weights, written in one pass: only a few blocks of a model are in memory and in the page cache.

They are safetensors files or, if their suffix says so, torch.save archives of a state dict.

A file is first written next to its place under a temporary name, with O_DIRECT if the file system allows it. Files of
one model appear together: the old index is removed first and the new one is written last, so the remains of a failed
attempt are no model.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError, StateError, StorageError
from offload.files.archives import archive_framing, bytes_tensor
from offload.files.durable import DurableFile, Files
from offload.files.safetensors_file import DTYPES
from offload.io.aio import AioOptions, open_aio_loop
from offload.io.io_loop import IoFuture
from offload.memory.host_memory import map_host, tensor_over
from offload.sizes import PAGE_BYTES, align_up

NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = {"format": "pt"}
SUFFIX = ".safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")  # Suffixes of torch.save archives.
DRAFT = ".partial"  # Suffix of a file's name while it is written; the name also begins with a dot.
BLOCK_BYTES = 4 << 20  # Size of one write.
BLOCKS = 4  # One is filled while the others are written.
WAIT_SECONDS = 3600.0  # How long a writer waits for another process: every rank may convert the same checkpoint.


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: torch.dtype
    shape: torch.Size
    aliases: tuple[str, ...] = ()  # Further names, for archives of torch.save; safetensors hold one name.

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def in_file_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Wide dtypes first, else in the same order: so every tensor is aligned to its elements, as readers require."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def header_of(tensors: Sequence[Tensor]) -> bytes:
    """Length and header of a file; the values begin on a page.

    Raises ConfigError: a dtype that such files cannot hold.
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
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    padded_bytes = align_up(8 + len(text), PAGE_BYTES) - 8
    return padded_bytes.to_bytes(8, "little") + text.ljust(padded_bytes)


def file_framing(suffix: str, tensors: Sequence[Tensor]) -> list[bytes]:
    """The bytes of a file before the values of each tensor, and after those of the last one.

    Raises ConfigError: a dtype that such files cannot hold.
    """
    if suffix not in PICKLE_SUFFIXES:
        return [header_of(tensors), *[b""] * len(tensors)]
    placeholders = {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors}
    aliases = {alias: placeholders[tensor.name] for tensor in tensors for alias in tensor.aliases}
    return archive_framing(
        {**placeholders, **aliases}, list(placeholders.values()), lambda loaded: [loaded[name] for name in placeholders]
    )


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


class WeightsWriter:
    """Writes one file: safetensors, or a torch.save archive if its suffix is one of `PICKLE_SUFFIXES`.

    Raises ConfigError: a dtype that such files cannot hold; StorageError: the file cannot be created, or there is no
    room for it.

    Args:
        tensors: in the order in which their values will be appended; see `in_file_order`.

    Attributes:
        draft: the temporary path of the file until `publish`.
    """

    def __init__(self, files: Files, path: Path, tensors: Sequence[Tensor]) -> None:
        self._files, self.path, self.draft = files, path, path.with_name(f".{path.name}{DRAFT}")
        self._framing = file_framing(path.suffix, tensors)
        self._nbytes = sum(map(len, self._framing)) + sum(tensor.nbytes for tensor in tensors)
        self._remaining = iter(zip(tensors, self._framing, strict=False))
        self._current: Tensor | None = None
        self._missing_numel = 0
        files.remove(self.draft)
        self._file = files.create(self.draft, align_up(self._nbytes, PAGE_BYTES))
        self._stream: WriteStream | None = None
        try:
            self._stream = WriteStream(files, self._file)
            self._next_tensor()
        except BaseException:
            self.abandon()
            raise

    def append(self, values: torch.Tensor) -> None:
        """Append values of the current tensor, in its dtype, on the host, of any shape.

        Raises StateError: other dtype, or more values than missing; StorageError: this or an earlier write failed.
        """
        if not values.numel():
            return
        tensor = self._current
        if tensor is None or values.dtype != tensor.dtype or values.numel() > self._missing_numel:
            expected = f"up to {self._missing_numel:,} of {tensor.name}, {tensor.dtype}" if tensor else "nothing"
            raise StateError(f"{self.path}: expected {expected}, got {values.numel():,} elements of {values.dtype}")
        self._open_stream().append(values.detach().contiguous().view(-1).view(torch.uint8))
        self._missing_numel -= values.numel()
        if not self._missing_numel:
            self._next_tensor()

    def finish(self) -> None:
        """After the last values: write the last bytes, and wait until the disk has all bytes.

        Raises StateError: values are missing; StorageError: a write has failed.
        """
        if self._current is not None:
            raise StateError(
                f"{self.path}: {self._missing_numel:,} elements of {self._current.name} have not been written"
            )
        self._open_stream().finish()
        self._file.truncate(self._nbytes)
        self._file.sync()
        self._close()

    def publish(self) -> None:
        """After `finish`: rename the draft to its final path durably. Raises StorageError."""
        self._files.rename(self.draft, self.path)

    def abandon(self) -> None:
        """Remove the draft, unless it is published. Idempotent."""
        self._close()
        with suppress(StorageError):  # the user must get the earlier error
            self._files.remove(self.draft)

    def _next_tensor(self) -> None:
        """Write the bytes before the next tensor that is not empty, or those after the last tensor."""
        self._current, self._missing_numel = None, 0
        while self._current is None:
            tensor, before = next(self._remaining, (None, self._framing[-1]))
            if before:
                self._open_stream().append(bytes_tensor(before))
            if tensor is None:
                return
            if tensor.nbytes:
                self._current, self._missing_numel = tensor, tensor.shape.numel()

    def _open_stream(self) -> WriteStream:
        if self._stream is None:
            raise StateError(f"{self.path}: the file is finished")
        return self._stream

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._file.close()


class WeightsDraft:
    """The files of one model, which appear in a folder together.

    The folder is locked until `abandon`: processes that write into one folder take turns. Raises StateError: another
    process was writing there during all of WAIT_SECONDS; StorageError: the folder cannot be made, or the file system
    has less room than `expected_bytes`.

    Args:
        folder: made if it does not exist.
        stem: first part of the names: STEM.safetensors, or STEM-00001-of-00003.safetensors and
            STEM.safetensors.index.json. Such files of an earlier model are replaced.
        expected_bytes: of all files together.
        suffix: instead of .safetensors.
    """

    def __init__(
        self, folder: Path, stem: str, expected_bytes: int, files: Files | None = None, *, suffix: str = SUFFIX
    ) -> None:
        self._folder, self._stem, self._files = folder, re.escape(stem), files or Files()
        self._suffix = re.escape(suffix)
        self._index = folder / f"{stem}{suffix}.index.json"
        self._drafts: list[WeightsWriter] = []
        self._files.make_folder(folder)
        self._lock = self._files.lock_folder(folder, WAIT_SECONDS)
        if self._lock is None:
            raise StateError(
                f"{folder}: another process has been writing weights there for {WAIT_SECONDS:.0f} s; end it, or "
                "choose another folder"
            )
        with ExitStack() as undo:
            undo.callback(self._lock.close)
            self._begin(expected_bytes)
            undo.pop_all()

    def _begin(self, expected_bytes: int) -> None:
        folder = self._folder
        for name in self._matching_names(rf"\.?{self._stem}(-.*)?{self._suffix}(\.index\.json)?\.partial(-\d+)?"):
            self._files.remove(folder / name)  # left by a writer that was killed
        room = self._files.free_bytes(folder)
        if room < expected_bytes:
            doing = f"writing {expected_bytes:,} bytes of weights"
            raise StorageError(doing, errno=ENOSPC, path=str(folder), offset=0, free_bytes=room)

    def file(self, name: str, tensors: Sequence[Tensor]) -> WeightsWriter:
        """The next file. Raises StorageError."""
        file = WeightsWriter(self._files, self._folder / name, tensors)
        self._drafts.append(file)
        return file

    def publish(self, index: dict[str, Any] | None) -> None:
        """After all files are finished: rename them, write the index, and remove other files of an earlier model.

        At any moment the folder has the earlier or the new model; or, if both have shards of the same names, shards
        without an index, which are no model. Raises StorageError: the folder has the earlier model, the new one or
        none.
        """
        names = {file.path.name for file in self._drafts}
        if index is not None and names & set(self._files.listing(self._folder)):
            self._files.remove(self._index)
        for file in self._drafts:
            file.publish()
        if index is not None:
            self._files.write_bytes(self._index, json.dumps(index, indent=2, sort_keys=True) + "\n")
        else:
            self._files.remove(self._index)
        for name in self._matching_names(rf"{self._stem}(-\d{{5}}-of-\d{{5}})?{self._suffix}"):
            if name not in names:
                self._files.remove(self._folder / name)

    def abandon(self) -> None:
        """Remove the files that are not published, and free the lock. Idempotent."""
        with ExitStack() as steps:  # runs all steps, also if one of them raises
            if self._lock is not None:
                steps.callback(self._lock.close)
            for file in self._drafts:
                steps.callback(file.abandon)

    def _matching_names(self, pattern: str) -> list[str]:
        return [name for name in self._files.listing(self._folder) if re.fullmatch(pattern, name)]
