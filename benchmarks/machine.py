"""What a measurement ran on: the machine, the disk behind a folder, the versions, and the kernel's own counters."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

SECTOR_BYTES = 512
"""Unit of the kernel's disk counters, whatever the device's own sector is."""
RIVALS = ("deepspeed", "torch")
"""Packages whose versions a result names."""


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """What the kernel says a block device has moved since the machine started."""

    read_bytes: int
    write_bytes: int
    reads: int
    """Requests as the device saw them, after merging."""
    writes: int

    def since(self, earlier: DiskCounters) -> DiskCounters:
        """What was moved between two readings."""
        return DiskCounters(
            self.read_bytes - earlier.read_bytes,
            self.write_bytes - earlier.write_bytes,
            self.reads - earlier.reads,
            self.writes - earlier.writes,
        )


def parse_disk_counters(text: str) -> DiskCounters:
    """The content of a block device's `stat` file."""
    fields = [int(field) for field in text.split()]
    return DiskCounters(fields[2] * SECTOR_BYTES, fields[6] * SECTOR_BYTES, fields[0], fields[4])


def stat_file(folder: Path | str) -> Path | None:
    """The counters of the device that holds `folder`; None for file systems without a device of their own."""
    device = os.stat(folder).st_dev
    path = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return path if path.exists() else None


def read_disk(folder: Path | str | None) -> DiskCounters | None:
    """The counters now; None where the kernel keeps none."""
    path = None if folder is None else stat_file(folder)
    return None if path is None else parse_disk_counters(path.read_text())


def describe(folders: Iterable[Path | str] = ()) -> dict[str, Any]:
    """The machine as plain values for the JSON; `folders` are those on the disks in question."""
    memory = psutil.virtual_memory()
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "transparent_huge_pages": selected_word(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "disks": [describe_disk(folder) for folder in folders],
        "versions": {name: version(name) for name in RIVALS},
        "commit": commit(),
    }


def describe_disk(folder: Path | str) -> dict[str, Any]:
    """Device, file system and queue of the disk that holds `folder`."""
    path = Path(folder).resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    stat = stat_file(path)
    device = None if stat is None else stat.resolve().parent
    # A partition has no queue of its own; its disk does.
    queues = [] if device is None else [q for q in (device / "queue", device.parent / "queue") if q.exists()]
    return {
        "device": None if device is None else device.name,
        "file_system": None if mount is None else mount.fstype,
        "scheduler": selected_word(queues[0] / "scheduler") if queues else None,
        "rotational": (queues[0] / "rotational").read_text().strip() == "1" if queues else None,
    }


def selected_word(path: Path) -> str | None:
    """The bracketed word of a sysfs choice such as "always [madvise] never"; None without the file."""
    try:
        words = path.read_text().split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), " ".join(words))


def version(package: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str:
    """The checkout's commit, with a plus when tracked files differ from it; or "unknown"."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        edits = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if edits.stdout.strip() else "")
