"""What this machine can give: memory, and how much of it may be locked."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from offload.accelerator import free_memory_bytes, is_accelerator


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits read once, before anything is allocated."""

    available_bytes: int
    """Host memory that can be had without swapping: the smaller of MemAvailable and the cgroup's rest."""
    available_source: str
    """Which of the two it is."""
    memlock_bytes: int | None
    """RLIMIT_MEMLOCK; None: unlimited."""
    device_bytes: int | None
    """Memory of the compute device that this process can have; on a CPU-only machine the host's. None: nobody knows."""
    rss_bytes: int
    """Resident memory of this process now: the baseline the plan comes on top of."""


def aliases() -> bool:
    """True: weights are used where they lie, if the compute device can address them there (`ZERO_NO_ALIAS`)."""
    return os.environ.get("ZERO_NO_ALIAS", "0") in ("", "0")


def read_machine(device: torch.device) -> Machine:
    """Measure the machine this process runs on."""
    available, source = available_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    device_bytes = free_memory_bytes(device) if is_accelerator(device) else available
    return Machine(
        available,
        source,
        None if soft == resource.RLIM_INFINITY else soft,
        device_bytes,
        psutil.Process().memory_info().rss,
    )


def available_memory() -> tuple[int, str]:
    """Host memory that can be had without swapping now [bytes], and what says so."""
    available, rest = psutil.virtual_memory().available, _cgroup_rest_bytes()
    if rest is not None and rest < available:
        return rest, "the memory cgroup's limit"
    return available, "MemAvailable"


def peak_rss_bytes() -> int:
    """High-water mark of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cgroup_rest_bytes() -> int | None:
    """Limit minus anonymous use of this process's memory cgroup (v2 or v1); None without a limit."""
    for folder, limit_name, stat_name, key in (
        (_cgroup_folder("", Path("/sys/fs/cgroup")), "memory.max", "memory.stat", "anon"),
        (_cgroup_folder("memory", Path("/sys/fs/cgroup/memory")), "memory.limit_in_bytes", "memory.stat", "total_rss"),
    ):
        if folder is None:
            continue
        try:
            text = (folder / limit_name).read_text().strip()
            if text == "max" or int(text) >= 1 << 60:
                continue
            stat = dict(line.split() for line in (folder / stat_name).read_text().splitlines())
            return max(int(text) - int(stat.get(key, 0)), 0)
        except (OSError, ValueError):
            continue
    return None


def _cgroup_folder(controller: str, mount: Path) -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == controller or controller in controllers.split(","):
            folder = mount / path.lstrip("/")
            return folder if folder.is_dir() else mount
    return None
