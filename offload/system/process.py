"""What the kernel does to a process when its parent dies. Standard library only: it is loaded before anything else."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent ends, also when the parent is killed.

    The order stays in force when the process becomes another program by exec. `parent`: process id of who is to be
    outlived by nobody; if it is gone already, this process ends at once. (A wrapper between the two may be the parent
    proper.).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if parent is not None and os.getppid() != parent and not Path(f"/proc/{parent}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
