"""Lists all snapshots below a folder, of any job, and removes one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, StateError, StorageError
from offload.files.snapshot_files import FOLDER, NAME, read_body, read_committed, remove_empty, remove_ranks
from offload.system.regular_files import open_regular, report_read_errors


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One snapshot that was found below a path."""

    name: str
    head: Mapping[str, Any] | None  # The head that was passed to `SnapshotFiles.commit`; None: nothing was committed.
    ranks: tuple[int, ...]  # The ranks whose parts are below this path.
    allocated_bytes: int
    in_use: bool
    committed_at: float | None  # Seconds since 1970.
    trouble: str = ""


def list_snapshots(path: Path | str) -> list[SnapshotInfo]:
    """Those below a folder of nvme_path. Raises ConfigError: there is no such folder; StorageError: no right to it."""
    if not Path(path).is_dir():
        raise ConfigError(
            f"snapshots: expected a folder of nvme_path, got {path}, which is none; is its drive mounted?"
        )
    with report_read_errors(path):
        return [_inspect(folder) for folder in sorted((Path(path) / FOLDER).glob("*")) if folder.is_dir()]


def remove_snapshot(path: Path | str, name: str) -> int:
    """Remove a snapshot: all ranks' parts below `path` and their parts in other folders; returns the bytes freed.

    Raises ConfigError: there is no snapshot of that name; StateError: a job uses it.
    """
    root = (Path(path) / FOLDER / name).resolve()  # manifests may name the same folder in another way
    if not NAME.fullmatch(name) or not root.is_dir() or root.parts[-2:] != (FOLDER, name):
        names = ", ".join(listed.name for listed in list_snapshots(path)) or "none"
        raise ConfigError(f"there is no snapshot {name!r} below {path}; available: {names}")
    parts = sorted(
        {part for rank in root.glob("rank-*") if _is_folder(rank) for part in [rank, *_parts_elsewhere(rank)]}
    )
    locks: list[int] = []
    try:
        for part in parts:
            locks += _try_lock(part / "swap")
        freed_bytes = sum(_allocated_bytes(part) for part in parts)
        (root / "committed").unlink(missing_ok=True)
        remove_ranks(parts)
        remove_empty(sorted({part.parent for part in parts} | {root}))
        return freed_bytes
    finally:
        for descriptor in locks:
            os.close(descriptor)


def _parts_elsewhere(rank: Path) -> list[Path]:
    """The folders of a rank's part below other paths, which its manifest names."""
    folders: list[Path] = []
    for manifest in rank.glob("manifest-*"):
        with contextlib.suppress(StorageError, ConfigError), report_read_errors(manifest):
            folders += [Path(folder) for folder in read_body(manifest)["folders"]]
    # Do not trust the manifest: accept only folders that are parts of this snapshot and rank.
    resolved = [folder.resolve() for folder in folders]
    return [folder for folder in resolved if folder.parts[-3:] == rank.parts[-3:] and folder.is_dir()]


def _is_folder(path: Path) -> bool:
    """True for a folder itself; what a link leads to is not removed."""
    return path.is_dir() and not path.is_symlink()


def _inspect(root: Path) -> SnapshotInfo:
    ranks = sorted(rank for rank in root.glob("rank-*") if rank.name[5:].isdigit() and _is_folder(rank))
    numbers = tuple(sorted(int(rank.name.removeprefix("rank-")) for rank in ranks))
    committed, head, trouble, when = root / "committed", None, "", None
    try:
        head = read_committed(root)
        when = committed.stat().st_mtime if head else None
    except (StorageError, ConfigError) as error:
        trouble = str(error)
    try:
        in_use = any(_is_locked(rank / "swap") for rank in ranks)
    except OSError as error:  # another user's, or no file of ours
        in_use, trouble = False, trouble or f"{root}: {error.strerror}"
    return SnapshotInfo(root.name, head, numbers, sum(map(_allocated_bytes, ranks)), in_use, when, trouble)


def _allocated_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.glob("*"))


def _is_locked(path: Path) -> bool:
    try:
        for descriptor in _try_lock(path):
            os.close(descriptor)
    except StateError:
        return True
    return False


def _try_lock(path: Path) -> list[int]:
    """The descriptor that holds the lock; none if there is no such file. Raises StateError."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return []
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StateError(f"snapshot: {path.parent} is in use by a job; end it first") from None
    return [descriptor]
