"""What a checkpoint consists of: `manifest.json`, written after everything else, names every file and its size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offload.archives import bytes_tensor
from offload.errors import ConfigError, StorageError
from offload.files.durable import Files
from offload.kernels import kernels

NAME = "manifest.json"
FORMAT: Literal["zero-infinity checkpoint"] = "zero-infinity checkpoint"
SHARED = "../.frozen/"
"""Before a digest and the name of a file: weights that several checkpoints share."""
CHECKSUM = "crc32c"
"""Key of the checksum over all other keys."""
VERSION = 1
"""Raised when an older reader would misread what a newer one writes."""


class FileEntry(BaseModel):
    """One file beside the manifest."""

    model_config = ConfigDict(frozen=True)

    nbytes: int = Field(alias="bytes", ge=0)
    boxes: tuple[tuple[int, int, int], ...] = ()
    """(offset in the file, bytes, crc32c) of every payload."""


class Manifest(BaseModel):
    """The contents of manifest.json."""

    model_config = ConfigDict(frozen=True)

    tag: str
    global_steps: int
    time: float
    """When the save began, in seconds since 1970; later than that of every checkpoint that was there."""
    world_size: int
    files: dict[str, FileEntry]
    """By name; the manifest is not among them."""

    def to_json(self) -> str:
        """The text of the file."""
        content = {"format": FORMAT, "version": VERSION, **self.model_dump(by_alias=True)}
        return json.dumps({**content, CHECKSUM: _checksum(content)})


def _checksum(content: dict[str, Any]) -> int:
    """CRC-32C of the manifest without it."""
    return kernels.crc32c(bytes_tensor(json.dumps(content).encode()))


def write_manifest(files: Files, folder: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint: with it the folder is whole."""
    files.write_bytes(folder / NAME, manifest.to_json())


def read_manifest(files: Files, folder: Path) -> Manifest:
    """The manifest in a folder.

    Raises:
        ConfigError: there is none, it is damaged, not ours, or of a version that this code does not know.
    """
    path = folder / NAME
    try:
        content = json.loads(files.read_bytes(path))
    except StorageError as error:
        raise ConfigError(f"{folder} is no whole checkpoint of this engine: cannot read {NAME}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise ConfigError(f"{path}: expected the format {FORMAT!r}, got {found!r}: not a checkpoint of this engine")
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
        raise ConfigError(f"{path} is damaged: checksum expected {expected!r}, got {_checksum(content)!r}")
    odd = [name for name in manifest.files if not _is_ours(name)]
    if odd:
        raise ConfigError(f"{path} is damaged: {odd[0]!r} is no name of a file in this folder")
    return manifest


def _is_ours(name: str) -> bool:
    """A file in the folder; or one of the weights that several checkpoints share, beside it."""
    inside = name.removeprefix(SHARED)
    if inside != name:
        digest, _, inside = inside.partition("/")
        if not digest.isalnum():
            return False
    return "/" not in inside and inside not in ("", ".", "..")


def check(files: Files, folder: Path, manifest: Manifest) -> None:
    """Hold the files of a folder against its manifest, by presence and size; what they contain is seen when it is read.

    Raises:
        ConfigError: names the files that are not as they should be.
    """
    wrong = []
    for name, entry in manifest.files.items():
        got = files.file_bytes(folder / name)
        if got != entry.nbytes:
            wrong.append(f"{name}: expected {entry.nbytes:,} bytes, got {'no file' if got is None else f'{got:,}'}")
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ConfigError(f"the checkpoint in {folder} is damaged: {'; '.join(wrong[:5])}{more}")
