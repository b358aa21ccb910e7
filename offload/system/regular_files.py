"""Opening and reading files that others may have prepared.

Whoever can write to a folder can put a pipe there, at which a reader waits for ever, a device or a huge file without
blocks, which never ends, a link to somebody else's file, or contents that no writer of ours makes. So all readers open
regular files only, and what contents make Python raise becomes one error that names the file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, StorageError, ZeroInfinityError

logger = logging.getLogger("zero")

SMALL_BYTES_MAX = 1 << 30  # Of a file that is read whole: the manifest of a model with 10^12 parameters is a tenth.
KINDS = {
    **{stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"},
    stat.S_IFSOCK: "a socket",
}
# Contents that are not what a reader expects make Python raise any of these.
CONTENT_ERRORS = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


def open_regular(
    path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o600, *, folder: int | None = None, direct: bool = False
) -> int:
    """Descriptor of a regular file, as of `os.open`; it waits for nobody, whatever lies at the path.

    Raises OSError: it cannot be opened; StorageError (which is an OSError): it is not a regular file.

    Args:
        folder: descriptor of the folder that `path` is relative to.
        direct: bypass the page cache, if the file system allows it.
    """
    waitless = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a pipe would wait for another process
    descriptor = os.open(path, flags | waitless, mode, dir_fd=folder)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            what = f"open: expected a regular file, got {KINDS.get(kind, 'something else')}"
            raise StorageError(what, errno=errno.EINVAL, path=str(path), offset=0, free_bytes=None)
        blocking_flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_NONBLOCK
        fcntl.fcntl(descriptor, fcntl.F_SETFL, blocking_flags)
        if direct:
            _bypass_cache(descriptor, blocking_flags)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _bypass_cache(descriptor: int, flags: int) -> None:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def is_direct(descriptor: int) -> bool:
    """True if the file was opened so that transfers bypass the page cache."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def read_regular(path: Path | str, nbytes_max: int = SMALL_BYTES_MAX) -> bytes:
    """The contents of a regular file. Raises as `open_regular`; StorageError: it has more than `nbytes_max` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        data = b"" if nbytes > nbytes_max else file.read(nbytes_max + 1)
    if max(nbytes, len(data)) > nbytes_max:
        what = f"read: expected at most {nbytes_max:,} bytes, got {max(nbytes, len(data)):,}"
        raise StorageError(what, errno=errno.EFBIG, path=str(path), offset=0, free_bytes=None)
    return data


@contextmanager
def report_read_errors(place: Path | str, advice: str = "copy or write it again") -> Iterator[None]:
    """Whatever reading the file makes Python raise becomes an error that names it.

    Raises StorageError: the file cannot be opened or read; ConfigError: its contents are not what is expected. Errors
    of this project pass.
    """
    try:
        yield
    except ZeroInfinityError:
        raise
    except OSError as error:
        raise StorageError.from_os_error(error, "read", Path(error.filename or place)) from error
    except CONTENT_ERRORS as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{place} is damaged, or not what its name says ({why}); {advice}") from error


def read_json(path: Path | str) -> Any:
    """The JSON value in a file. Raises as `report_read_errors`."""
    with report_read_errors(path):
        return json.loads(read_regular(path))


def open_own_folder(
    base: Path,
    names: Sequence[str],
    *,
    shared: bool,
    advice: str,
    make: Callable[[int, Path], None] | None = None,
) -> int:
    """Descriptor of the folder base/NAME/NAME...; no name below `base` may be a link, or be in the hands of others.

    Raises ConfigError: one is no folder, belongs to another user, or others can write to it; ends with `advice`.

    Args:
        base: named by the user, so it may be a link, and anybody's.
        names: of folders below it.
        shared: folders may be of other users.
        make: makes a missing folder, the path, in the folder of the descriptor; None: a missing one is an error.
    """
    flags, path = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, base
    descriptor = os.open(base, flags)
    try:
        for name in names:
            path = path / name
            above, descriptor = descriptor, _open_subfolder(descriptor, path, flags | os.O_NOFOLLOW, make)
            os.close(above)
            wrong = "" if shared else _why_not_private(descriptor, path)
            if wrong:
                raise ConfigError(f"{path}: expected a folder that only this user can write to, but {wrong}; {advice}")
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _open_subfolder(descriptor: int, path: Path, flags: int, make: Callable[[int, Path], None] | None) -> int:
    try:
        return os.open(path.name, flags, dir_fd=descriptor)
    except FileNotFoundError:
        if make is None:
            raise
        make(descriptor, path)
        return _open_subfolder(descriptor, path, flags, None)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ConfigError(f"{path}: expected a folder, got a link or a file; remove it") from error
        raise


def open_own_file(name: str, flags: int, *, folder: int, path: Path, shared: bool, direct: bool = False) -> int:
    """Descriptor of a file of this user in a folder, made with mode 0600; links are not followed.

    Raises ConfigError: it is a link, no regular file, has a second name, or belongs to another user; OSError: it cannot
    be opened. `path`: of the file, for errors; `shared`: it may be another user's.
    """
    try:
        descriptor = open_regular(name, flags | os.O_NOFOLLOW, 0o600, folder=folder, direct=direct)
    except OSError as error:
        if isinstance(error, StorageError) or error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ConfigError(f"{path}: expected a regular file, got a link or something else; remove it") from error
        raise
    status = os.fstat(descriptor)
    wrong = "it has a second name elsewhere (a hard link)" if status.st_nlink > 1 else ""
    wrong = wrong or ("" if shared or _is_ours(status) else f"it belongs to the user {status.st_uid}")
    if wrong:
        os.close(descriptor)
        raise ConfigError(f"{path}: expected a file that only this user can write to, but {wrong}; remove it")
    return descriptor


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def _why_not_private(descriptor: int, path: Path) -> str:
    """Why others may have put files into an open folder; empty if they cannot."""
    status = os.fstat(descriptor)
    if not _is_ours(status):
        return f"it belongs to the user {status.st_uid}"
    if not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_mode & stat.S_ISVTX:
        return ""
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        return f"its mode is {stat.S_IMODE(status.st_mode):04o} (chmod go-w)"
    return _remove_group_write(descriptor, stat.S_IMODE(status.st_mode), path)


def _remove_group_write(descriptor: int, mode: int, path: Path) -> str:
    """Take the right to write away from the group: umask 0002 gave it to all folders. Why not; empty if it is done."""
    planted = _foreign_entry(descriptor)
    if not planted:
        os.fchmod(descriptor, mode & ~stat.S_IWGRP)
        planted = _foreign_entry(descriptor)  # again, as nothing can be added any more
        if not planted:
            logger.warning("%s had mode %04o: its group can no longer write to it", path, mode)
            return ""
        os.fchmod(descriptor, mode)  # or it would be accepted the next time
    return f"its mode is {mode:04o} (chmod go-w), and {planted} in it may have been put there by others"


def _foreign_entry(descriptor: int) -> str:
    """Name of a link, of a file with a second name or of another user in an open folder; empty: none."""
    for name in os.listdir(descriptor):
        status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        is_second_name = status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode)
        if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode) or is_second_name:
            return name
    return ""
