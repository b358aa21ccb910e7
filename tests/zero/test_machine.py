"""What is free, as control groups and the kernel say it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zero.plan.machine import Machine, cgroup_free_bytes
from zero.store.broadcasts import agree_on_machine

GB = 1 << 30


def tree(root: Path, groups: dict[str, tuple[str, int, int]], *, v2: bool) -> Path:
    """Folders of groups: path -> (limit, anonymous bytes, shared bytes); the process is in the last one."""
    base, limit_name = (root, "memory.max") if v2 else (root / "memory", "memory.limit_in_bytes")
    keys = ("anon", "shmem") if v2 else ("total_rss", "total_shmem")
    for path, (limit, *used) in groups.items():
        folder = base / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_name).write_text(limit)
        lines = [f"{key} {nbytes}" for key, nbytes in zip(keys, used, strict=True)]
        (folder / "memory.stat").write_text("\n".join([*lines, "file 99999999999"]))
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"{'0:' if v2 else '4:memory'}:/{list(groups)[-1]}\n")
    return proc


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize(
    ("groups", "rest"),
    [
        ({"a": (str(4 * GB), GB, 0), "a/b": ("max", GB, 0)}, 3 * GB),  # the limit is around the process's own group
        ({"a": (str(4 * GB), GB, 0), "a/b": (str(2 * GB), GB, 0)}, GB),
        ({"a": (str(4 * GB), GB, 2 * GB)}, GB),  # pages that ranks share are no cache
        ({"a": ("max", GB, 0), "a/b": ("max", GB, 0)}, None),
        ({"a": (str(GB), 2 * GB, 0)}, 0),
    ],
)
def test_the_tightest_limit_around_the_process_counts_without_cache(
    tmp_path: Path, groups: dict[str, tuple[str, int, int]], rest: int | None, v2: bool
) -> None:
    none = {True: "max", False: str(1 << 63)}[v2]
    groups = {path: (none if limit == "max" else limit, *used) for path, (limit, *used) in groups.items()}  # type: ignore[misc]
    proc = tree(tmp_path, groups, v2=v2)
    assert cgroup_free_bytes(proc, tmp_path) == rest


@pytest.mark.parametrize(
    ("devices", "share"), [(("a", "a", "b", "b"), 2), (("a", "b", "c", "d"), 1), (("", "", "", ""), 1)]
)
def test_ranks_that_use_one_device_share_what_is_free_on_it(devices: tuple[str, ...], share: int) -> None:
    machine = Machine(8 * GB, "MemAvailable", None, 4 * GB, 0)
    told = [{**asdict(replace(machine, device_name=name)), "node": "one"} for name in devices]
    exchange: Any = SimpleNamespace(
        placement=SimpleNamespace(is_single_rank=False),
        all_gather_bytes=lambda what, mine: [json.dumps(each).encode() for each in told],
    )
    found = agree_on_machine(exchange, machine, on_cpu=False)
    assert (found.device_bytes, found.available_bytes) == (4 * GB // share, 2 * GB)
