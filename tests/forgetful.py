"""A disk that loses unsynced data, stops at any operation, and is full when a test wants it to be.

`ForgetfulFiles` works in a real folder and records what would survive a power failure now. The rules are the worst
behaviour of file systems:

- A file's bytes survive once the file was synced. If the file was written since then, each block of 4096 bytes is the
  old one, zeros, or the new one, and the length is the old or the new one.
- A name (made, renamed, removed) survives once its folder was synced. Each change since then may have happened or not;
  but a rename inside a folder happens completely or not at all.
- A sync of the folder does not make a file's bytes survive, and a sync of the file does not make its name survive.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.errors import StorageError
from offload.files.durable import DurableFile, Files, Operation

BLOCK_BYTES = 4096
NEEDS_ROOM = ("create", "reserve", "write", "written", "make folder", "rename", "sync")


class Crash(BaseException):
    """The power failed; every later operation on the disk raises it again. No `except Exception` catches it."""


@dataclass(eq=False)
class _File:
    durable: bytes = b""
    """Contents that survive."""
    dirty: bool = True
    """It was written since the last sync."""
    last: bytes = b""
    """Contents when it lost its last name."""


@dataclass(eq=False)
class _Folder:
    live: dict[str, Any] = field(default_factory=dict)
    """Name -> _File or _Folder, as every process sees it."""
    durable: dict[str, Any] = field(default_factory=dict)
    """The same, for the entries that survive."""
    pending: list[dict[str, Any]] = field(default_factory=list)
    """Changes since the last sync: name -> its new node, None for a removed name."""

    def change(self, names: dict[str, Any]) -> None:
        _apply(self.live, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.live), []


class ForgetfulFiles(Files):
    """`Files` below one folder; its initial contents survive.

    Args:
        root: the folder. Operations elsewhere are refused.
        crash_at: number of the operation, from 1, before which the power fails.
        full_at: number of the operation from which on the disk is full, until something is removed.

    Attributes:
        operations: (operation, path below the root) of all operations on the disk, in order.
        crashed: the power has failed.
        refused: number of operations for which there was no room.
    """

    def __init__(self, root: Path, *, crash_at: int | None = None, full_at: int | None = None) -> None:
        self.root, self.crash_at, self.full_at = root, crash_at, full_at
        self.operations: list[tuple[str, str]] = []
        self.crashed, self._full, self.refused = False, False, 0
        self._mutex = threading.RLock()
        self._top = _found(root)

    def perform(self, operation: Operation, path: Path, action: Callable[[], Any], new: Path | None = None) -> Any:
        with self._mutex:
            if operation == "create" and path.exists():  # a lock file is only opened when it is there
                self._check_power()
                return super().perform(operation, path, action, new)
            self._count(operation, path)
            for gone in (path, new):
                if gone is not None and gone.is_file() and operation in ("unlink", "rename"):
                    self._file(gone).last = gone.read_bytes()
            # Surviving data is tracked here, so the real disk need not sync.
            result = None if operation.startswith("sync") else super().perform(operation, path, action, new)
            self._note(operation, path, new)
            return result

    def on_write(self, file: DurableFile, offset: int, data: torch.Tensor) -> None:
        with self._mutex:
            if not self.crashed:
                self._file(file.path).dirty = True
            self._count("written", file.path)

    def make_room(self) -> None:
        """Another process removed something: the disk is no longer full."""
        self._full, self.full_at = False, None

    def image(self, to: Path, seed: int = 0) -> Path:
        """Make `to`, which must not exist, a copy of the root as found after the power failure (or a failure now).

        Args:
            to: returned.
            seed: chooses which unsynced data survives.
        """
        with self._mutex:
            paths: dict[Any, Path] = {}
            _locate(self._top, self.root, paths)
            _materialise(self._top, to, paths, random.Random(seed))
        return to

    def _check_power(self) -> None:
        if self.crashed:
            raise Crash("the power has failed")

    def _count(self, what: str, path: Path) -> None:
        self._check_power()
        number, below = len(self.operations) + 1, str(path.relative_to(self.root))
        if number == self.crash_at:
            self.crashed = True
            raise Crash(f"before operation {number}: {what} {below}")
        self.operations.append((what, below))
        self._full = (self._full or number == self.full_at) and what not in ("unlink", "truncate")
        if self._full and what in NEEDS_ROOM:
            self.refused += 1
            raise StorageError(what, errno=errno.ENOSPC, path=str(path), offset=0, free_bytes=0)

    def _note(self, operation: str, path: Path, new: Path | None) -> None:
        """Record an operation after it was done."""
        if operation in ("reserve", "write", "truncate"):
            self._file(path).dirty = True
        elif operation == "sync":
            file = self._file(path)
            file.durable, file.dirty = path.read_bytes(), False
        elif operation == "sync folder":
            self._folder(path).sync()
        elif new is None:
            made = {"create": _File, "make folder": _Folder}.get(operation)
            self._folder(path.parent).change({path.name: made() if made is not None else None})
        elif path.parent == new.parent:
            self._folder(path.parent).change({path.name: None, new.name: self._node(path)})
        else:
            self._folder(new.parent).change({new.name: self._node(path)})
            self._folder(path.parent).change({path.name: None})

    def _node(self, path: Path) -> Any:
        node: Any = self._top
        for part in path.relative_to(self.root).parts:
            node = node.live[part]
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._node(path)
        assert isinstance(node, _Folder), path
        return node

    def _file(self, path: Path) -> _File:
        node = self._node(path)
        assert isinstance(node, _File), path
        return node


def _apply(entries: dict[str, Any], names: dict[str, Any]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _found(path: Path) -> _Folder:
    """The contents of a folder at the start."""
    folder = _Folder()
    for entry in path.iterdir():
        folder.live[entry.name] = _found(entry) if entry.is_dir() else _File(entry.read_bytes(), dirty=False)
    folder.sync()
    return folder


def _locate(folder: _Folder, path: Path, paths: dict[Any, Path]) -> None:
    """Fill `paths` with the paths of all files that have a name."""
    for name, node in folder.live.items():
        paths[node] = path / name
        if isinstance(node, _Folder):
            _locate(node, path / name, paths)


def _materialise(folder: _Folder, to: Path, paths: dict[Any, Path], chance: random.Random) -> None:
    to.mkdir()
    entries = dict(folder.durable)
    for names in folder.pending:
        if chance.random() < 0.5:
            _apply(entries, names)
    for name, node in entries.items():
        if isinstance(node, _Folder):
            _materialise(node, to / name, paths, chance)
        else:
            (to / name).write_bytes(_remains(node, paths, chance))


def _remains(file: _File, paths: dict[Any, Path], chance: random.Random) -> bytes:
    """Contents of a file after the power failure."""
    if not file.dirty:
        return file.durable
    old, new = file.durable, paths[file].read_bytes() if file in paths else file.last
    blocks = []
    for begin in range(0, max(len(old), len(new)), BLOCK_BYTES):
        choices = [contents[begin : begin + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0") for contents in (old, new)]
        blocks.append(chance.choice([*choices, bytes(BLOCK_BYTES)]) if choices[0] != choices[1] else choices[0])
    return b"".join(blocks)[: chance.choice([len(old), len(new)])]


def every_point(operations: int, count: int | None = None) -> list[int]:
    """Numbers of operations at which to stop: all, or about `count` of them, evenly spread, with both ends."""
    points = operations + 1
    if count is None or count >= points:
        return list(range(1, points + 1))
    return sorted({1 + round(i * (points - 1) / (count - 1)) for i in range(count)})


def tree(path: Path) -> dict[str, bytes]:
    """Path -> contents of everything below a folder; a folder is b"/"."""
    found = sorted(path.rglob("*"))
    return {str(p.relative_to(path)): b"/" if p.is_dir() else p.read_bytes() for p in found}
