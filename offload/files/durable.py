"""Files and folders that survive a crash: a finished call is on the disk, an interrupted call has no partial effect.

A file's bytes are durable once the file is synced, its name once the folder is synced. Every call that changes the disk
uses `Files.perform`, so that a test can stop between any two of them and drop all changes that were not synced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch

from offload.errors import StorageError
from offload.io.swapfile import free_bytes
from offload.system import linux
from offload.system.regular_files import SMALL_BYTES_MAX, is_direct, open_regular, read_regular

Operation = Literal[
    "create", "reserve", "write", "truncate", "sync", "rename", "unlink", "make folder", "remove folder", "sync folder"
]
T = TypeVar("T")
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
SECOND_NS = 10**9
# NAME + STAGED_INFIX + process id is the file to which the new contents of NAME are written first.
STAGED_INFIX = ".partial-"


class DurableFile:
    """An open file, for transfers through its descriptor.

    Attributes:
        fd: its descriptor; closed by `close`.
        direct: transfers bypass the page cache: offsets, sizes and addresses must be multiples of 4096.
    """

    def __init__(self, files: Files, path: Path, fd: int, direct: bool) -> None:
        self.path = path
        self.fd = fd
        self.direct = direct
        self._files = files

    def sync(self) -> None:
        """Make all bytes written so far durable; the file's name needs a sync of the folder, too.

        Raises StorageError: the bytes may be lost; do not try again, the kernel may have dropped the pages.
        """
        self._files.perform("sync", self.path, lambda: os.fsync(self.fd))

    def truncate(self, nbytes: int) -> None:
        self._files.perform("truncate", self.path, lambda: os.ftruncate(self.fd, nbytes))

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Close the descriptor, without a sync. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Lock:
    """A lock between processes, on an open file; the kernel frees it when the process ends, however it ends.

    `is_certain`: False if the file system has no locks: another process may then hold it too.
    """

    def __init__(self, fd: int, is_certain: bool) -> None:
        self._fd, self.is_certain = fd, is_certain

    def close(self) -> None:
        """Free the lock. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked worker may have the descriptor too
            os.close(fd)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Files:
    """The real disk. Stateless. Failures raise a StorageError with path, errno and free space."""

    def perform(self, operation: Operation, path: Path, action: Callable[[], T], new: Path | None = None) -> T:
        """Run `action`, one system call that changes the disk; all changes are made here. `new`: of a rename."""
        return _call_or_raise(operation if new is None else f"{operation} to {new.name}", path, action)

    def on_write(self, file: DurableFile, offset: int, data: torch.Tensor) -> None:
        """Call it after `data` was written to `file` at `offset` through its descriptor; tests record the write."""

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        """Make a folder and its parents durably; does nothing if the folder exists."""
        if _call_or_raise("look at", path, path.is_dir):
            return
        self.make_folder(path.parent, mode)
        self.perform("make folder", path, lambda: path.mkdir(mode, exist_ok=True))
        self.sync_folder(path.parent)

    def create(self, path: Path, nbytes: int) -> DurableFile:
        """A new file with `nbytes` reserved, open with O_DIRECT if the file system allows it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd, direct = self.perform("create", path, lambda: linux.open_direct(path, flags, 0o644))
        file = DurableFile(self, path, fd, direct)
        try:
            if nbytes:
                self.perform("reserve", path, lambda: linux.reserve(fd, 0, nbytes))
        except BaseException:
            file.close()
            self.perform("unlink", path, path.unlink)
            raise
        return file

    def stage(self, path: Path, data: bytes | str, mode: int = 0o644, seconds: float | None = None) -> Path:
        """Write the new contents of `path` durably to a file next to it; returns its path. `rename` needs no space.

        `seconds`: the time of the last write that the file gets, if the file system lets us; None: now.
        """
        staged = path.with_name(f"{path.name}{STAGED_INFIX}{os.getpid()}")
        self.remove(staged)  # left by a dead process that had the same id
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = self.perform("create", staged, lambda: os.open(staged, flags, mode))
        try:
            content = data.encode() if isinstance(data, str) else data
            self.perform("write", staged, lambda: _write_dated(fd, content, seconds))
            self.perform("sync", staged, lambda: os.fsync(fd))
        except Exception:
            self.remove(staged)
            raise
        finally:
            os.close(fd)
        return staged

    def write_bytes(self, path: Path, data: bytes | str, mode: int = 0o644, seconds: float | None = None) -> None:
        """Replace the contents of `path` by `data` durably: at any moment the file has all old or all new contents.

        `seconds`: as for `stage`.
        """
        staged = self.stage(path, data, mode, seconds)
        try:
            self.rename(staged, path)
        except Exception:
            self.remove(staged)
            raise

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or a folder durably; it replaces a file or an empty folder of the new name."""
        self.perform("rename", old, lambda: old.replace(new), new)
        for parent in {old.parent, new.parent}:
            self.sync_folder(parent)

    def remove(self, path: Path, first: Sequence[str] = ()) -> None:
        """Remove a file, or a folder with all its contents; does nothing if the path does not exist.

        `first`: names in the folder that are removed first, durably: a folder without them is known to be incomplete.
        """
        if not os.path.lexists(path):
            return
        self._remove(path, first)
        self.sync_folder(path.parent)

    def sync_folder(self, path: Path) -> None:
        """Make the names in the folder durable."""
        self.perform("sync folder", path, lambda: _sync_folder(path))

    def _remove(self, path: Path, first: Sequence[str]) -> None:
        if path.is_symlink() or not path.is_dir():
            self.perform("unlink", path, path.unlink)
            return
        first_paths = [path / name for name in first if os.path.lexists(path / name)]
        for first_path in first_paths:
            self.perform("unlink", first_path, first_path.unlink)
        if first_paths:
            self.sync_folder(path)
        for name in self.listing(path):
            self._remove(path / name, ())
        self.perform("remove folder", path, path.rmdir)

    def open(self, path: Path) -> DurableFile:
        """An existing file, for reads through its descriptor, open with O_DIRECT if the file system allows it."""
        fd = _call_or_raise("open", path, lambda: open_regular(path, direct=True))
        return DurableFile(self, path, fd, is_direct(fd))

    def read_bytes(self, path: Path, nbytes_max: int = SMALL_BYTES_MAX) -> bytes:
        """All of a regular file. Raises StorageError: it is something else, or has more than `nbytes_max` bytes."""
        return _call_or_raise("read", path, lambda: read_regular(path, nbytes_max))

    def listing(self, path: Path) -> list[str]:
        """The names in a folder, sorted; none if it does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError.from_os_error(error, "list", path) from error

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def file_bytes(self, path: Path) -> int | None:
        """Length of a file; None if there is no file."""
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError.from_os_error(error, "look at", path) from error
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def stamp(self, path: Path) -> tuple[int, int, int]:
        """(inode, bytes, time of the last write in ns) of a file: if they differ, the contents may have changed."""
        status = _call_or_raise("look at", path, path.stat)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def free_bytes(self, path: Path) -> int:
        """Free space for files at `path`, which need not exist yet."""
        return _call_or_raise("look at", path, lambda: free_bytes(_existing_parent(path)))

    def lock(self, path: Path, wait_seconds: float = 0.0) -> Lock | None:
        """Lock a file, which is made if it is missing; None if another process keeps the lock during `wait_seconds`.

        A link is not followed: its target would be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        fd = self.perform("create", path, lambda: open_regular(path, flags, 0o644))
        return _lock(fd, wait_seconds)

    def lock_folder(self, path: Path, wait_seconds: float = 0.0) -> Lock | None:
        """As `lock`, on a folder itself: no file is left in it."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return _lock(_call_or_raise("open", path, lambda: os.open(path, flags)), wait_seconds)


def _lock(fd: int, wait_seconds: float) -> Lock | None:
    until = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return Lock(fd, True)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return Lock(fd, False)
            if time.monotonic() >= until:
                os.close(fd)
                return None
        time.sleep(0.02)


def _call_or_raise(what: str, path: Path, action: Callable[[], T]) -> T:
    try:
        return action()
    except StorageError:
        raise
    except OSError as error:
        raise StorageError.from_os_error(error, what, path) from error


def _existing_parent(path: Path) -> Path:
    """The folder itself, or its nearest parent that exists."""
    path = path.absolute()
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), path)


def write_all(fd: int, data: bytes, offset: int = 0) -> None:
    remaining = memoryview(data)
    while remaining:
        count = os.pwrite(fd, remaining, offset)
        remaining, offset = remaining[count:], offset + count


def _write_dated(fd: int, data: bytes, seconds: float | None) -> None:
    write_all(fd, data)
    if seconds is not None:
        with contextlib.suppress(OSError):
            os.utime(fd, ns=(int(seconds * SECOND_NS),) * 2)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in linux.NO_DIRECT_IO:  # some network file systems have nothing to sync in a folder
            raise
    finally:
        os.close(fd)
