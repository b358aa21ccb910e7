"""The folder of a snapshot: named swap files, locked while their job lives, and files that say which slots are valid.

    PATH/zero-snapshots/NAME/rank-K/swap            in every folder of nvme_path
    PATH/zero-snapshots/NAME/rank-K/part            in every folder: which of how many it is
    PATH/zero-snapshots/NAME/rank-K/manifest-{0,1}  in the first one: which slots are valid, and bytes of the caller
    PATH/zero-snapshots/NAME/committed              by the first rank: the valid number; all ranks have its manifest

[Note: in place] A new file, or a new name, costs a commit of the file system's journal, which is slow on a busy disk.
So small files are written in place too, in alternation: the manifest of snapshot N is `manifest-(N % 2)`, and it
overwrites the manifest of N - 2. `committed` has one place for even and one for odd numbers, with two copies in each;
the highest readable number is valid. It is written after all manifests are on the disk. If a power failure tears a
write, the checksum is wrong, and the previous version is untouched: also in the slots, which are not overwritten
before the commit is certain.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, StateError, StorageError
from offload.files.archives import bytes_tensor
from offload.files.durable import Files, Operation, write_all
from offload.io.stripes import StripeMap
from offload.io.swapfile import SwapFile, SwapSpace, check_folder, check_room, stripe_weights
from offload.kernels import kernels
from offload.sizes import PAGE_BYTES, align_up
from offload.system.regular_files import is_direct, open_own_file, open_own_folder, open_regular, report_read_errors

FOLDER = "zero-snapshots"
FORMAT = 3
COMMITTED_BYTES_MAX = 4 * PAGE_BYTES  # Two copies for even numbers, two for odd ones.
REMOVE = "load a checkpoint, or remove the snapshot (zero snapshots rm)"
MANIFEST_BYTES = 64 << 10  # Manifests are padded to multiples of it, so that they seldom grow the file.
LOCK_SECONDS = 15.0  # A killed job's lock lasts until its last child ends; loaders' workers notice it within 5 s.
SHARED = (
    "others could put links to files of yours there, or change what you load. Remove or mend the folder, or set "
    "offload_optimizer.snapshot.shared_folder to true if you trust them"
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # Of a snapshot.


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a rank's manifest, and the caller's state in the same file."""

    number: int
    body: Mapping[str, Any]
    state: bytes


