"""What the nodes of a job learn of each other, in one process: their stores are real."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from offload.errors import ConfigError
from zero.launch import failures
from zero.launch.failures import Failure, Peers
from zero.launch.job import Job, Node, parse_hostfile
from zero.launch.node import find_node_rank

NODES = (Node("worker-1", (0,)), Node("me@worker-2", (0,)))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def job(port: int, script: str = "train.py", **more: Any) -> Job:
    return Job(NODES, (script,), "127.0.0.1", port, **more)


def begun(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def test_node_0_stays_until_the_slowest_has_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "SETTLE_SECONDS", 0.2)
    first, second = Peers(job(port), 0), Peers(job(port), 1)
    thread, results = begun(lambda: first.gather_failures([], 0))
    thread.join(1.5)
    assert thread.is_alive(), "its store would be gone, and the other node's ranks with it"
    assert second.gather_failures([], 0) == []
    thread.join(10)
    assert results == [[]]


def test_a_node_that_is_told_to_end_ends_the_others(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "SETTLE_SECONDS", 0.5)
    first, second = Peers(job(port), 0), Peers(job(port), 1)
    ended = threading.Event()
    first.watch(ended.set)
    thread, results = begun(lambda: second.gather_failures([], 143))
    assert ended.wait(10) and first.has_failed_peer
    first.gather_failures([], 143)
    thread.join(10)
    assert results == [[]]


def test_every_node_learns_every_failure(port: int) -> None:
    first, second = Peers(job(port), 0), Peers(job(port), 1)
    failure, later = Failure(1, "worker-2", 7, 1.0, "bad"), Failure(2, "worker-2", -15, 2.0)
    thread, results = begun(lambda: first.gather_failures([], 0))
    assert second.gather_failures([failure, later], 7) == [failure, later]
    thread.join(10)
    assert results == [[failure, later]]


@pytest.mark.parametrize("other", [{"script": "other.py"}, {"id": "another start"}])
def test_a_node_never_joins_another_job_at_the_same_port(
    port: int, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    monkeypatch.setattr(failures, "HERE_SECONDS", 0.3)
    first = Peers(job(port), 0)
    with pytest.raises(ConfigError, match=f"--master_port {port}: another job answers"):
        Peers(job(port, **other), 1)
    assert not first.has_failed_peer
    second = Peers(job(port), 1)
    thread, results = begun(lambda: first.gather_failures([], 0))
    assert second.gather_failures([], 0) == []
    thread.join(10)
    assert results == [[]]


def test_a_hostfile_of_open_mpi_is_read() -> None:
    assert parse_hostfile("a slots=4 max_slots=8\nb slots=2 max-slots=2\n", "hosts") == {"a": 4, "b": 2}


def test_a_node_finds_itself_without_the_users_name() -> None:
    """As pdsh gives it."""
    for host, index in (("worker-1", 0), ("worker-2", 1), ("me@worker-2", 1)):
        assert find_node_rank(job(1), host) == index
    with pytest.raises(ConfigError, match="expected a host of"):
        find_node_rank(job(1), "worker-3")
