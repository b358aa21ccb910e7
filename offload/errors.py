"""Every error this project raises on purpose.

A message names the operation, the place, the expected and the found value, and the knob that changes it.
"""

from __future__ import annotations

import errno as errno_names
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class ZeroInfinityError(Exception):
    """Root of the project's errors."""


class ConfigError(ZeroInfinityError, ValueError):
    """A configuration that cannot work; the message lists every problem found, with its path."""


class BudgetError(ZeroInfinityError, MemoryError):
    """A plan or an allocation that does not fit its budget; names the knob to turn."""


class StateError(ZeroInfinityError, RuntimeError):
    """An operation that is illegal in the present state, such as using a closed engine."""


class NativeError(ZeroInfinityError, RuntimeError):
    """A native library is missing, stale, or returned an unexpected status."""


class StorageError(ZeroInfinityError, OSError):
    """A transfer to or from a file failed.

    Attributes:
        errno: positive errno of the failed transfer.
        path: the swap file or folder.
        offset: byte offset of the failed chunk in that file.
        free_bytes: free space on the file system when the error was made; None if unknown.
        is_in_memory: what could not be written is kept in memory: nothing is lost.
    """

    is_in_memory = False

    def __init__(self, what: str, *, errno: int, path: str, offset: int, free_bytes: int | None) -> None:
        name = errno_names.errorcode.get(errno, str(errno))
        free = "unknown" if free_bytes is None else f"{free_bytes:,} bytes"
        super().__init__(
            errno,
            f"{what}: {os.strerror(errno)} ({name}) at {path}, offset {offset:,}; free space there: {free}"
            + (_file_limit_text() if errno == errno_names.EMFILE else ""),
        )
        self.path, self.offset, self.free_bytes = path, offset, free_bytes

    @classmethod
    def from_os_error(cls, error: OSError, what: str, place: Path | str, offset: int = 0) -> StorageError:
        """The error of a system call. `place`: a path; or, as a str, the name of something that is on no disk."""
        free_bytes = _free_bytes(place) if isinstance(place, Path) else None
        return cls(what, errno=error.errno or 0, path=str(place), offset=offset, free_bytes=free_bytes)

    def within(self, doing: str) -> StorageError:
        """The same error, with the name of the larger operation before its message."""
        error = StorageError.__new__(StorageError, self.errno, f"{doing}: {self}")
        OSError.__init__(error, self.errno, f"{doing}: {self}")
        error.path, error.offset, error.free_bytes = self.path, self.offset, self.free_bytes
        error.__cause__ = self
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """For errors that cross processes, such as workers of a pool: the pool hangs if it cannot unpickle an error."""
        return _storage_error, self.args, self.__dict__

    def __str__(self) -> str:
        return str(self.args[1]) if len(self.args) > 1 else super().__str__()


def _storage_error(*args: Any) -> StorageError:
    error = StorageError.__new__(StorageError, *args)
    OSError.__init__(error, *args)
    return error


def _free_bytes(path: Path) -> int | None:
    """Free space at a path, or at its nearest parent that exists; None if unknown."""
    with suppress(OSError):  # the working directory may be gone, the disk may be dead
        for place in (path.absolute(), *path.absolute().parents):
            with suppress(FileNotFoundError, NotADirectoryError):
                status = os.statvfs(place)
                return status.f_bavail * status.f_frsize
    return None


FILE_LIMIT = "raise it with ulimit -n"


def _file_limit_text() -> str:
    soft, hard = (
        "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,}"
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return f"; this process may have {soft} files open (RLIMIT_NOFILE): {FILE_LIMIT}, up to {hard}"


@contextmanager
def explain_file_limit(doing: str) -> Iterator[None]:
    """If the block fails because too many files are open, raise a StorageError that says so and names the fix.

    Many operations open files: imports, event loops, other libraries, each with its own error.
    """
    try:
        yield
    except Exception as error:
        text, emfile = str(error), errno_names.EMFILE
        if FILE_LIMIT in text or (getattr(error, "errno", None) != emfile and os.strerror(emfile) not in text):
            raise
        named = (getattr(cause, "filename", None) for cause in (error, error.__cause__))
        path = str(next(filter(None, named), "no file in particular"))
        what = f"{doing}: {type(error).__name__}: {text}"
        raise StorageError(what, errno=emfile, path=path, offset=0, free_bytes=None) from error


def mark_reported(error: BaseException) -> None:
    """Note that a caller gets `error`: code that finds it later need not raise it again."""
    error.__dict__["is_reported"] = True


def is_reported(error: BaseException | None) -> bool:
    """True if a caller got `error` already."""
    return error is not None and "is_reported" in error.__dict__


class DamagedError(ConfigError):
    """Bytes of a checkpoint differ from the written ones."""


class PeerError(ZeroInfinityError, RuntimeError):
    """A peer process has ended, cannot be reached, or does something else than this one.

    Attributes:
        peers: the numbers of these peers.
    """

    def __init__(self, message: str, peers: Sequence[int]) -> None:
        super().__init__(message)
        self.peers = tuple(peers)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.peers), self.__dict__


class WatchdogError(ZeroInfinityError, TimeoutError):
    """An operation has not finished for too long; the message lists the transfers in flight."""


class RankDivergenceError(ZeroInfinityError, RuntimeError):
    """Ranks no longer do the same; the message names each rank and its operation at the first difference."""


class RankLostError(RankDivergenceError):
    """A rank has ended, has failed, or cannot be reached; the message names it and the known facts about its end."""
