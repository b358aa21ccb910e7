"""Sources to load from: tensors by name, read by range. Our own folders and those of DeepSpeed are two kinds."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offload.errors import ConfigError, DamagedError
from offload.files.archives import bytes_tensor, read_archive
from offload.files.box_reader import BoxReader, StoredBox
from offload.files.durable import Files
from offload.kernels import kernels
from offload.system.regular_files import report_read_errors
from zero.checkpoint.dcp_format import (
    MANIFEST_FILE,
    METADATA_FILE,
    RUN_BYTES,
    FileBox,
    Manifest,
    begin_of,
    is_contiguous,
    read_metadata,
)

# Names of objects that are no tensors: the common state of all ranks, the users' objects, and "rank.K" of each rank.
STATE, CLIENT, RANK = "state", "client", "rank"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: torch.Size
    dtype: torch.dtype


VALID_READS = 3
"""The result of a read stays valid during so many further reads."""


class Source(Protocol):
    """Values by name.

    `tensors`: name -> shape and dtype. Names are `model.NAME`, `optim.state.NAME.step`, and for Adam `.exp_avg` and
    `.exp_avg_sq`; other optimizers have states of other names. `blobs`: names of objects that are no tensors.
    """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def blobs(self) -> frozenset[str]: ...

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of the flattened tensor, 1-D, on the host, in the saved dtype.

        Valid during `VALID_READS` further reads. Raises StorageError: a read failed; ConfigError: the data is damaged.
        """

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Announce the (name, begin, end) of all reads, in their order, so that the source can prefetch them."""

    def blob(self, name: str, *, trusted: bool = False) -> Any:
        """The object of that name, one of `blobs`.

        Raises ConfigError: it is damaged, or it has a class that is only loaded with `trusted`, which runs code that
        the folder names.
        """

    def close(self) -> None:
        """Close all files. Idempotent."""


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint to load from; close it, or use it as a context."""

    folder: Path
    source: Source
    state: dict[str, Any]  # The common state of all ranks.
    tag: str = ""  # Only of our own checkpoints.

    def client(self, trusted: bool) -> dict[str, Any]:
        """`client_state` and `lr_scheduler`; ours may have `extra_states`. Raises as `Source.blob`."""
        client: dict[str, Any] = self.source.blob(CLIENT, trusted=trusted)
        return client

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """The state of one rank; None if there was no such rank."""
        name = f"{RANK}.{rank}"
        return self.source.blob(name) if name in self.source.blobs else None

    def close(self) -> None:
        """Close all files. Idempotent."""
        self.source.close()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Box:
    begin: int  # Range of its elements in the flattened tensor.
    end: int
    stored: StoredBox


