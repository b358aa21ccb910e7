"""A memory limit that the kernel enforces, for a process and what it starts: version 1 or 2 of control groups."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

ROOT = Path("/sys/fs/cgroup")


class MemoryCgroup:
    """A group of its own while the context is open; entering needs the right to create one (root, mostly).

    Raises:
        OSError: the kernel refused.
    """

    def __init__(self, limit_bytes: int, name: str = "zero-infinity-benchmark") -> None:
        self.limit_bytes = limit_bytes
        self._old = (ROOT / "memory" / "memory.limit_in_bytes").exists()
        self._folder = (ROOT / "memory" if self._old else ROOT) / f"{name}-{os.getpid()}"

    def __enter__(self) -> MemoryCgroup:
        """Create it."""
        self._folder.mkdir()
        limit = "memory.limit_in_bytes" if self._old else "memory.max"
        (self._folder / limit).write_text(str(self.limit_bytes))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove it; nothing may run in it any more."""
        self._folder.rmdir()

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a command is started with so that it runs inside."""
        return ("sh", "-c", f'echo $$ > "{self._folder}/cgroup.procs" && exec "$@"', "sh")

    @property
    def peak_bytes(self) -> int | None:
        """Most the group has used, page cache included; None where the kernel does not tell."""
        try:
            return int((self._folder / ("memory.max_usage_in_bytes" if self._old else "memory.peak")).read_text())
        except OSError:
            return None

    @property
    def kills(self) -> int:
        """Processes that the kernel killed because the group had no memory left."""
        lines = (self._folder / ("memory.oom_control" if self._old else "memory.events")).read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))