class SnapshotFiles:
    """One rank's part of a snapshot, locked by this process until `close`.

    Raises ConfigError: a path is missing or not writable, the name is invalid, another process holds the snapshot, or
    other users could have put files or links into its folders.

    Args:
        paths: existing folders; the first holds the manifests.
        name: of the snapshot, a plain file name.
        disk: writes the small files.
        shared: other users may own its folders and files, or write to them.

    Attributes:
        has_commit: there is a snapshot that is valid, or may be; if not, `close` removes all files.
        geometry: of the swap space that holds a snapshot which is continued; see `SnapshotSwap`.
    """

    def __init__(
        self, paths: Sequence[Path | str], name: str, rank: int, disk: Files | None = None, *, shared: bool = False
    ) -> None:
        self._disk, self._shared = disk or Files(), shared
        if not NAME.fullmatch(name):
            raise ConfigError(f"snapshot name: expected letters, digits, '.', '_' and '-', got {name!r}")
        folders = [check_folder(path) for path in paths]
        self.name = name
        self.rank = rank
        self.has_commit = True
        self.geometry: tuple[Sequence[int], int] | None = None
        self.direct = True
        self.root = folders[0] / FOLDER / name
        self.folders = [folder / FOLDER / name / f"rank-{rank}" for folder in folders]
        self._descriptors: list[int] = []
        try:
            for number, folder in enumerate(self.folders, 1):
                with report_read_errors(folder, REMOVE):
                    self._descriptors.append(self._lock(folder / "swap"))
                    self._check_part(folder / "part", f"{number} of {len(folders)}")
            self.has_commit = any(True for _ in self.folders[0].glob("manifest-*"))
        except BaseException:
            self._close_descriptors()
            raise

    @property
    def committed_head(self) -> dict[str, Any] | None:
        """The head that the first rank committed last; None: none. Only the first rank can read it.

        Raises StorageError: it cannot be read.
        """
        return read_committed(self.root)

    def manifest(self, number: int) -> Manifest | None:
        """This rank's manifest of that number; None if it has none. Raises StorageError: it is damaged."""
        path = self._manifest(number)
        with report_read_errors(path, REMOVE):
            if not path.exists():
                return None
            return self._manifest_in(self._disk.read_bytes(path), number, path)

    def _manifest_in(self, data: bytes, number: int, path: Path) -> Manifest | None:
        body, begin = _unpack(data, path)
        if body["number"] != number:
            return None
        state = data[begin : begin + body["state_bytes"]]
        if _checksum(state) != body["state_crc32c"]:
            raise _damage_error(path)
        return Manifest(number, body, state)

    def write_manifest(self, number: int, body: Mapping[str, Any], state: bytes) -> None:
        """Write this rank's manifest; all slots that it names must be on stable storage. Replaces that of `number` - 2.

        Raises StorageError: the manifest was not written.
        """
        fields = {"number": number, "state_bytes": len(state), "state_crc32c": _checksum(state)}
        data = _pack({**body, **fields}) + state
        self._overwrite(self._manifest(number), 0, data.ljust(align_up(len(data), MANIFEST_BYTES), b"\0"))

    def commit(self, head: Mapping[str, Any]) -> None:
        """By the first rank, once all ranks have their manifests: snapshot `head["number"]` becomes the valid one.

        Raises StorageError: it may be valid or not, so the previous snapshot must stay, too.
        """
        copy = _pack(head).ljust(PAGE_BYTES, b"\0")
        self._overwrite(self.root / "committed", head["number"] % 2 * 2 * PAGE_BYTES, 2 * copy)

    def _manifest(self, number: int) -> Path:
        return self.folders[0] / f"manifest-{number % 2}"

    def _overwrite(self, path: Path, offset: int, data: bytes) -> None:
        """Overwrite bytes of a file durably; if it is long enough, no metadata is synced. Raises StorageError."""
        nbytes = self._disk.file_bytes(path)
        grows = nbytes is None or nbytes < offset + len(data)
        operation: Operation = "create" if grows else "write"
        descriptor = self._disk.perform(operation, path, lambda: self._open_own(path, os.O_WRONLY | os.O_CREAT))
        try:
            self._disk.perform("write", path, lambda: write_all(descriptor, data, offset))
            self._disk.perform("sync", path, lambda: (os.fsync if grows else os.fdatasync)(descriptor))
        finally:
            os.close(descriptor)
        if grows:
            self._disk.sync_folder(path.parent)

    def close(self) -> None:
        """Unlock the snapshot; if it has no commit, remove its files. Idempotent."""
        if self._descriptors and not self.has_commit:
            remove_ranks(self.folders)
            if self.rank == 0:
                (self.root / "committed").unlink(missing_ok=True)
            remove_empty([folder.parent for folder in self.folders])
        self._close_descriptors()

    def open_swap(self, capacity_bytes: int) -> SnapshotSwap:
        """The swap space in the files. Raises as `SnapshotSwap`."""
        return SnapshotSwap(self, capacity_bytes, self.geometry)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of the swap files; this object owns them."""
        return tuple(self._descriptors)

    def _close_descriptors(self) -> None:
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked worker may have the descriptor too
            os.close(descriptor)

    def _lock(self, path: Path) -> int:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                descriptor = self._open(path)
            except FileNotFoundError:
                continue  # another job has just ended, and removed the folder
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_file(descriptor, path):
                    return descriptor
            except BlockingIOError:
                if time.monotonic() > end:
                    os.close(descriptor)
                    raise ConfigError(
                        f"offload_optimizer.snapshot: {self.name!r} (rank {self.rank}) is in use by another job, "
                        f"which has locked {path}; end that job, or set another snapshot.name for this one"
                    ) from None
            os.close(descriptor)
            time.sleep(0.05)

    def _check_part(self, path: Path, part: str) -> None:
        """Raise ConfigError if the files belong to a swap space over other folders: they must not be reused."""
        if not path.exists():
            self._disk.write_bytes(path, part, 0o600)
        stored = self._disk.read_bytes(path).decode(errors="replace")
        if stored != part:
            raise ConfigError(
                f"offload_optimizer.snapshot: {path.parent} is part {stored} of snapshot {self.name!r}, but part "
                f"{part} in this nvme_path; name the same folders in the same order, remove the snapshot (zero "
                "snapshots rm), or set another snapshot.name"
            )

    def _open(self, path: Path) -> int:
        try:  # a job that has just ended may have removed the folder
            descriptor = self._open_own(path, os.O_RDWR | os.O_CREAT, direct=True, make=self._make_folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(f"nvme_path: cannot open {path}: {error.strerror}") from error
        self.direct = self.direct and is_direct(descriptor)
        return descriptor

    def _make_folder(self, above: int, path: Path) -> None:
        def make() -> None:
            with contextlib.suppress(FileExistsError):  # another rank was faster
                os.mkdir(path.name, 0o755, dir_fd=above)  # by path it could be made where a planted link leads

        self._disk.perform("make folder", path, make)
        self._disk.sync_folder(path.parent)

    def _open_own(
        self,
        path: Path,
        flags: int,
        *,
        direct: bool = False,
        make: Callable[[int, Path], None] | None = None,
    ) -> int:
        """A file in one of the folders, which nobody else has put there. Raises ConfigError, OSError."""
        base = next(above for above in path.parents if above.name == FOLDER).parent
        names = path.parent.relative_to(base).parts
        folder = open_own_folder(base, names, shared=self._shared, advice=SHARED, make=make)
        try:
            return open_own_file(path.name, flags, folder=folder, path=path, shared=self._shared, direct=direct)
        finally:
            os.close(folder)


class SnapshotSwap(SwapSpace):
    """The swap space in a snapshot's files.

    Raises ConfigError: there is no room; StorageError: the file system refused the reservation. `geometry`: (counts,
    stripe_bytes) of the space when it was made; None: it is new, and the contents of the files are dropped.
    """

    def __init__(
        self,
        files: SnapshotFiles,
        capacity_bytes: int,
        geometry: tuple[Sequence[int], int] | None = None,
    ) -> None:
        self._snapshot, self.direct, self.capacity_bytes = files, files.direct, 0
        folders = [folder.parent for folder in files.folders]
        self._map = StripeMap(stripe_weights(folders)) if geometry is None else StripeMap.of_counts(*geometry)
        named = zip(files.descriptors, files.folders, strict=True)
        self._files = [SwapFile(descriptor, str(folder / "swap")) for descriptor, folder in named]
        try:
            if geometry is None:
                for file in self._files:
                    os.ftruncate(file.fd, 0)
            allocated = [os.fstat(file.fd).st_blocks * 512 for file in self._files]
            needs = self._lengths(capacity_bytes)
            check_room(folders, [max(need - nbytes, 0) for need, nbytes in zip(needs, allocated, strict=True)])
            self.extend(capacity_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files; they stay if they hold a committed snapshot. Idempotent."""
        self._files = []
        self._snapshot.close()


