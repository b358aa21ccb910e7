"""Which GPUs and cores the ranks of a node get."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.system.process import core_of
from zero.launch import rank
from zero.launch.affinity import cores_by_rank, usable_cpus, visible_devices


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
    core_names = [cpu % cores for cpu in cpus]  # as many machines number them: siblings far apart
    if cores < ranks:
        with pytest.raises(ConfigError, match=f"one core for each of {ranks} ranks, got {cores}"):
            cores_by_rank(cpus, core_names, ranks)
        return
    shares, counts = cores_by_rank(cpus, core_names, ranks)
    assert sorted(cpu for share in shares for cpu in share) == cpus
    assert max(counts) - min(counts) <= 1 and sum(counts) == cores
    held = [{cpu % cores for cpu in share} for share in shares]
    assert all(not a & b for i, a in enumerate(held) for b in held[:i])
    assert [len(share) for share in shares] == [count * threads for count in counts]


def test_only_cores_that_may_be_used_are_shared_out() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert usable_cpus(()) == allowed and usable_cpus(allowed[:1]) == allowed[:1]
    assert len({core_of(cpu) for cpu in allowed}) >= 1
    with pytest.raises(ConfigError, match=r"--bind_core_list: expected cores that this process may use \(.*got 99999"):
        usable_cpus([99999])


@pytest.mark.parametrize("said", [False, True])
def test_a_bound_rank_has_as_many_threads_as_cores_unless_the_user_has_said_so(
    said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets one thread for several ranks before they are prepared."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(rank, "_tie_to_launcher", lambda launcher: None)
    options = {"launcher": 1, "cores": [[0, 1], [2, 3, 4]], "threads": [2, 3], "threads_said": said}
    numbers = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    environment = {**numbers, "OMP_NUM_THREADS": "1"}
    rank.prepare(options, environment)
    assert environment["OMP_NUM_THREADS"] == ("1" if said else "3")
