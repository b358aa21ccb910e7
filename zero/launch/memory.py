"""The kernel's counts of memory and kills: the cgroups of this process and the machine, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.sizes import format_bytes
from offload.system.cgroups import limit_bytes, memory_groups, number_in, table_in

NEAR_LIMIT = 0.98


@dataclass(frozen=True, slots=True)
class MemoryState:
    """One place that limits memory: a cgroup, or the machine."""

    name: str
    limit_bytes: int | None  # None: no limit here.
    peak_bytes: int | None  # Highest use so far; None: not known.
    kills: int  # Number of processes killed for memory since it exists.
    hits: int  # Number of times that the limit was hit.


def read_states(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[MemoryState]:
    """The memory cgroups of this process, innermost first, then the machine. Unreadable cgroups are left out."""
    groups = memory_groups(proc, cgroups)
    states = [_state(*group) for group in groups]
    return [*(state for state in states if state is not None), _machine(proc)]


def _state(folder: Path, mount: Path, is_v2: bool) -> MemoryState | None:
    counts = table_in(folder / ("memory.events" if is_v2 else "memory.oom_control"))
    if not counts and (is_v2 or number_in(folder / "memory.limit_in_bytes") is None):
        return None
    peaks = ("memory.peak", "memory.current") if is_v2 else ("memory.max_usage_in_bytes",)
    known = (number_in(folder / peak) for peak in peaks)
    return MemoryState(
        f"cgroup /{folder.relative_to(mount)}".replace("/.", "/"),
        limit_bytes(folder, is_v2=is_v2),
        next((peak for peak in known if peak is not None), None),
        counts.get("oom_kill", 0),
        counts.get("max", 0) if is_v2 else number_in(folder / "memory.failcnt") or 0,
    )


def _machine(proc: Path) -> MemoryState:
    total = table_in(proc / "meminfo").get("MemTotal:")
    kills = table_in(proc / "vmstat").get("oom_kill", 0)
    return MemoryState("the machine", None if total is None else total * 1024, None, kills, 0)


def planned_bytes(plans: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Host memory planned by the ranks of a node, plus the memory that they held before; None if no plan is known."""
    try:
        return sum(int(plan["host_bytes"]) + int(plan["baseline_bytes"]) for plan in plans.values()) if plans else None
    except (KeyError, TypeError, ValueError):
        return None


def explain_kill(
    before: Sequence[MemoryState], after: Sequence[MemoryState], plans: Mapping[int, Mapping[str, Any]]
) -> str:
    """Why a rank on this node got SIGKILL, as far as the kernel knows.

    Args:
        before: states when the ranks were started.
        after: states now.
        plans: rank of this node -> plan of its engine.
    """
    first = {state.name: state for state in before}
    # The machine counts the kills of all processes, so its count is used only if no cgroup has one.
    places = [state for state in after if state.name in first and state is not after[-1]] or after[-1:]
    kills = sum(state.kills - first[state.name].kills for state in places if state.name in first)
    planned = planned_bytes(plans)
    words = "no plan is known (no engine was made)" if planned is None else f"planned {format_bytes(planned)}"
    if kills <= 0:
        return (
            "the kernel counted no out-of-memory kill here during the run, so something else sent the signal, such "
            f"as a scheduler or an administrator ({words})"
        )
    place = _tightest(first, after)
    limit = "unknown" if place.limit_bytes is None else format_bytes(place.limit_bytes)
    peak = "" if place.peak_bytes is None else f", peak {format_bytes(place.peak_bytes)}"
    ranks = f" by {len(plans)} rank{'s' * (len(plans) != 1)} here" if plans else ""
    return (
        f"kernel OOM: {words}{ranks}, limit {limit} of {place.name}{peak}. A plan does not include activations and "
        "the data loader: lower memory_budget.host or the micro-batch, offload to nvme, use fewer ranks per node, or "
        "raise the limit"
    )


def _tightest(first: Mapping[str, MemoryState], after: Sequence[MemoryState]) -> MemoryState:
    """The place whose limit was reached; the machine if no cgroup's limit was."""

    def was_hit(state: MemoryState) -> bool:
        before = first.get(state.name)
        near = state.limit_bytes is not None and (state.peak_bytes or 0) >= NEAR_LIMIT * state.limit_bytes
        return near and (before is None or state.hits > before.hits)

    return min((state for state in after if was_hit(state)), default=after[-1], key=lambda s: s.limit_bytes or 0)
