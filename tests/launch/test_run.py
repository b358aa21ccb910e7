"""`zero run` on one node: what ranks get, how failures are told, and that nothing of a job stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import MARK, local_job, marked, nothing_left, reports, run_into, write_script
from ranks import RankPool

from offload.errors import ConfigError
from zero.launch import node
from zero.launch.job import Job, Node
from zero.launch.node import run_node
from zero.tools.cli import main

FACTS = """
    NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE",
             "MASTER_ADDR", "OMP_NUM_THREADS")
    report(argv=sys.argv, path=sys.path[0], main=sys.modules["__main__"].__file__, name=__name__,
           env={name: os.environ.get(name) for name in NAMES}, cores=sorted(os.sched_getaffinity(0)),
           port=int(os.environ["MASTER_PORT"]), loaded="torch" in sys.modules or "zero" in sys.modules)
"""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Iterator[None]:
    with nothing_left(tmp_path):
        yield


def test_each_rank_gets_its_numbers_and_an_untouched_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = write_script(tmp_path, FACTS)
    before = dict(os.environ), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert run_node(local_job((script, "--lr", "a b"), 2), 0) == 0
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    for rank, told in enumerate(reports(tmp_path)):
        assert told["argv"] == [script, f"--local_rank={rank}", "--lr", "a b"]
        assert (told["path"], told["main"], told["name"]) == (str(tmp_path), script, "__main__")
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        numbers |= {"CROSS_RANK": 0, "CROSS_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        assert {name: told["env"][name] for name in numbers} == {name: str(value) for name, value in numbers.items()}
        assert int(told["env"]["OMP_NUM_THREADS"]) >= 1 and told["port"] > 0
        assert not told["loaded"]  # what the script sets before it imports torch still counts


def test_modules_and_programs_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path, FACTS, "job.py")
    assert run_node(local_job(("job", "x"), 1, kind="module"), 0) == 0
    told = reports(tmp_path)[0]
    assert (told["argv"], told["path"]) == ([str(tmp_path / "job.py"), "--local_rank=0", "x"], str(tmp_path))
    words = ("sh", "-c", f"echo $RANK $0 $1 > {tmp_path}/said", "zero", "one")
    assert run_node(local_job(words, 1, kind="program", local_rank=False), 0) == 0
    assert (tmp_path / "said").read_text() == "0 zero one\n"


def test_the_scripts_own_classes_reach_processes_that_it_spawns(tmp_path: Path) -> None:
    """Data loaders do that."""
    body = """
        import multiprocessing
        class Item:
            value = 41
        def plus(item):
            return item.value + 1
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                report(got=pool.map(plus, [Item()]))
    """
    assert run_node(local_job((write_script(tmp_path, body),), 1), 0) == 0
    assert reports(tmp_path) == [{"got": [42]}]


def test_ranks_keep_to_cores_of_their_own(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    script = write_script(tmp_path, FACTS)
    if len(allowed) == 1:
        with pytest.raises(ConfigError, match="one core for each of 2 ranks"):
            run_node(local_job((script,), 2, cores=()), 0)
        return
    cores = tuple(allowed[:2])
    assert run_node(local_job((script,), 2, cores=cores), 0) == 0
    told = [set(rank["cores"]) for rank in reports(tmp_path)]
    assert told[0] | told[1] == set(cores) and not told[0] & told[1]
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_the_first_failing_ranks_traceback_comes_last(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
        if os.environ["RANK"] == "1":
            raise ValueError("bad loss")
        time.sleep(0.5)
        raise RuntimeError("gloo: Connection closed by peer")
    """
    assert run_node(local_job((write_script(tmp_path, body),), 3), 0) == 1
    lines = capfd.readouterr().err.rstrip().splitlines()
    head = next(index for index in range(len(lines) - 1, -1, -1) if lines[index].startswith("zero run: rank"))
    assert lines[head].startswith(f"zero run: rank 1 on {os.uname().nodename} failed first: exit code 1")
    assert lines[head + 1] == "Traceback (most recent call last):" and lines[-2] == "ValueError: bad loss"
    assert "rank.py" not in "\n".join(lines[head:]) and "script.py" in "\n".join(lines[head:])
    assert any(line.endswith("[rank1] ValueError: bad loss") for line in lines[:head]), lines
    told = [line for line in lines if "ValueError: bad loss" in line]
    assert len(told) == 2, lines  # at once in one line, and at the end below its traceback


