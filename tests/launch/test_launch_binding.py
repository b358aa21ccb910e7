"""Which GPUs and cores the ranks of a node get."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.system.process import core_of
from zero.launch import rank
from zero.launch.job import Job, Node
from zero.launch.node import cores_by_rank, rank_variables, visible_devices


@pytest.mark.parametrize(
    ("slots", "visible", "device_count", "expected"),
    [
        ((0, 1), None, 4, "0,1"),
        ((1, 0), "2,3", 2, "3,2"),
        ((0,), "GPU-8932f937,GPU-1", 2, "GPU-8932f937"),
        ((0, 1, 2), None, 0, None),
        ((5,), "", 0, None),
    ],
)
def test_slots_count_what_is_visible(
    slots: tuple[int, ...], visible: str | None, device_count: int, expected: str | None
) -> None:
    assert visible_devices(slots, visible, device_count) == expected


@pytest.mark.parametrize(("visible", "device_count"), [("2,3", 2), (None, 2), ("2,3,9", 2)])
def test_a_slot_beyond_what_is_visible_is_refused(visible: str | None, device_count: int) -> None:
    with pytest.raises(ConfigError, match=r"GPU slots: expected 0 to 1 \(2 visible.*got 2"):
        visible_devices((0, 2), visible, device_count)


@given(st.integers(1, 12), st.integers(1, 2), st.integers(1, 6))
def test_ranks_share_whole_cores_evenly(cores: int, threads: int, ranks: int) -> None:
    cpus = list(range(cores * threads))
    core_names = {cpu: cpu % cores for cpu in cpus}  # as many machines number them: siblings far apart
    if cores < ranks:
        with pytest.raises(ConfigError, match=f"one core for each of {ranks} ranks, got {cores}"):
            cores_by_rank(core_names, ranks)
        return
    shares = cores_by_rank(core_names, ranks)
    assert sorted(cpu for share in shares for cpu in share) == cpus
    used = [{cpu % cores for cpu in share} for share in shares]
    counts = [len(share) for share in used]
    assert max(counts) - min(counts) <= 1 and sum(counts) == cores  # so no core is in two shares
    assert [len(share) for share in shares] == [count * threads for count in counts]


def test_only_cores_that_may_be_used_are_shared_out() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    job = Job((Node("localhost", (0,)),), ("x.py",), cores=())
    for cores, expected in (((), allowed), (tuple(allowed[:1]), allowed[:1])):
        options = json.loads(rank_variables(replace(job, cores=cores), (0,))[rank.OPTIONS])
        assert options["cores"] == [expected]
        assert options["threads"] == [len({core_of(cpu) for cpu in expected})]
    with pytest.raises(ConfigError, match=r"--bind_core_list: expected cores that this process may use \(.*got 99999"):
        rank_variables(replace(job, cores=(99999,)), (0,))


@pytest.mark.parametrize("said", [False, True])
def test_a_bound_rank_has_as_many_threads_as_cores_unless_the_user_has_said_so(
    said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    (tmp_path / "process.py").write_text("def die_with_parent(parent):\n    assert parent == 1\n")
    monkeypatch.setattr(rank, "PROCESS_FILE", tmp_path / "process.py")
    options = {"launcher": 1, "cores": [[0, 1], [2, 3, 4]], "threads": [2, 3]}
    numbers = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    environment = {**numbers, **({"OMP_NUM_THREADS": "1"} if said else {})}
    rank.prepare(options, environment)
    assert environment["OMP_NUM_THREADS"] == ("1" if said else "3")
