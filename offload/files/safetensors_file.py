"""Safetensors files, read by range: only the requested part of a checkpoint is in memory.

The format (https://github.com/huggingface/safetensors): 8 bytes of header length, little-endian, a JSON header
`name -> {dtype, shape, data_offsets}`, then the tensors' bytes, offsets counted from the end of the header.
"""

from __future__ import annotations

import json
import math
import os
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.disk.init_file import read_tensor
from offload.errors import ConfigError
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
HEADER_BYTES_MAX = 100 << 20  # The reference implementation refuses longer ones too.
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
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if file_bytes < 8 or not 2 <= length <= min(HEADER_BYTES_MAX, file_bytes - 8):
            raise ConfigError(
                f"{self.path}: not a safetensors file, or truncated: expected a header of {length:,} bytes, got "
                f"{max(file_bytes - 8, 0):,} bytes after the first 8; {REREAD}"
            )
        try:
            header = json.loads(os.pread(self._fd, length, 8))
        except ValueError as error:
            raise ConfigError(f"{self.path}: its header is not valid JSON ({error}); {REREAD}") from error
        try:
            header.pop("__metadata__", None)
            entries = {name: self._entry(name, fields, 8 + length, file_bytes) for name, fields in header.items()}
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{self.path}: its header is JSON, but not of safetensors ({error!r}); {REREAD}"
            ) from error
        position = 0
        # of tensors at one place the empty ones are first
        for begin, nbytes, name in sorted((entry.offset_bytes, entry.nbytes, name) for name, entry in entries.items()):
            if begin < position:
                raise ConfigError(f"{name} in {self.path}: its bytes are also those of another tensor; {REREAD}")
            position = begin + nbytes
        return entries

    def _entry(self, name: str, fields: dict[str, Any], origin: int, file_bytes: int) -> Entry:
        if fields["dtype"] not in DTYPES:
            raise ConfigError(
                f"{name} in {self.path}: dtype {fields['dtype']} is unknown; expected one of {', '.join(DTYPES)}"
            )
        dtype, shape = DTYPES[fields["dtype"]], torch.Size(fields["shape"])
        begin, end = fields["data_offsets"]
        expected_bytes = math.prod(shape) * dtype.itemsize
        if begin < 0 or min(shape, default=0) < 0 or end - begin != expected_bytes:
            raise ConfigError(
                f"{name} in {self.path}: shape {tuple(shape)} of {dtype} takes {expected_bytes:,} bytes, but its "
                f"place in the file has {end - begin:,}; {REREAD}"
            )
        if origin + end > file_bytes:
            raise ConfigError(
                f"{name} in {self.path}: the file is truncated: expected at least {origin + end:,} bytes, got "
                f"{file_bytes:,}; {REREAD}"
            )
        return Entry(dtype, shape, origin + begin)


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
