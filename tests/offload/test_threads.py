"""The number of threads for an update: the fewest that are good, within what the process may use."""

from __future__ import annotations

import os

import pytest

from offload.kernels import threads


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.95}, 1),
        ({1: 1.0, 2: 0.6}, 2),
        ({1: 1.0, 2: 0.52, 4: 0.5}, 2),
        ({1: 1.0, 2: 0.9, 4: 0.4, 8: 0.41}, 4),
        ({1: 1.0, 2: 2.0}, 1),
    ],
)
def test_the_fewest_threads_win_that_nothing_beats_by_a_tenth(seconds: dict[int, float], expected: int) -> None:
    assert threads.fewest_sufficient(seconds) == expected


@pytest.mark.parametrize(("limit", "tried"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_powers_of_two_and_the_limit_are_tried(limit: int, tried: list[int]) -> None:
    calls: list[int] = []
    assert sorted(threads.measure(calls.append, limit)) == tried
    assert set(calls) == set(tried)


def test_a_measurement_ends_after_the_round_in_which_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(threads.time, "perf_counter", lambda: float(next(clock)))
    calls: list[int] = []
    threads.measure(calls.append, 4)
    assert calls == [1, 2, 4]


def test_what_is_small_is_not_measured_and_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr(threads, "_measure_threads", lambda limit: measured.append(limit) or 1)
    monkeypatch.setattr(threads, "physical_cores", lambda: 4)
    assert threads.update_threads(4096, 8) == 4
    assert threads.update_threads(1 << 40, 1) == 1 and threads.update_threads(0, 0) == 1
    assert measured == []
    assert threads.update_threads(1 << 40, 8) == 1
    assert measured == [4]


def test_the_real_measurement_chooses_what_the_process_has() -> None:
    assert 1 <= threads.physical_cores() <= len(os.sched_getaffinity(0))
    threads._measure_threads.cache_clear()
    assert 1 <= threads.update_threads(threads.WORTH_MEASURING_NUMEL, 64) <= threads.physical_cores()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 3),
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"}, 5),
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "64"}, 1),
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "4"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 3),
    ],
    ids=["alone", "torchrun's own word", "more ranks than cores", "the user's word", "no torchrun"],
)
def test_kernels_beside_a_device_have_the_ranks_share_of_cores_where_only_torchrun_has_spoken(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: int
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(threads, "physical_cores", lambda: 20)
    assert threads.kernel_threads(on_cpu=False) == expected
    assert threads.kernel_threads(on_cpu=True) == 3
