"""A checkpoint folder, read: its tensors by name and range, and the small things beside them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.archives import bytes_tensor, read_archive
from offload.errors import ConfigError, DamagedError
from offload.files.box_reader import BoxReader, StoredBox
from offload.files.durable import Files
from offload.kernels import kernels
from zero.checkpoint import torch_metadata as dcp
from zero.checkpoint.boxes import begin_of, is_flat
from zero.checkpoint.extents import RUN_BYTES
from zero.checkpoint.manifest import NAME, Manifest
from zero.checkpoint.metadata import METADATA_FILE, read_metadata
from zero.checkpoint.source import Saved

STATE, CLIENT, RANK = "state", "client", "rank"
"""Names of what is no tensor: common to all ranks, any object that users gave, and "rank.K" of each rank's own."""


@dataclass(frozen=True, slots=True)
class _Box:
    begin: int
    """Of its elements in the flattened tensor."""
    end: int
    stored: StoredBox


class FolderSource:
    """A `Source` over one checkpoint folder. Every box that is read is held against its checksum.

    Args:
        folder: of the checkpoint.
        manifest: of the folder, checked.
        files: the disk.

    Raises:
        ConfigError: the metadata is damaged, or does not fit the manifest; names the file and the tensor.
    """

    def __init__(self, folder: Path, manifest: Manifest, files: Files) -> None:
        self.folder, self._manifest = folder, manifest
        path = folder / METADATA_FILE
        data = files.read_bytes(path)
        for offset, nbytes, crc in manifest.files[METADATA_FILE].boxes if METADATA_FILE in manifest.files else ():
            if kernels.crc32c(bytes_tensor(data[offset : offset + nbytes])) != crc:
                raise DamagedError(f"{path} is damaged: it has not the checksum that {NAME} says")
        self._metadata = read_metadata(data, str(path))
        self._names = sorted(manifest.files)
        payloads = {name: [box[0] for box in manifest.files[name].boxes] for name in self._names}
        self.tensors: Mapping[str, Saved] = {
            name: Saved(torch.Size(told.size), told.properties.dtype)
            for name, told in self._metadata.state_dict_metadata.items()
            if isinstance(told, dcp.TensorStorageMetadata)
        }
        self._boxes = {name: self._boxes_of(name, self._metadata, payloads) for name in self.tensors}
        self._blobs = {
            name: self._stored(dcp.MetadataIndex(name), payloads)
            for name, told in self._metadata.state_dict_metadata.items()
            if not isinstance(told, dcp.TensorStorageMetadata)
        }
        largest = max((box[1] for name in self._names for box in manifest.files[name].boxes), default=0)
        self._reader = BoxReader([folder / name for name in self._names], min(largest, RUN_BYTES), files)

    @property
    def blobs(self) -> frozenset[str]:
        """Names of what is no tensor."""
        return frozenset(self._blobs)

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """See `Source`."""
        boxes, dtype = list(self._overlapping(name, begin, end)), self.tensors[name].dtype
        bounds = [(max(begin, box.begin) - box.begin, min(end, box.end) - box.begin) for box in boxes]
        if len(boxes) == 1:
            (lo, hi), (box,) = bounds[0], boxes
            return self._reader.get(box.stored).view(dtype)[lo:hi]
        size = dtype.itemsize
        parts = [(box.stored, lo * size, hi * size) for box, (lo, hi) in zip(boxes, bounds, strict=True)]
        return self._reader.get_parts(parts).view(dtype)

    def expect(self, wanted: Iterable[tuple[str, int, int]]) -> None:
        """See `Source`."""
        boxes = (box.stored for name, begin, end in wanted for box in self._overlapping(name, begin, end))
        self._reader.expect(boxes)

    def blob(self, name: str, *, trusted: bool = False) -> Any:
        """What was saved with torch.save under `name`.

        Args:
            name: one of `blobs`.
            trusted: objects of any class may be made, which runs code that the file names.

        Raises:
            ConfigError: there is none, or it is damaged, or it holds what only `trusted` may make.
        """
        if name not in self._blobs:
            raise ConfigError(f"{self.folder}: it has no {name!r}; it has {', '.join(sorted(self._blobs))}")
        data = self._reader.get(self._blobs[name])
        return read_archive(data, f"{name} in {self.folder}", trusted=trusted)

    def close(self) -> None:
        """See `Source`."""
        self._reader.close()

    def _overlapping(self, name: str, begin: int, end: int) -> Iterator[_Box]:
        boxes = self._boxes.get(name)
        if boxes is None:
            raise ConfigError(f"{self.folder}: it has no tensor {name!r}")
        first = max(bisect_right(boxes, begin, key=lambda box: box.begin) - 1, 0)
        for box in boxes[first:]:
            if box.begin >= end:
                return
            if box.end > begin:
                yield box

    def _boxes_of(self, name: str, metadata: dcp.Metadata, payloads: Mapping[str, list[int]]) -> list[_Box]:
        told = metadata.state_dict_metadata[name]
        if not isinstance(told, dcp.TensorStorageMetadata):
            raise ConfigError(f"{self.folder}: {name} is no tensor")
        boxes = []
        for chunk in told.chunks:
            if not is_flat(told.size, chunk.sizes):
                raise ConfigError(
                    f"{self.folder}: {name}: a box of {tuple(chunk.sizes)} is not contiguous in {tuple(told.size)}; "
                    "only checkpoints that an engine has saved are read here"
                )
            begin = begin_of(told.size, chunk.offsets)
            stored = self._stored(dcp.MetadataIndex(name, chunk.offsets), payloads)
            boxes.append(_Box(begin, begin + chunk.sizes.numel(), stored))
        boxes.sort(key=lambda box: (box.begin, box.end))
        position = 0
        for box in boxes:
            if box.begin != position:
                raise ConfigError(f"{self.folder}: {name}: elements {position:,} to {box.begin:,} are missing")
            position = box.end
        if position != told.size.numel():
            raise ConfigError(f"{self.folder}: {name}: elements from {position:,} on are missing")
        return [box for box in boxes if box.begin < box.end]

    def _stored(self, index: dcp.MetadataIndex, payloads: Mapping[str, list[int]]) -> StoredBox:
        """Where the payload of an archive is."""
        info = self._metadata.storage_data.get(index)
        known = payloads.get(info.relative_path) if info is not None else None
        at = bisect_left(known, info.offset) if known is not None and info is not None else 0
        if known is None or info is None or at == len(known) or known[at] >= info.offset + info.length:
            raise ConfigError(f"{self.folder}: the manifest does not say where {index.fqn} is")
        offset, nbytes, crc = self._manifest.files[info.relative_path].boxes[at]
        return StoredBox(self._names.index(info.relative_path), offset, nbytes, crc)
