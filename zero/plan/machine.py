"""Limits of this machine: available memory, and how much of it may be locked."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from offload.accelerator import device_identity, free_memory_bytes, is_accelerator
from offload.memory.pool import LinearPool, unfaulted_pool_bytes
from offload.system.linux import limit_bytes, memory_groups, table_in

# Memory that cannot be reclaimed, in the statistics of a control group, by version.
UNRECLAIMABLE_V2, UNRECLAIMABLE_V1 = ("anon", "shmem"), ("total_rss", "total_shmem")


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits read once, before anything is allocated."""

    available_bytes: int
    """Host memory available without swapping: the smaller of MemAvailable and what the cgroup leaves."""
    available_source: str
    """The name of the smaller one."""
    memlock_bytes: int | None
    """RLIMIT_MEMLOCK; None: unlimited."""
    device_bytes: int | None
    """Memory of the compute device available to this process; on a CPU-only machine the host's. None: unknown."""
    rss_bytes: int
    """Resident memory of this process now: the baseline to which the plan is added."""
    device_name: str = ""
    """Identity of the device in its node, the same for all processes that use it; "" without an accelerator."""


def uses_weights_in_place() -> bool:
    """True if weights are used in place where the compute device can address them (unless `ZERO_NO_ALIAS` is set)."""
    return os.environ.get("ZERO_NO_ALIAS", "0") in ("", "0")


def machine_to_plan(device: torch.device, closing: Collection[LinearPool] = ()) -> Machine:
    """The limits now, less what other engines of this process have planned and not touched yet.

    `closing`: memory that is about to be closed, and will not be touched.
    """
    machine = read_machine(device)
    available = max(machine.available_bytes - unfaulted_pool_bytes(closing), 0)
    on_device = machine.device_bytes if is_accelerator(device) else available
    return replace(machine, available_bytes=available, device_bytes=on_device)


def read_machine(device: torch.device) -> Machine:
    available, source = available_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    device_bytes = free_memory_bytes(device) if is_accelerator(device) else available
    return Machine(
        available,
        source,
        None if soft == resource.RLIM_INFINITY else soft,
        device_bytes,
        psutil.Process().memory_info().rss,
        device_identity(device) if is_accelerator(device) else "",
    )


def available_memory() -> tuple[int, str]:
    """Host memory available without swapping now [bytes], and the source of this number."""
    available, cgroup_bytes = psutil.virtual_memory().available, cgroup_free_bytes()
    if cgroup_bytes is not None and cgroup_bytes < available:
        return cgroup_bytes, "the memory cgroup's limit"
    return available, "MemAvailable"


def peak_rss_bytes() -> int:
    """High-water mark of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cgroup_free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least free memory of the memory cgroups of this process and their parents (v2 or v1); None: no limit."""
    groups = memory_groups(proc, cgroups)
    free_bytes = [_free_bytes(folder, is_v2) for folder, _, is_v2 in groups]
    return min((nbytes for nbytes in free_bytes if nbytes is not None), default=None)


def _free_bytes(folder: Path, is_v2: bool) -> int | None:
    """Limit minus anonymous and shared memory of one cgroup: pages of files can be reclaimed."""
    limit, statistics = limit_bytes(folder, is_v2=is_v2), table_in(folder / "memory.stat")
    if limit is None or not statistics:
        return None
    return max(limit - sum(statistics.get(key, 0) for key in (UNRECLAIMABLE_V2 if is_v2 else UNRECLAIMABLE_V1)), 0)
