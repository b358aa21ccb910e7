"""Files of Linux that Python has no functions for, or that some builds of Python or libc lack or change."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

MFD_CLOEXEC, MFD_ALLOW_SEALING, MFD_NOEXEC_SEAL = 1, 2, 8
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
SYS_PIDFD_OPEN = 434  # The same on all processors.
NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


def memory_file(*, sealable: bool = False) -> int:
    """Descriptor of a new file in memory: empty, without a name, close-on-exec.

    Raises OSError: the kernel or the C library has no such files, or too many files are open. `sealable`: the file's
    length can be made final.
    """
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    if create is None:
        raise OSError(errno.ENOSYS, "the C library has no memfd_create (glibc has it since 2.27)")
    # Linux before 6.3 does not know MFD_NOEXEC_SEAL, which also allows sealing; there only MFD_ALLOW_SEALING does.
    for flags in (MFD_NOEXEC_SEAL, MFD_ALLOW_SEALING if sealable else 0):
        descriptor = int(create(b"zero-infinity", MFD_CLOEXEC | flags))
        if descriptor >= 0:
            return descriptor
    raise _error()


def open_direct(path: Path, flags: int, mode: int) -> tuple[int, bool]:
    """Descriptor, and whether it bypasses the page cache: tmpfs and some network file systems refuse O_DIRECT.

    Raises OSError: the file cannot be opened either way. `flags`, `mode`: as of `os.open`.
    """
    try:
        return os.open(path, flags | os.O_DIRECT, mode), True
    except OSError as error:
        if error.errno not in NO_DIRECT_IO:
            raise
    if flags & os.O_EXCL:
        path.unlink(missing_ok=True)  # some file systems refuse only after they have made the file
    return os.open(path, flags, mode), False


def nameless_file(folder: Path, *, direct: bool) -> tuple[int, bool]:
    """Descriptor of a new file without a name, and whether it bypasses the page cache, as it should with `direct`.

    The file system frees its space with the last descriptor, however the process ends. Where it cannot make a file
    without a name, the file has one for an instant, and a process that is killed then leaves it behind, empty. Raises
    OSError: no file can be made in the folder.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # NFS and some others have no such files
        if direct:
            return open_direct(folder, flags | os.O_TMPFILE, 0o600)
        return os.open(folder, flags | os.O_TMPFILE, 0o600), False
    descriptor, name = tempfile.mkstemp(prefix="zero-infinity-", dir=folder)
    try:
        if not direct:
            return descriptor, False
        # Not by its name, which another user may have given to another file by now. While it has one: not all file
        # systems can open a file that has lost it.
        reopened = open_direct(Path(f"/proc/self/fd/{descriptor}"), flags, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
    os.close(descriptor)
    return reopened


def reopen(descriptor: int, flags: int) -> int | None:
    """Another descriptor of the same file, opened with `flags`; None if that is not possible."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
    except OSError:
        return None


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Give a file its bytes [offset, offset + nbytes), with space on the disk if the file system can reserve any.

    `posix_fallocate` would write a byte to each block where it cannot: one request after another to a file server.

    Raises OSError: there is no room.
    """
    try:
        _fallocate(descriptor, 0, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if os.fstat(descriptor).st_size < offset + nbytes:
            os.ftruncate(descriptor, offset + nbytes)


def punch_hole(descriptor: int, offset: int, nbytes: int) -> None:
    """Free the space of a file's bytes [offset, offset + nbytes); they read as zero afterwards.

    Raises OSError: the file system cannot do this.
    """
    _fallocate(descriptor, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, offset, nbytes)


def _fallocate(descriptor: int, mode: int, offset: int, nbytes: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(descriptor, mode, offset, nbytes) != 0:
        if ctypes.get_errno() != errno.EINTR:  # a signal: its handler runs in between
            raise _error()


def open_pidfd() -> int:
    """A descriptor that becomes readable when this process has ended, also in other processes that received it.

    Raises OSError: the kernel has no such descriptors (before 5.3), or does not allow it.
    """
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_OPEN, os.getpid(), 0))
    if descriptor < 0:
        raise _error()
    return descriptor


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


# ---- cgroups -------------------------------------------------------------------------------------------------------
# Memory control groups of a process: their folders and limits, in version 1 or 2; the files of the kernel.


UNLIMITED_BYTES = 1 << 60
"""Version 1 shows a larger number where there is no limit, version 2 a word."""


def memory_groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, Path, bool]]:
    """This process's group and its parents: (folder, mount point of the groups, is it version 2).

    The innermost is first; none if they cannot be read. `proc`, `cgroups`: where the kernel shows processes and groups.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_v2 = not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        mount = cgroups if is_v2 else cgroups / "memory"
        folder = mount / path.lstrip("/")
        while folder != mount and not folder.is_dir():  # a container may see only its own part of the tree
            folder = folder.parent
        yield folder, mount, is_v2
        while folder != mount:
            folder = folder.parent
            yield folder, mount, is_v2


def limit_bytes(folder: Path, *, is_v2: bool) -> int | None:
    """The limit of the group in this folder; None: it has none, or it cannot be read."""
    limit = number_in(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
    return limit if limit is not None and limit < UNLIMITED_BYTES else None


def number_in(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def table_in(path: Path) -> dict[str, int]:
    """Read lines of a name and a number; the rest of a line is ignored."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
