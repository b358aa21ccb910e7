"""Names of shared memory that a test leaves behind, on a machine where other processes make some too."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")


def shared_names() -> set[str]:
    """All present names, including those of other processes."""
    return {entry.name for entry in os.scandir(FOLDER) if entry.is_file()} if FOLDER.is_dir() else set()


def left_behind(before: set[str]) -> set[str]:
    """New names that no process uses, or only this process and its children."""
    new: dict[str, int] = {}
    for name in shared_names() - before:
        with contextlib.suppress(FileNotFoundError):
            new[name] = (FOLDER / name).stat().st_ino
    if not new:
        return set()
    used = _used_by_others()  # by inode number, since a semaphore is mapped under an earlier name
    return {name for name, number in new.items() if number not in used} & shared_names()


def _used_by_others() -> set[int]:
    """Inode numbers of the files that other processes use."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found: set[int] = set()
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{FOLDER}/"):
                    found.add(int(fields[4]))
            for file in process.open_files():
                if file.path.startswith(f"{FOLDER}/"):
                    found.add(Path(file.path).stat().st_ino)
    return found
