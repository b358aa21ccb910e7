"""Safetensors files, read by range: only the requested part of a checkpoint is in memory.

The library checks a file and says what is in it. Values are read with system calls, not through its mapping: an error
of the disk is then an exception and not a signal, and no page of the file stays in memory.
"""

from __future__ import annotations

import os
import re
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from offload.errors import ConfigError
from offload.io.init_file import read_tensor
from offload.system.regular_files import open_regular, read_json, report_read_errors

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
REREAD = "download or copy the file again"


@dataclass(frozen=True, slots=True)
class Entry:
    dtype: torch.dtype
    shape: torch.Size
    offset_bytes: int  # From the beginning of the file.

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class SafetensorsFile:
    """One open file; on opening, every tensor's place is checked against the file's length.

    Raises ConfigError: the file cannot be opened, is cut short or is no safetensors file; names it and the tensor.
    `entries`: name -> dtype, shape and offset.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be opened: {error.strerror}") from error
        closing = weakref.finalize(self, os.close, self._fd)
        closing.atexit = False  # a function that runs at exit may still read
        try:
            with report_read_errors(path, REREAD):
                self.entries = self._read_header()
        except BaseException:
            closing()
            raise

    def read(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements of `dtype` at byte `offset`, 1-D. Raises StorageError."""
        return read_tensor(self._fd, offset, numel, dtype, "reading a checkpoint", self.path)

    def _read_header(self) -> dict[str, Entry]:
        file_bytes = os.fstat(self._fd).st_size
        try:
            with safe_open(self.path, framework="pt") as file:
                parts = {name: file.get_slice(name) for name in file.offset_keys()}
                found = {name: (part.get_dtype(), torch.Size(part.get_shape())) for name, part in parts.items()}
        except SafetensorError as error:
            raise ConfigError(
                f"{self.path}: {file_bytes:,} bytes that are not a safetensors file, or a truncated one ({error}); "
                f"{REREAD}"
            ) from error
        unknown = next((name for name, (dtype, _) in found.items() if dtype not in DTYPES), None)
        if unknown is not None:
            raise ConfigError(
                f"{unknown} in {self.path}: dtype {found[unknown][0]} is unknown; expected one of {', '.join(DTYPES)}"
            )
        # The library takes only files whose tensors follow each other without gaps to the end.
        entries, end = {}, file_bytes
        for name, (dtype, shape) in reversed(found.items()):
            end -= shape.numel() * DTYPES[dtype].itemsize
            entries[name] = Entry(DTYPES[dtype], shape, end)
        return dict(reversed(entries.items()))


def open_checkpoint(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> its file, for a folder that `save_pretrained` wrote, or for one file.

    Raises ConfigError: there is nothing to load, a shard is missing, or a file is damaged.
    """
    with report_read_errors(folder, REREAD):
        paths = [folder] if folder.is_file() else _shards(folder)
    files = {path: SafetensorsFile(path) for path in paths}
    return {name: file for file in files.values() for name in file.entries}


def _shards(folder: Path) -> list[Path]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if not indices:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"{folder}: expected model.safetensors, or model.safetensors.index.json and the files it names; found "
                "neither; save_pretrained(folder) of transformers writes them"
            )
        unsharded = [path for path in files if not SHARD.search(path.name)]
        if not unsharded:
            raise ConfigError(
                f"{folder}: {files[0].name} is part of a model whose index, *.safetensors.index.json, is missing; the "
                "model was not written or copied completely: write or copy it again"
            )
        return unsharded
    try:
        weight_map: dict[str, str] = read_json(indices[0])["weight_map"]
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{indices[0]}: not an index of safetensors ({error!r}); {REREAD}") from error
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{folder}: {indices[0].name} names {len(paths)} files, of which {len(missing)} are missing: "
            f"{', '.join(missing[:4])}; download the rest"
        )
    return paths
