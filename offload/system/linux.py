"""Calls of Linux that some builds of Python leave out: those made on systems older than the one they run on."""

from __future__ import annotations

import ctypes
import errno
import os

MFD_CLOEXEC, MFD_ALLOW_SEALING, MFD_NOEXEC_SEAL = 1, 2, 8
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
SYS_PIDFD_OPEN = 434  # The same on all processors.


def memory_file(*, sealable: bool = False) -> int:
    """Descriptor of a new file in memory: empty, nameless, closed in programs that are started.

    Raises OSError: the kernel or the C library has no such files, or there can be no more open ones. `sealable`: its
    length can be made final.
    """
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    if create is None:
        raise OSError(errno.ENOSYS, "the C library has no memfd_create (glibc has it since 2.27)")
    # Before Linux 6.3 nobody knew of files that could be run, and one said only whether they may be sealed.
    for flags in (MFD_NOEXEC_SEAL, MFD_ALLOW_SEALING if sealable else 0):
        descriptor = int(create(b"zero-infinity", MFD_CLOEXEC | flags))
        if descriptor >= 0:
            return descriptor
    raise _error()


def punch_hole(descriptor: int, offset: int, nbytes: int) -> None:
    """Give the room of a file's bytes [offset, offset + nbytes) back to its file system; they read as zero.

    Raises OSError: the file system cannot.
    """
    punch = ctypes.CDLL(None, use_errno=True).fallocate
    punch.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if punch(descriptor, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, offset, nbytes) != 0:
        raise _error()


def open_lifeline() -> int:
    """A descriptor that becomes readable when this process has ended, wherever it was passed on to.

    Raises OSError: the kernel has none (before 5.3), or does not allow it.
    """
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_OPEN, os.getpid(), 0))
    if descriptor < 0:
        raise _error()
    return descriptor


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
