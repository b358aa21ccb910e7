"""A process and Linux: it dies with its parent, its CPUs are threads of cores.

Standard library only: it is loaded before anything else.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process (SIGKILL) when its parent ends, also when the parent is killed.

    This stays in force after an exec. `parent`: id of the process that this one must not outlive; if it has ended
    already, this process ends at once. (The direct parent may be a wrapper between the two.)
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if parent is not None and os.getppid() != parent and not Path(f"/proc/{parent}").exists():
        os.kill(os.getpid(), signal.SIGKILL)


def core_of(cpu: int) -> str:
    """A name for the core of which a CPU is a hardware thread."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return siblings.read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)