def _is_same_file(descriptor: int, path: Path) -> bool:
    """False if another process has removed the file between opening and locking it."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (opened.st_dev, opened.st_ino) == (now.st_dev, now.st_ino)


def remove_ranks(folders: Sequence[Path]) -> None:
    """Remove the folders of ranks' parts; the caller must hold their locks."""
    for folder in folders:
        # The swap file last: it holds the lock.
        for path in sorted(folder.glob("*"), key=lambda path: path.name == "swap"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def remove_empty(roots: Sequence[Path]) -> None:
    """Remove the folders of snapshots and their parents, if they are empty."""
    for root in roots:
        for folder in (root, root.parent):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def read_committed(root: Path) -> dict[str, Any] | None:
    """The head that was committed last in the folder of a snapshot; None: none.

    Raises StorageError: it cannot be read, or is damaged; ConfigError: it is of another version.
    """
    path, heads = root / "committed", []
    with report_read_errors(path, REMOVE):
        if not path.exists():
            return None
        data = Files().read_bytes(path, COMMITTED_BYTES_MAX)
        for begin in range(0, len(data), PAGE_BYTES):
            with contextlib.suppress(StorageError):  # torn
                heads.append(_unpack(data[begin : begin + PAGE_BYTES], path)[0])
        if not heads:
            raise _damage_error(path)
        return max(heads, key=lambda head: [int(head[key]) for key in ("number", "step", "ranks")])


def read_body(path: Path) -> dict[str, Any]:
    """The body of a manifest.

    Raises StorageError: it cannot be read, or is damaged; ConfigError: it is of another version.
    """
    return _unpack(Files().read_bytes(path), path)[0]


def _pack(body: Mapping[str, Any]) -> bytes:
    text = json.dumps({"format": FORMAT, **body}, separators=(",", ":")).encode()
    return text + f"\n{_checksum(text)}\n".encode()


def _unpack(data: bytes, path: Path) -> tuple[dict[str, Any], int]:
    """The body that was passed to `_pack`, and where it ends in `data`."""
    text, _, tail = data.partition(b"\n")
    checksum = tail.partition(b"\n")[0]
    if checksum != _checksum(text).encode():
        raise _damage_error(path)
    with report_read_errors(path, REMOVE):
        body = dict(json.loads(text))
    if body.get("format") != FORMAT:
        raise ConfigError(
            f"snapshot: {path} has format {body.get('format')}, and this version reads {FORMAT}; use the version that "
            "wrote it, or remove the snapshot (zero snapshots rm)"
        )
    return body, len(text) + len(checksum) + 2


def _checksum(data: bytes) -> str:
    return f"{kernels.crc32c(bytes_tensor(data or b'-')):08x}"


def _damage_error(path: Path) -> StorageError:
    what = f"snapshot: a file is damaged (its checksum differs); {REMOVE}"
    return StorageError(what, errno=5, path=str(path), offset=0, free_bytes=None)


# ---- all snapshots below a folder, of any job -------------------------------------------------------


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
