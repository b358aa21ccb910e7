"""The form of a checkpoint on the disk: that of torch.distributed.checkpoint, and a manifest that marks it complete.

`.metadata` is torch's own file, which plain torch reads: it lists the tensors, their names, and the boxes in which they
lie in data files. `manifest.json`, written after everything else, lists every file, its size, and the position and
checksum of each payload. docs/checkpoints-format.md is the page for users.

[Note: boxes] A box (torch: chunk) is a part of a tensor, given by offsets and sizes. Our boxes are contiguous in
row-major order: a range of the flattened tensor consists of a few boxes, and each box is one run of bytes.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from offload.errors import ConfigError, StorageError
from offload.files.archives import bytes_tensor
from offload.files.durable import Files
from offload.kernels import kernels
from offload.system.regular_files import report_read_errors

MODEL = "model."  # Prefix of a parameter's or a buffer's name: its value, the fp32 master where there is one.
# Prefix of a parameter's name and the name of one of its states: a tensor (`exp_avg`, ...) or a number (`STEP`, ...).
OPTIMIZER = "optim.state."
STEP = "step"
METADATA_FILE, MANIFEST_FILE = ".metadata", "manifest.json"
PIECE_NUMEL = 2 << 20  # A box has at most so many elements.
RUN_BYTES = (16 << 20) + (64 << 10)  # A write, or a read, has at most so many bytes.
FORMAT: Literal["zero-infinity checkpoint"] = "zero-infinity checkpoint"
SHARED = "../.frozen/"  # Prefix of a digest and a file's name: weights that several checkpoints share.
CHECKSUM = "crc32c"  # Key of the checksum over all other keys.
NAME_BYTES_MAX = 255  # Of a file; no file system of Linux has longer ones.
VERSION = 1  # Raised when an older reader would misread what a newer one writes.


def state_name(name: str, kind: str) -> str:
    return f"{OPTIMIZER}{name}.{kind}"


class Box(NamedTuple):
    """A part of a tensor, contiguous in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int  # Its first element in the flattened tensor.

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes_of(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Elements [begin, end) of the flattened tensor as boxes, in order; each box is as long as possible.

    A tensor without elements is one empty box, [0, 0).
    """
    if math.prod(shape) == 0:
        yield Box((0,) * len(shape), tuple(shape), 0)
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while begin < end:
        offsets = [begin // stride % size for stride, size in zip(strides, shape, strict=True)]
        for dim, stride in enumerate(strides):
            rows = min((end - begin) // stride, shape[dim] - offsets[dim])
            if begin % stride == 0 and rows > 0:
                sizes = (1,) * dim + (rows,) + tuple(shape[dim + 1 :])
                break
        else:  # a tensor of no dimensions
            rows, stride, sizes = 1, 1, ()
        yield Box(tuple(offsets), sizes, begin)
        begin += rows * stride


def short_boxes(shape: Sequence[int], begin: int, end: int, numel_max: int) -> Iterator[Box]:
    """Like `boxes_of`, with at most `numel_max` elements a box: whole rows of the first dimension where they fit."""
    row = max(math.prod(shape[1:]), 1)
    while begin < end or (begin == end and math.prod(shape) == 0):
        stop = min(begin + numel_max, end)
        if stop < end and stop // row * row > begin:
            stop = stop // row * row
        yield from boxes_of(shape, begin, stop)
        if begin == stop:
            return
        begin = stop


def begin_of(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The position in the flattened tensor of the element at `offsets`."""
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position


def is_contiguous(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """True when a box of these sizes is contiguous in the flattened tensor."""
    is_full = [size == full for size, full in zip(sizes, shape, strict=True)]
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return all(is_full[first + 1 :])


class FileBox(NamedTuple):
    """One box of a tensor, or bytes, in a data file."""

    name: str
    dtype: str | None  # As `str(torch.dtype)` without "torch."; None for bytes.
    shape: tuple[int, ...]  # Of the whole tensor.
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int  # Position of the archive in the file.
    nbytes: int  # Size of the archive.
    payload: int  # Position of the payload in the file.
    payload_bytes: int
    crc: int


def make_metadata(files: Mapping[str, Iterable[FileBox]], aliases: Mapping[str, str]) -> bytes:
    """The `.metadata` file of a checkpoint.

    Args:
        files: name of each data file -> the boxes in it.
        aliases: further name of a tensor -> the name under which it was written.
    """
    from torch.distributed.checkpoint import metadata as dcp  # see Note: late
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for file, boxes in files.items():
        for box in boxes:
            info = _StorageInfo(file, box.begin, box.nbytes)
            if box.dtype is None:
                entries[box.name] = dcp.BytesStorageMetadata()
                places[dcp.MetadataIndex(box.name)] = info
                continue
            chunk = dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            tensor = entries.get(box.name)
            if not isinstance(tensor, dcp.TensorStorageMetadata):
                properties = dcp.TensorProperties(dtype=getattr(torch, box.dtype))
                tensor = entries[box.name] = dcp.TensorStorageMetadata(properties, torch.Size(box.shape), [])
            places[dcp.MetadataIndex(box.name, chunk.offsets, len(tensor.chunks))] = info
            tensor.chunks.append(chunk)
    for alias, name in aliases.items():
        entry = entries[name]
        entries[alias] = entry
        if isinstance(entry, dcp.TensorStorageMetadata):
            for chunk in entry.chunks:
                places[dcp.MetadataIndex(alias, chunk.offsets)] = places[dcp.MetadataIndex(name, chunk.offsets)]
    paths = {name: _torch_path(name) for name in entries}
    return pickle.dumps(dcp.Metadata(entries, paths, places, dcp.StorageMeta()), protocol=4)


def _torch_path(name: str) -> tuple[str, ...]:
    """Where torch's `dcp_to_torch_save` puts a tensor: state["model"][NAME], state["optim"]["state"][NAME][KIND]."""
    if name.startswith(MODEL):
        return ("model", name.removeprefix(MODEL))
    if name.startswith(OPTIMIZER):
        parameter, kind = name.removeprefix(OPTIMIZER).rsplit(".", 1)
        return ("optim", "state", parameter, kind)
    return (name,)


# Note: late. These classes import sympy and torch's distributed tensors, which would take more than a third of the time
# of `import zero`, so they are imported only when the first checkpoint is written or read.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))}),
}


class _Unpickler(pickle.Unpickler):
    """Makes only objects of the classes that metadata consists of, since the file may be from an untrusted source."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which checkpoint metadata never contains")
        return super().find_class(module, name)


def read_metadata(data: bytes, path: str) -> list[tuple[str, FileBox]]:
    """The inverse of `make_metadata`: (data file, box) of each tensor. Payloads and checksums are in the manifest.

    Raises ConfigError: it is damaged, or names a class that metadata does not consist of.
    """
    from torch.distributed.checkpoint import metadata as dcp  # see Note: late

    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise ConfigError(f"{path}: not the metadata of a checkpoint, or damaged: {error}") from error
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
        raise ConfigError(f"{path}: expected torch.distributed.checkpoint's Metadata, got {type(metadata).__name__}")
    with report_read_errors(path):
        return _boxes_in(metadata, path)


def _boxes_in(metadata: Any, path: str) -> list[tuple[str, FileBox]]:
    from torch.distributed.checkpoint import metadata as dcp

    boxes: list[tuple[str, FileBox]] = []

    def note(index: dcp.MetadataIndex, dtype: str | None, shape: Sequence[int], sizes: Sequence[int]) -> None:
        info = metadata.storage_data.get(index)
        if info is None:
            raise ConfigError(f"{path} is damaged: it does not say where {index.fqn} is")
        place = tuple(shape), tuple(index.offset or ()), tuple(sizes), info.offset, info.length
        numbers = (*place[0], *place[1], *place[2], info.offset, info.length)
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ConfigError(f"{path} is damaged: {index.fqn} has sizes or a place that are no numbers of elements")
        boxes.append((info.relative_path, FileBox(index.fqn, dtype, *place, 0, 0, 0)))

    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, dcp.TensorStorageMetadata):
            note(dcp.MetadataIndex(name), None, (), ())
            continue
        for chunk in tensor.chunks:
            if not isinstance(tensor.properties.dtype, torch.dtype):
                raise ConfigError(f"{path} is damaged: {name} has the dtype {tensor.properties.dtype!r:.40}")
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            note(dcp.MetadataIndex(name, chunk.offsets), dtype, tensor.size, chunk.sizes)
    return boxes


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True)

    nbytes: int = Field(alias="bytes", ge=0)
    boxes: tuple[tuple[int, int, int], ...] = ()  # (offset in the file, bytes, crc32c) of every payload, ascending.

    @model_validator(mode="after")
    def _check_payload_ranges(self) -> FileEntry:
        """So no size that a checkpoint names is larger than its files."""
        position = 0
        for offset, nbytes, _ in self.boxes:
            if offset < position or nbytes < 0:
                raise ValueError("payloads overlap, or are not in ascending order")
            position = offset + nbytes
        if position > self.nbytes:
            raise ValueError(f"payloads end at byte {position:,} of {self.nbytes:,}")
        return self


DataFile = tuple[FileEntry, list[FileBox]]  # A data file as the manifest has it, and its boxes.


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True)

    tag: str
    global_steps: int
    time: FiniteFloat  # When the save began, in seconds since 1970; later than the time of every checkpoint then there.
    world_size: int
    files: dict[str, FileEntry]  # By name; the manifest is not among them.


def _checksum(content: dict[str, Any]) -> int:
    """CRC-32C of the manifest without the checksum itself."""
    return kernels.crc32c(bytes_tensor(json.dumps(content).encode()))


def write_manifest(files: Files, folder: Path, manifest: Manifest) -> None:
    """Write the last file of a checkpoint: with it the checkpoint is complete.

    Its time of writing is the checkpoint's: so the newest checkpoint is found without reading those of others.
    """
    content = {"format": FORMAT, "version": VERSION, **manifest.model_dump(by_alias=True)}
    text = json.dumps({**content, CHECKSUM: _checksum(content)})
    files.write_bytes(folder / MANIFEST_FILE, text, seconds=manifest.time)


def read_manifest(files: Files, folder: Path) -> Manifest:
    """The manifest in a folder.

    Raises ConfigError: there is none, it is damaged, not ours, or of a version that this code does not know.
    """
    path = folder / MANIFEST_FILE
    try:
        with report_read_errors(path):
            return _manifest_of(json.loads(files.read_bytes(path)), path)
    except StorageError as error:
        raise ConfigError(
            f"{folder} is not a complete checkpoint of this engine: cannot read {MANIFEST_FILE}: {error}"
        ) from error


def _manifest_of(content: Any, path: Path) -> Manifest:
    format_name = content.get("format") if isinstance(content, dict) else None
    if format_name != FORMAT:
        raise ConfigError(
            f"{path}: expected the format {FORMAT!r}, got {format_name!r}: it is not a checkpoint of this engine"
        )
    if content.get("version") != VERSION:
        raise ConfigError(
            f"{path}: this version of zero-infinity reads checkpoints of version {VERSION}, got "
            f"{content.get('version')!r}; load it with the version that wrote it, or a newer one"
        )
    expected = content.pop(CHECKSUM, None)
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        raise ConfigError(f"{path} is damaged: {wrong}") from error
    if expected != _checksum(content):
        raise ConfigError(f"{path} is damaged: expected the checksum {expected!r}, got {_checksum(content)!r}")
    invalid = [name for name in manifest.files if not _is_valid_name(name)]
    if invalid:
        raise ConfigError(f"{path} is damaged: {invalid[0]!r} is not a valid name of a file in this folder")
    return manifest


def _is_valid_name(name: str) -> bool:
    """True for a file in the folder, and for a file of the weights that several checkpoints share."""
    inside = name.removeprefix(SHARED)
    if inside != name:
        digest, _, inside = inside.partition("/")
        if not digest.isalnum():
            return False
    return not set("/\0") & set(inside) and inside not in ("", ".", "..") and len(os.fsencode(inside)) <= NAME_BYTES_MAX


def check_files(files: Files, folder: Path, manifest: Manifest) -> None:
    """Check that the files of the manifest exist and have its sizes. Their content is checked when it is read.

    Raises ConfigError: names the files that are wrong.
    """
    wrong = []
    for name, entry in manifest.files.items():
        got = files.file_bytes(folder / name)
        if got != entry.nbytes:
            wrong.append(f"{name}: expected {entry.nbytes:,} bytes, got {'no file' if got is None else f'{got:,}'}")
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ConfigError(f"the checkpoint in {folder} is damaged: {'; '.join(wrong[:5])}{more}")
