"""Shuts connections that a library has opened and offers no way to close.

gloo waits for a message until its timeout, half an hour by default, and a process cannot end before. If the connection
is shut down, the wait ends at once, here and at the other end.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple


class Connection(NamedTuple):
    """One end of a TCP connection of this process."""

    descriptor: int
    inode: int  # Shows whether the descriptor is still this connection.
    ends: tuple[str, str]  # Address and port of this end and of the other end.


def connections() -> set[Connection]:
    """Every TCP connection that this process has now; none if the system has no /proc."""
    ends = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    ends.add(_describe(int(name)))
    return ends


def _describe(descriptor: int) -> Connection:
    with socket.socket(fileno=os.dup(descriptor)) as end:
        if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
            raise OSError("not TCP")
        ends = (_address(end.getsockname()), _address(end.getpeername()))
        return Connection(descriptor, os.fstat(descriptor).st_ino, ends)


def _address(name: tuple[str, int]) -> str:
    return f"{name[0]} {name[1]}"


def shut_down(ends: Iterable[Connection]) -> None:
    """Shut these connections down, which ends transfers in flight; their owners keep the descriptors."""
    for end in ends:
        with suppress(OSError):
            if os.fstat(end.descriptor).st_ino == end.inode:
                with socket.socket(fileno=os.dup(end.descriptor)) as opened:
                    opened.shutdown(socket.SHUT_RDWR)
