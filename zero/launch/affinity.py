"""Which cores and GPUs each rank of a node gets: numbers in, numbers out."""

from __future__ import annotations

import os
from collections.abc import Sequence

from offload.accelerator import visible_variable
from offload.errors import ConfigError


def visible_devices(slots: Sequence[int], visible: str | None, device_count: int) -> str | None:
    """The value of `visible_variable` for the ranks of a node; None: there is no GPU, so leave the variable alone.

    Raises ConfigError: a slot is not visible.

    Args:
        slots: of the node; indices into the visible GPUs, from 0.
        visible: the present value of the variable; None if it is not set.
        device_count: number of GPUs that torch sees.
    """
    if device_count == 0:
        return None
    listed = [word.strip() for word in visible.split(",")] if visible else [str(i) for i in range(device_count)]
    count = min(len(listed), device_count)
    beyond = [slot for slot in slots if slot >= count]
    if beyond:
        note = f" with {visible_variable()}={visible}" if visible else ""
        raise ConfigError(
            f"GPU slots: expected 0 to {count - 1} ({count} visible{note}), got {beyond[0]}; slots are numbers of "
            "visible GPUs: lower slots= or --num_gpus, or make more GPUs visible"
        )
    return ",".join(listed[slot] for slot in slots)


def cores_by_rank(cpus: Sequence[int], core_of: Sequence[object], ranks: int) -> tuple[list[list[int]], list[int]]:
    """CPU numbers and number of cores for each rank: equal shares of whole, neighbouring cores.

    Raises ConfigError: fewer cores than ranks.

    Args:
        cpus: numbers of the CPUs to divide.
        core_of: for each CPU, the core of which it is a hardware thread.
        ranks: number of ranks on this node.
    """
    threads: dict[object, list[int]] = {}
    for cpu, core in sorted(zip(cpus, core_of, strict=True), key=lambda pair: pair[0]):
        threads.setdefault(core, []).append(cpu)
    cores = list(threads.values())
    if len(cores) < ranks:
        raise ConfigError(
            f"--bind_cores_to_rank: expected at least one core for each of {ranks} ranks, got {len(cores)}; use fewer "
            "ranks per node, or leave the flag out"
        )
    bounds = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    shares = [cores[bounds[rank] : bounds[rank + 1]] for rank in range(ranks)]
    return [sorted(cpu for core in share for cpu in core) for share in shares], [len(share) for share in shares]


def usable_cpus(wanted: Sequence[int]) -> list[int]:
    """CPU numbers that this process may use. Raises ConfigError: one of them cannot be used.

    `wanted`: the user's choice; empty: all.
    """
    allowed = sorted(os.sched_getaffinity(0))
    missing = [cpu for cpu in wanted if cpu not in allowed]
    if missing:
        raise ConfigError(
            f"--bind_core_list: expected cores that this process may use ({_ranges(allowed)}), got {missing[0]}"
        )
    return list(wanted) or allowed


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
