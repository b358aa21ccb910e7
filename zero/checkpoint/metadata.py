"""The metadata of a checkpoint: torch.distributed.checkpoint's own, made and read."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from offload.errors import ConfigError
from zero.checkpoint import torch_metadata as dcp

METADATA_FILE = ".metadata"


class WrittenBox(NamedTuple):
    """One box of a tensor, or bytes, in a data file."""

    name: str
    dtype: str | None
    """As `str(torch.dtype)` without "torch."; None for bytes."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    """Of the archive in the file."""
    nbytes: int
    """Of the archive."""
    payload: int
    """Of the payload in the file."""
    payload_bytes: int
    crc: int


def make_metadata(files: Mapping[str, Iterable[WrittenBox]], aliases: Mapping[str, str]) -> bytes:
    """The `.metadata` file of a checkpoint.

    Args:
        files: name of each data file -> what is in it.
        aliases: further name of a tensor -> the name it was written under.
    """
    told: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    places: dict[dcp.MetadataIndex, dcp._StorageInfo] = {}
    for file, boxes in files.items():
        for box in boxes:
            info = dcp._StorageInfo(file, box.begin, box.nbytes)
            if box.dtype is None:
                told[box.name] = dcp.BytesStorageMetadata()
                places[dcp.MetadataIndex(box.name)] = info
                continue
            chunk = dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            tensor = told.get(box.name)
            if not isinstance(tensor, dcp.TensorStorageMetadata):
                properties = dcp.TensorProperties(dtype=getattr(torch, box.dtype))
                tensor = told[box.name] = dcp.TensorStorageMetadata(properties, torch.Size(box.shape), [])
            places[dcp.MetadataIndex(box.name, chunk.offsets, len(tensor.chunks))] = info
            tensor.chunks.append(chunk)
    for alias, name in aliases.items():
        known = told[name]
        told[alias] = known
        if isinstance(known, dcp.TensorStorageMetadata):
            for chunk in known.chunks:
                places[dcp.MetadataIndex(alias, chunk.offsets)] = places[dcp.MetadataIndex(name, chunk.offsets)]
    paths = {name: _path(name) for name in told}
    return pickle.dumps(dcp.Metadata(told, paths, places, dcp.StorageMeta()), protocol=4)


def _path(name: str) -> tuple[str, ...]:
    """Where torch's `dcp_to_torch_save` puts a tensor: state["model"][NAME], state["optim"]["state"][NAME][KIND]."""
    if name.startswith("model."):
        return ("model", name[len("model.") :])
    if name.startswith("optim.state."):
        parameter, kind = name[len("optim.state.") :].rsplit(".", 1)
        return ("optim", "state", parameter, kind)
    return (name,)


_MADE_OF = {
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
    """Makes what metadata consists of, and nothing else: files may come from elsewhere."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _MADE_OF.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata does not consist of")
        return super().find_class(module, name)


def read_metadata(data: bytes, path: str) -> dcp.Metadata:
    """What `.metadata` says.

    Raises:
        ConfigError: it is damaged, or would make something that metadata does not consist of.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise ConfigError(f"{path}: no metadata of a checkpoint, or damaged: {error}") from error
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
        raise ConfigError(f"{path}: expected torch.distributed.checkpoint's Metadata, got {type(metadata).__name__}")
    return metadata
