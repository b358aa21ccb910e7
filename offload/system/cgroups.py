"""Memory control groups of a process: their folders, in version 1 or 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


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
