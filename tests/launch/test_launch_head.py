"""Where `zero run` was given, for several nodes: statuses, signals, nodes that do not end. Shells stand for nodes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from offload.errors import ConfigError
from zero.launch import launcher
from zero.launch.launcher import Command, run_commands, shutdown_seconds


def node(line: str, host: str = "node", *, feeds: bool = False, **environment: str) -> Command:
    return Command(("sh", "-c", line), environment, host, feeds)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(launcher, "END_SECONDS", 0.5)


@pytest.fixture(autouse=True)
def no_child_stays() -> Iterator[None]:
    before = set(psutil.Process().children())  # other modules' ranks are forked from a process that stays
    yield
    assert set(psutil.Process().children()) <= before


def when_there(path: Path, signals: int) -> threading.Thread:
    """Sends this process SIGTERM so many times once the file exists."""

    def send() -> None:
        for _ in range(500):
            if path.exists():
                break
            time.sleep(0.02)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_all_nodes_run_with_their_environment(tmp_path: Path) -> None:
    nodes = [node(f"echo $WHO > {tmp_path}/{name}", WHO=name) for name in ("a", "b")]
    assert run_commands(nodes) == 0
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["a\n", "b\n"]


def test_a_failed_node_ends_the_others(tmp_path: Path) -> None:
    """The ones that listen by closing their standard input, the others by SIGTERM."""
    listening = node(f"cat; echo closed > {tmp_path}/listening", feeds=True)
    other = node(f"trap 'echo told > {tmp_path}/other; exit 9' TERM; while :; do sleep 0.05; done")
    assert run_commands([node("exit 3"), listening, other]) == 3
    assert (tmp_path / "listening").read_text() == "closed\n" and (tmp_path / "other").read_text() == "told\n"


def test_nodes_that_end_by_themselves_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 60.0)
    assert run_commands([node("exit 3"), node(f"sleep 0.4; echo done > {tmp_path}/b; exit 4")]) == 3
    assert (tmp_path / "b").read_text() == "done\n"


def test_a_node_that_does_not_end_is_killed() -> None:
    assert run_commands([node("exit 5"), node("trap '' TERM; while :; do sleep 0.05; done")]) == 5


def test_a_signal_is_passed_on(tmp_path: Path) -> None:
    thread = when_there(tmp_path / "up", signals=1)
    listening = node(f"touch {tmp_path}/up; cat; echo closed > {tmp_path}/said; exit 7", feeds=True)
    assert run_commands([listening]) == 128 + signal.SIGTERM
    thread.join()
    assert (tmp_path / "said").read_text() == "closed\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_signal_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "END_SECONDS", 600.0)
    thread = when_there(tmp_path / "up", signals=2)
    assert run_commands([node(f"trap '' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done")]) == 143
    thread.join()


def test_a_node_that_is_gone_without_a_word_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_commands([node("kill -9 $$", "worker-7")]) == 137
    assert "zero run: the command on worker-7 ended without any output: signal 9" in capfd.readouterr().err


def test_a_launcher_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="--launcher: no-such-launcher cannot be started here"):
        run_commands([node("cat", feeds=True), Command(("no-such-launcher", "x"), {}, "b")])


@pytest.mark.parametrize(("asked", "seconds"), [({}, 45), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, 315)])
def test_nodes_have_the_time_to_end_that_torchrun_is_told_to_give(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], seconds: float
) -> None:
    monkeypatch.setattr(launcher, "END_SECONDS", 45.0)
    assert shutdown_seconds(asked) == seconds