class FolderSource:
    """A `Source` over one checkpoint folder. Every box that is read is verified by its checksum.

    Raises ConfigError: the metadata is damaged, or does not fit the manifest; names the file and the tensor.
    `manifest`: of the folder, already checked.
    """

    def __init__(self, folder: Path, manifest: Manifest, files: Files) -> None:
        self.folder, self._manifest = folder, manifest
        with report_read_errors(folder):
            largest = self._read_description(files)
        self._reader = BoxReader([folder / name for name in self._names], min(largest, RUN_BYTES), files)

    def _read_description(self, files: Files) -> int:
        """Read and check the metadata; returns the bytes of the largest box."""
        folder, manifest = self.folder, self._manifest
        path = folder / METADATA_FILE
        data = files.read_bytes(path)
        for offset, nbytes, crc in manifest.files[METADATA_FILE].boxes if METADATA_FILE in manifest.files else ():
            if kernels.crc32c(bytes_tensor(data[offset : offset + nbytes])) != crc:
                raise DamagedError(f"{path} is damaged: its checksum is not the one in {MANIFEST_FILE}")
        self._names = sorted(manifest.files)
        payloads = {name: [box[0] for box in manifest.files[name].boxes] for name in self._names}
        tensors: dict[str, TensorInfo] = {}
        self._boxes: dict[str, list[_Box]] = {}
        self._blobs: dict[str, StoredBox] = {}
        for file, box in read_metadata(data, str(path)):
            stored = self._find_payload(file, box, payloads)
            if box.dtype is None:
                self._blobs[box.name] = stored
                continue
            tensors[box.name] = saved = TensorInfo(torch.Size(box.shape), getattr(torch, box.dtype))
            flat = self._flat_box(box, stored)
            if stored.nbytes != (flat.end - flat.begin) * saved.dtype.itemsize:
                raise ConfigError(
                    f"{folder}: {box.name}: {flat.end - flat.begin:,} elements of {saved.dtype} do not take the "
                    f"{stored.nbytes:,} bytes that the manifest names"
                )
            self._boxes.setdefault(box.name, []).append(flat)
        self.tensors: Mapping[str, TensorInfo] = tensors
        for name in tensors:
            self._check_complete(name)
        return max((box[1] for name in self._names for box in manifest.files[name].boxes), default=0)

    @property
    def blobs(self) -> frozenset[str]:
        return frozenset(self._blobs)

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        boxes, dtype = list(self._overlapping(name, begin, end)), self.tensors[name].dtype
        bounds = [(max(begin, box.begin) - box.begin, min(end, box.end) - box.begin) for box in boxes]
        if len(boxes) == 1:
            (lo, hi), (box,) = bounds[0], boxes
            return self._reader.get(box.stored).view(dtype)[lo:hi]
        size = dtype.itemsize
        parts = [(box.stored, lo * size, hi * size) for box, (lo, hi) in zip(boxes, bounds, strict=True)]
        return self._reader.get_parts(parts).view(dtype)

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        boxes = (box.stored for name, begin, end in ranges for box in self._overlapping(name, begin, end))
        self._reader.prefetch(boxes)

    def blob(self, name: str, *, trusted: bool = False) -> Any:
        """The object that was saved with torch.save under `name`. Raises ConfigError: there is none, too."""
        if name not in self._blobs:
            raise ConfigError(f"{self.folder}: the checkpoint has no {name!r}; it has {', '.join(sorted(self._blobs))}")
        with report_read_errors(self.folder):
            data = self._reader.get(self._blobs[name])
            content = read_archive(data, f"{name} in {self.folder}", trusted=trusted)
        if not isinstance(content, dict):
            raise ConfigError(f"{name} in {self.folder}: expected a dict, got {type(content).__name__}")
        return content

    def close(self) -> None:
        self._reader.close()

    def _overlapping(self, name: str, begin: int, end: int) -> Iterator[_Box]:
        boxes = self._boxes.get(name)
        if boxes is None:
            raise ConfigError(f"{self.folder}: the checkpoint has no tensor {name!r}")
        first = max(bisect_right(boxes, begin, key=lambda box: box.begin) - 1, 0)
        for box in boxes[first:]:
            if box.begin >= end:
                return
            if box.end > begin:
                yield box

    def _flat_box(self, box: FileBox, stored: StoredBox) -> _Box:
        if not is_contiguous(box.shape, box.sizes):
            raise ConfigError(
                f"{self.folder}: {box.name}: a box of {box.sizes} is not contiguous in {box.shape}; only checkpoints "
                "that an engine saved can be read"
            )
        begin = begin_of(box.shape, box.offsets)
        return _Box(begin, begin + math.prod(box.sizes), stored)

    def _check_complete(self, name: str) -> None:
        """Sort a tensor's boxes; raise ConfigError if an element is in none or in two."""
        boxes, position = sorted(self._boxes[name], key=lambda box: (box.begin, box.end)), 0
        for box in boxes:
            if box.begin != position:
                raise ConfigError(f"{self.folder}: {name}: elements {position:,} to {box.begin:,} are missing")
            position = box.end
        if position != self.tensors[name].shape.numel():
            raise ConfigError(f"{self.folder}: {name}: elements from {position:,} on are missing")
        self._boxes[name] = [box for box in boxes if box.begin < box.end]

    def _find_payload(self, file: str, box: FileBox, payloads: Mapping[str, list[int]]) -> StoredBox:
        positions = payloads.get(file, [])
        index = bisect_left(positions, box.begin)
        if index == len(positions) or positions[index] >= box.begin + box.nbytes:
            raise ConfigError(f"{self.folder}: the manifest does not say where {box.name} is")
        return StoredBox(self._names.index(file), *self._manifest.files[file].boxes[index])