def test_hooks_of_the_program_for_uncaught_exceptions_run(tmp_path: Path) -> None:
    body = """
        sys.excepthook = lambda kind, error, trace: report(got=str(error))
        raise ValueError("bad loss")
    """
    assert run_node(local_job((write_script(tmp_path, body),), 1), 0) == 1
    assert reports(tmp_path) == [{"got": "bad loss"}]


@pytest.mark.parametrize(("body", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGSEGV)", 139)])
def test_the_status_is_the_failing_ranks(
    tmp_path: Path, body: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_node(local_job((write_script(tmp_path, body),), 1), 0) == status
    ending = "exit code 3" if status == 3 else "killed by SIGSEGV"
    assert f"rank 0 on {os.uname().nodename} failed first: {ending}" in capfd.readouterr().err


def test_what_is_not_there_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_node(local_job((str(tmp_path / "none.py"),), 1), 0) == 1
    assert run_node(local_job(("no-such-program",), 1, kind="program"), 0) == 1
    said = capfd.readouterr().err
    assert "none.py: no such file in" in said and "no-such-program: cannot be started" in said


def test_no_process_outlives_a_killed_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither a rank that does not heed SIGTERM nor a child in a session of its own."""
    monkeypatch.setattr(node, "KILL_AFTER_SECONDS", 0.5)
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        report(ready=True)
        while os.environ["RANK"] == "0":
            time.sleep(1)
        while not os.path.exists(os.path.dirname(__file__) + "/report-0.json"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_node(local_job((write_script(tmp_path, body),), 2), 0) == 128 + signal.SIGKILL
    said = capfd.readouterr().err
    assert f"rank 1 on {os.uname().nodename} failed first: killed by SIGKILL; 1 other rank ended after it" in said
    assert "something else sent the signal" in said


def test_ranks_are_started_again_if_asked(tmp_path: Path) -> None:
    body = """
        tries = os.path.dirname(__file__) + "/try-" + os.environ["RANK"]
        if os.environ["RANK"] == "1" and not os.path.exists(tries):
            open(tries, "w").close()
            sys.exit(1)
        report(restarts=os.environ["TORCHELASTIC_RESTART_COUNT"])
    """
    assert run_node(local_job((write_script(tmp_path, body),), 2, max_restarts=1), 0) == 0
    assert reports(tmp_path) == [{"restarts": "1"}] * 2


def test_each_ranks_output_can_go_to_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = write_script(tmp_path, 'print("said by", os.environ["RANK"])')
    assert run_node(local_job((script,), 2, log_folder=str(tmp_path / "logs")), 0) == 0
    said = [path.read_text() for path in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert sorted(said) == ["said by 0\n", "said by 1\n"] and "said by" not in capfd.readouterr().out


# ---- several nodes on this machine -------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[RankPool]:
    """Two processes that can each be a node."""
    pool = RankPool(2, join=False)
    pool.run(os.getpid)
    yield pool
    pool.close()


def run_two(pool: RankPool, folder: Path, script: str, free_port: int, **more: Any) -> list[tuple[int, str]]:
    nodes = (Node("node-a", (0, 1)), Node("node-b", (0,)))
    job = Job(nodes, (script,), "127.0.0.1", free_port, **more)
    environment = {name: os.environ[name] for name in (MARK, "TMPDIR")}
    return pool.run(run_into, str(folder), environment, job, per_rank=[(0,), (1,)], timeout_seconds=60)


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.broad
def test_nodes_may_have_different_numbers_of_ranks(two_nodes: RankPool, tmp_path: Path, free_port: int) -> None:
    results = run_two(two_nodes, tmp_path, write_script(tmp_path, FACTS), free_port)
    assert [status for status, _ in results] == [0, 0], results
    told = [
        (rank["env"]["RANK"], rank["env"]["LOCAL_RANK"], rank["env"]["LOCAL_SIZE"], rank["env"]["CROSS_RANK"])
        for rank in reports(tmp_path)
    ]
    assert told == [("0", "0", "2", "0"), ("1", "1", "2", "0"), ("2", "0", "1", "1")]


@pytest.mark.broad
@pytest.mark.parametrize("start", ["", "of one launcher"])
def test_one_nodes_failure_ends_the_others_and_is_told_last(
    two_nodes: RankPool, tmp_path: Path, free_port: int, start: str
) -> None:
    body = """
        report(ready=True)
        while len([name for name in os.listdir(os.path.dirname(__file__)) if name.endswith(".json")]) < 3:
            time.sleep(0.02)
        if os.environ["RANK"] == "2":
            raise ValueError("on the other node")
        time.sleep(600)
    """
    (first, said), (second, said_there) = run_two(
        two_nodes, tmp_path, write_script(tmp_path, body), free_port, id=start
    )
    assert (first, second) == (1, 1)
    assert "rank 2 on node-b failed first: exit code 1" in said
    assert said.rstrip().splitlines()[-2] == "ValueError: on the other node"
    assert ("failed first" in said_there) is not bool(start)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    import socket

    script = write_script(tmp_path, FACTS)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--master_port {port}: cannot be .*another port"):
            run_node(local_job((script,), 1, master_port=port), 0)
        nodes = (Node("node-a", (0,)), Node("node-b", (0,)))
        with pytest.raises(ConfigError, match=f"--master_port {port}: cannot be .*another port"):
            run_node(Job(nodes, (script,), "127.0.0.1", port), 0)


# ---- the command -------------------------------------------------------------------------------


def test_the_command_runs_a_script_and_tells_errors_plainly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_script(tmp_path, FACTS)
    assert main(["run", "--num_gpus", "2", "--no_local_rank", script, "--num_gpus", "9"]) == 0
    assert [told["argv"] for told in reports(tmp_path)] == [[script, "--num_gpus", "9"]] * 2
    (tmp_path / "bad").write_text("a four slots\n")
    assert main(["run", "--hostfile", str(tmp_path / "bad"), script]) == 1
    assert f"zero: {tmp_path}/bad, line 1: expected HOST slots=N" in capfd.readouterr().err
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "-H", str(tmp_path / "hosts"), "--launcher", "pdsh", script]) == 1
    assert "--launcher: pdsh cannot be started here" in capfd.readouterr().err


def test_the_scripts_words_reach_it_as_they_are(tmp_path: Path) -> None:
    """Also those that begin like flags of ours or of torchrun, and those in which torchrun would fill something in."""
    words = [
        "--save",
        "a",
        "--log",
        "b",
        "--start",
        "100",
        "--run",
        "c",
        "--num",
        "9",
        "$$5",
        "${local_rank}",
        "--",
        "-x",
    ]
    script = write_script(tmp_path, FACTS)
    assert main(["run", "--num_gpus", "1", "--no_local_rank", script, *words]) == 0
    assert [told["argv"] for told in reports(tmp_path)] == [[script, *words]]


def test_a_job_under_nohup_survives_its_terminal(tmp_path: Path) -> None:
    body = f"""
        report(up=1)
        while not os.path.exists({str(tmp_path)!r} + "/go"):
            time.sleep(0.02)
    """
    launcher = subprocess.Popen(
        [sys.executable, "-m", "zero.launch", "--num_gpus", "2", write_script(tmp_path, body)],
        cwd=Path(__file__).parents[2],
        env=dict(os.environ),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    try:
        while len(reports(tmp_path)) < 2 and launcher.poll() is None:
            time.sleep(0.05)
        launcher.send_signal(signal.SIGHUP)
        time.sleep(1.0)
        assert launcher.poll() is None
        (tmp_path / "go").touch()
        assert launcher.wait(60) == 0
    finally:
        launcher.kill()
        launcher.wait()


def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    script = write_script(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nreport(up=1)\ntime.sleep(600)")
    command = [sys.executable, "-m", "zero.launch", "--num_gpus", "2", script]
    launcher = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=dict(os.environ))
    try:
        while len(reports(tmp_path)) < 2 and launcher.poll() is None:
            time.sleep(0.05)
        assert len(marked(os.environ[MARK])) == 3
    finally:
        launcher.kill()
        launcher.wait()
    for _ in range(100):
        if not marked(os.environ[MARK]):
            break
        time.sleep(0.05)
    assert marked(os.environ[MARK]) == []
    for path in (tmp_path / "temporary").iterdir():  # a few bytes of notes stay: the launcher had no chance
        subprocess.run(["rm", "-r", str(path)], check=True)
