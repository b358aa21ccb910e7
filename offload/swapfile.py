"""Swap space: preallocated O_DIRECT files, striped over the given paths, that nobody can leave behind.

Each path gets a unique run folder with a locked file in it. The files are unlinked as soon as they
are open, so the kernel frees them when the process ends, however it ends, and two jobs on one path
never meet. What a kill can leave is an empty folder of a job that died while starting; the next
start on that path removes those whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError, StateError, StorageError
from offload.sizes import PAGE_BYTES, align_up

RUN_FOLDER_PREFIX = "zero-infinity-"
STRIPE_BYTES = 4 << 20
PROBE_BYTES = 16 << 20
STARTING_SECONDS = 60.0
"""A run folder that is younger may belong to a job between creating and unlinking its file."""


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a transfer that lies in one file, contiguous there."""

    fd: int
    path: str
    file_offset: int
    begin: int
    """First byte of the transfer's buffer that this span covers."""
    nbytes: int


@dataclass(slots=True)
class _File:
    fd: int
    path: str
    stripes: int
    """Stripes of each round that go to this file: its share of the measured speed."""
    first_stripe: int = 0


def free_bytes(path: Path | str) -> int:
    """Bytes an unprivileged process may still write below `path`."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


class SwapSpace:
    """A byte range [0, capacity_bytes) over one or more files.

    Args:
        paths: existing folders, best on different drives.
        capacity_bytes: reserved at once, so a full disk fails before training does.

    Raises:
        ConfigError: a path is missing or not writable, or has no room ("need X, have Y at PATH").
        StorageError: the file system refused the reservation.
    """

    def __init__(self, paths: Sequence[Path | str], capacity_bytes: int) -> None:
        self.direct = True
        self._files: list[_File] = []
        folders = [check_folder(path) for path in paths]
        if not folders:
            raise ConfigError("swap space: nvme_path is empty; give at least one folder")
        self._capacity_bytes = 0
        check_room(folders, capacity_bytes)
        try:
            for folder in folders:
                self._files.append(self._create(folder))
            self._share_stripes()
            self.extend(capacity_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def capacity_bytes(self) -> int:
        """Reserved bytes."""
        return self._capacity_bytes

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders in use."""
        return tuple(file.path for file in self._files)

    def extend(self, nbytes: int) -> int:
        """Reserve `nbytes` more; returns the offset of the new range.

        Raises:
            StorageError: the file system has no room; nothing was written.
        """
        self._check_open()
        begin = self._capacity_bytes
        end = align_up(begin + nbytes, PAGE_BYTES)
        round_stripes = sum(file.stripes for file in self._files)
        rounds = -(-end // (round_stripes * STRIPE_BYTES))
        for file in self._files:
            length = end if len(self._files) == 1 else rounds * file.stripes * STRIPE_BYTES
            _reserve(file, max(length, PAGE_BYTES), begin)
        self._capacity_bytes = end
        return begin

    def spans(self, offset: int, nbytes: int) -> Iterator[Span]:
        """The file ranges behind [offset, offset + nbytes), in order, neighbours in one file merged."""
        self._check_open()
        if len(self._files) == 1:
            yield Span(self._files[0].fd, self._files[0].path, offset, 0, nbytes)
            return
        round_stripes = sum(file.stripes for file in self._files)
        position = offset
        end = offset + nbytes
        while position < end:
            stripe, inside = divmod(position, STRIPE_BYTES)
            turn, index = divmod(stripe, round_stripes)
            file = next(f for f in reversed(self._files) if f.first_stripe <= index)
            local = index - file.first_stripe
            # The rest of this file's run of stripes in this round is contiguous in the file.
            length = min((file.stripes - local) * STRIPE_BYTES - inside, end - position)
            file_offset = (turn * file.stripes + local) * STRIPE_BYTES + inside
            yield Span(file.fd, file.path, file_offset, position - offset, length)
            position += length

    def close(self) -> None:
        """Close the files; their space returns to the file system. Idempotent."""
        files, self._files = self._files, []
        for file in files:
            os.close(file.fd)

    def _check_open(self) -> None:
        if not self._files:
            raise StateError("the swap space is closed")

    def _create(self, folder: Path) -> _File:
        remove_stale_runs(folder)
        try:
            run = Path(tempfile.mkdtemp(prefix=f"{RUN_FOLDER_PREFIX}{os.getpid()}-", dir=folder))
        except OSError as error:
            raise ConfigError(f"nvme_path: cannot create a folder in {folder}: {error.strerror}") from error
        path = run / "swap"
        try:
            fd = self._open_direct(path)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            shutil.rmtree(run, ignore_errors=True)
        return _File(fd, str(folder), stripes=1)

    def _open_direct(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            # tmpfs and some network file systems have no O_DIRECT; the page cache then sits between.
            self.direct = False
            path.unlink(missing_ok=True)
            return os.open(path, flags, 0o600)

    def _share_stripes(self) -> None:
        """Give each file stripes in proportion to its measured write speed (1 to 8 per round)."""
        if len(self._files) == 1:
            return
        seconds = [_probe_seconds(file) for file in self._files]
        slowest = max(seconds)
        first = 0
        for file, elapsed in zip(self._files, seconds, strict=True):
            file.stripes = min(8, max(1, round(slowest / elapsed)))
            file.first_stripe = first
            first += file.stripes


def check_folder(path: Path | str) -> Path:
    """The folder as a Path.

    Raises:
        ConfigError: it does not exist, is not a folder, or is not writable.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"nvme_path: {folder} is not an existing folder; create it on the NVMe file system")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"nvme_path: {folder} is not writable for this user")
    return folder


def check_room(folders: Sequence[Path], nbytes: int) -> None:
    """Refuse a swap space that the file systems cannot hold, before a byte is written.

    Raises:
        ConfigError: "need X, have Y at PATH".
    """
    share = -(-nbytes // len(folders))
    if len(folders) > 1:
        share = max(share, PROBE_BYTES)
    for folder in folders:
        devices = sum(1 for other in folders if other.stat().st_dev == folder.stat().st_dev)
        have, need = free_bytes(folder), share * devices
        if have < need:
            raise ConfigError(
                f"nvme_path: need {need:,} bytes, have {have:,} at {folder}; free some space, add another path, "
                "or keep a plane in host memory with offload_param or offload_optimizer device cpu"
            )


def remove_stale_runs(folder: Path) -> None:
    """Remove run folders of jobs that died between creating and unlinking their file."""
    for run in folder.glob(f"{RUN_FOLDER_PREFIX}*"):
        swap = run / "swap"
        try:
            if time.time() - run.stat().st_mtime < STARTING_SECONDS:
                continue  # another job may be creating its file: to try the lock could make it fail to get it
            if swap.exists():
                with swap.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(run, ignore_errors=True)
        except OSError:
            continue  # locked by its owner, or gone meanwhile


def _reserve(file: _File, nbytes: int, offset: int) -> None:
    """Make the first `nbytes` of the file exist; `offset` is where the new part of the swap space begins."""
    try:
        os.posix_fallocate(file.fd, 0, nbytes)
    except OSError as error:
        raise _failure(f"reserving swap space: need {nbytes:,} bytes", error, file, offset) from error


def _probe_seconds(file: _File) -> float:
    """Seconds to write PROBE_BYTES, page-aligned."""
    from offload.pinned import map_host

    _reserve(file, PROBE_BYTES, 0)
    data = map_host(PROBE_BYTES)
    begin = time.perf_counter()
    written = 0
    try:
        while written < PROBE_BYTES:
            written += os.pwrite(file.fd, data[written : written + STRIPE_BYTES], written)
        os.fdatasync(file.fd)
    except OSError as error:
        raise _failure("measuring the speed of swap space", error, file, written) from error
    return max(time.perf_counter() - begin, 1e-6)


def _failure(what: str, error: OSError, file: _File, offset: int) -> StorageError:
    return StorageError(what, errno=error.errno or 0, path=file.path, offset=offset, free_bytes=free_bytes(file.path))
