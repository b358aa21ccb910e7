"""Memory control groups of a process: their folders and limits, in version 1 or 2; the files of the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
