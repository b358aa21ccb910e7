"""The command line of `zero run`, the job it makes, and the words that each launcher is started with."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from zero.launch import arguments, job
from zero.launch.job import Job, Node, is_remote, parse_cores, plan_job
from zero.launch.launcher import Command, build_commands

NODES = (Node("a", (0, 1)), Node("b", (2,)))
JOB = Job(NODES, ("train.py", "--text", 'it\'s 100% "quoted"', "a b"), "a", 29500)


@pytest.fixture(autouse=True)
def no_default_hostfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "DEFAULT_HOSTFILE", "/nowhere/hostfile")


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    options = parser.parse_args(words)
    arguments.check_arguments(options)
    return options


def planned(*words: str, device_count: int = 0) -> Job:
    return plan_job(parsed(*words), device_count)


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hostfile"
    path.write_text("a slots=2\nb slots=4\n")
    return str(path)


# ---- the command line --------------------------------------------------------------------------


def test_what_follows_the_script_is_the_scripts() -> None:
    made = planned("--num_gpus", "2", "train.py", "--num_gpus", "7", "-m", "--module")
    assert made.words == ("train.py", "--num_gpus", "7", "-m", "--module")
    assert made.nodes == (Node("localhost", (0, 1)),)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--module", "pkg.train"), (("pkg.train",), "module", True)),
        (("--no_python", "--no_local_rank", "./run.sh"), (("./run.sh",), "program", False)),
    ],
)
def test_what_each_rank_runs(words: tuple[str, ...], expected: tuple[tuple[str, ...], str, bool]) -> None:
    made = planned(*words)
    assert (made.words, made.kind, made.local_rank) == expected


@pytest.mark.parametrize(
    ("words", "device_count", "slots"),
    [
        ((), 0, 1),
        ((), 3, 3),
        (("--num_gpus", "2"), 3, 2),
        (("--num_accelerators", "5"), 0, 5),
        (("--num-gpus", "1"), 3, 1),
    ],
)
def test_ranks_on_this_machine(words: tuple[str, ...], device_count: int, slots: int) -> None:
    made = planned(*words, "x.py", device_count=device_count)
    assert made.nodes == (Node("localhost", tuple(range(slots))),) and made.master_port is None


def test_slots_of_this_machine_can_be_chosen() -> None:
    assert planned("--include", "localhost:1,3", "x.py", device_count=4).nodes[0].slots == (1, 3)
    assert planned("-e", "localhost:0", "x.py", device_count=2).nodes[0].slots == (1,)


def test_the_forms_that_accelerate_gives(hostfile: str) -> None:
    common = ("--hostfile", hostfile)
    alone = parsed(*common, "--node_rank", "1", "--no_ssh", "--num_gpus", "2", "--master_addr", "m", "--master_port",
                   "123", "x.py", "--lr", "1")  # fmt: skip
    made = plan_job(alone, 0)
    assert (made.master_addr, made.master_port, made.nodes) == ("m", 123, (Node("a", (0, 1)), Node("b", (0, 1))))
    assert not is_remote(alone, made)
    for launcher in ("pdsh", "openmpi", "mvapich", "mpich", "slurm"):
        wish = ("--no_local_rank", "--launcher", launcher, "--exclude", "b:3", "--master_port", "123", "--module", "x")
        remote = parsed(*common, *wish)
        made = plan_job(remote, 0)
        assert is_remote(remote, made) and made.nodes[1].slots == (0, 1, 2) and made.master_addr == "a"
    assert parsed(*common, "--launcher", "nossh", "--node_rank", "0", "x.py").no_ssh


def test_pdsh_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments.shutil, "which", lambda name: "/usr/bin/pdsh")
    assert parsed("x.py").launcher == "pdsh" and parsed("--launcher", "SSH", "x.py").launcher == "ssh"
    monkeypatch.setattr(arguments.shutil, "which", lambda name: None)
    assert parsed("x.py").launcher == "ssh" and parsed("--launcher", "pdsh", "x.py").launcher == "pdsh"


@pytest.mark.parametrize(("host", "remote"), [("127.0.0.1", False), ("localhost", False), ("192.0.2.7", True)])
def test_one_node_is_started_here_if_it_is_this_machine(host: str, remote: bool, tmp_path: Path) -> None:
    (tmp_path / "one").write_text(f"{host} slots=2\n")
    options = parsed("-H", str(tmp_path / "one"), "x.py")
    assert is_remote(options, plan_job(options, 0)) is remote
    options = parsed("-H", str(tmp_path / "one"), "--force_multi", "x.py")
    assert is_remote(options, plan_job(options, 0))


@pytest.mark.parametrize("form", ["--hostfile no/hosts", "--hostfile=no/hosts", "-H no/hosts", "-H=no/hosts"])
def test_a_hostfile_that_is_not_there_means_this_machine_as_with_deepspeed(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts of CogVLM and others name one that comes with no checkout."""
    options = parsed("--num_gpus", "2", *form.split(), "x.py", "--hostfile", "no/hosts")
    made = plan_job(options, 0)
    assert made.nodes == (Node("localhost", (0, 1)),) and not is_remote(options, made)
    assert made.words == ("x.py", "--hostfile", "no/hosts")
    assert capsys.readouterr().err == (
        "zero run: --hostfile no/hosts: there is no such file; the ranks run on this machine\n"
    )


def test_nodes_without_a_hostfile_are_numbered() -> None:
    words = ("--no_ssh", "--num_nodes", "2", "--num_gpus", "3", "--node_rank", "1", "x.py")
    assert planned("--master_addr", "10.0.0.1", *words).nodes == (Node("node-0", (0, 1, 2)), Node("node-1", (0, 1, 2)))
    with pytest.raises(ConfigError, match="--master_addr: expected the address of node 0 with --no_ssh"):
        planned(*words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--launcher", "telnet"), r"--launcher: expected one of pdsh, ssh, .*got 'telnet'"),
        (("--num_gpus", "2", "--include", "a"), "--num_nodes and --num_gpus with --include or --exclude"),
        (("--num_nodes", "2"), "--num_nodes: expected --hostfile FILE for more than one node"),
        (("--num_gpus", "0"), "--num_gpus: expected at least 1, got 0"),
        (("--num_gpus", "9"), r"--num_gpus: expected at most 4 \(the GPUs that are visible.*got 9"),
        (("--master_port", "70000"), "--master_port: expected 1 to 65535, got 70000"),
        (("--node_rank", "1"), "--node_rank: expected together with --no_ssh"),
        (("--no_ssh",), "--no_ssh: expected --node_rank N too"),
        (("--no_ssh", "--node_rank", "1"), "--node_rank: expected 0 to 0, got 1"),
        (("--module", "--no_python"), "--module and --no_python: expected one of them, got both"),
        (("--max_restarts", "-1"), "--max_restarts: expected at least 0"),
        (("--elastic_training",), "--elastic_training: not available"),
        (("--save_pid",), "--save_pid: not available"),
        (("--min_elastic_nodes", "1"), "--min_elastic_nodes: not available: .*--num_nodes"),
        (("--max-elastic-nodes", "2"), "--max_elastic_nodes: not available: .*--num_nodes"),
        (("--bind_core_list", "3-1"), "--bind_core_list 3-1: expected numbers and ranges"),
        (("--bind_core_list", "1,0-3"), "each core once"),
        (("--include", "localhost:4"), "expected a slot from 0 to 3"),
    ],
)
def test_a_flag_that_cannot_be_is_named(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        planned(*words, "x.py", device_count=4)


def test_several_nodes_need_an_address_that_all_can_reach(tmp_path: Path, hostfile: str) -> None:
    path = tmp_path / "two"
    path.write_text("localhost slots=1\nb slots=1\n")
    with pytest.raises(ConfigError, match=r"--master_addr: .*got localhost, which on each node means that node itself"):
        planned("-H", str(path), "x.py")
    assert planned("-H", str(path), "--master_addr", "10.1.1.1", "x.py").master_addr == "10.1.1.1"
    assert planned("-H", hostfile, "x.py").master_port == 29500
    with pytest.raises(ConfigError, match="--max_restarts: expected 0 with several nodes"):
        planned("-H", hostfile, "--max_restarts", "1", "x.py")


def test_core_lists() -> None:
    assert parse_cores("0-2, 7,4-5") == (0, 1, 2, 7, 4, 5)


DOCUMENTED = [
    line
    for page in ("README.md", "docs/launching.md", "docs/get-started.md")
    for line in (Path(__file__).parents[2] / page).read_text(encoding="utf-8").splitlines()
    if line.startswith("zero run ")
]


@pytest.mark.parametrize("line", DOCUMENTED)
def test_documented_commands_make_a_job(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("worker-1 slots=4\nworker-2 slots=4\n")
    words = shlex.split(line, comments=True)[2:]
    made = planned(*words, device_count=8)
    assert made.nodes[0].slots and not made.words[0].startswith("-")


# ---- commands ----------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=8), min_size=1), st.text(max_size=8), st.none() | st.integers(1, 65535))
def test_a_job_travels_as_one_word_that_shells_leave_alone(words: list[str], address: str, port: int | None) -> None:
    sent = Job(NODES, tuple(words), address, port, "module", False, (1, 2), 0, "logs", True, "start")
    assert Job.decode(sent.encode()) == sent
    assert shlex.quote(sent.encode().rstrip("=")) == sent.encode().rstrip("=") and "%" not in sent.encode()


@pytest.mark.parametrize("word", ["", "nonsense", Job(NODES, ("x",)).encode()[8:]])
def test_another_word_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="expected the argument that zero run makes"):
        Job.decode(word)


def commands(*flags: str, variables: dict[str, str], folder: str = "/here") -> list[Command]:
    return build_commands(JOB, parsed(*flags, "x.py"), variables, folder)


def sent_job(words: tuple[str, ...]) -> Job:
    """The job after the module's name in a command, or in the last shell line in it."""
    words = (*words, *shlex.split(words[-1]))
    return Job.decode(words[words.index("zero.launch.node") + 1])


def test_ssh_starts_one_process_a_node() -> None:
    flags = ("--launcher", "ssh", "--launcher_args=-i key", "--ssh_port", "2222")
    made = commands(*flags, variables={"A": "x y", "B": "$(rm)'"}, folder="/my folder")
    assert [command.host for command in made] == ["a", "b"]
    for command in made:
        assert command.words[0] == "ssh" and command.words[-6:-1] == ("-p", "2222", "-i", "key", command.host)
        assert command.passes_stdin and command.environment == {}
        line = shlex.split(command.words[-1])
        assert line[:6] == ["cd", "/my folder", "&&", "exec", "env", "A=x y"] and line[6] == "B=$(rm)'"
        assert line[7:11] == [sys.executable, "-u", "-m", "zero.launch.node"] and line[12:] == [command.host]
        assert sent_job(command.words) == replace(JOB, watch_stdin=True)


def test_pdsh_starts_all_nodes_and_fills_in_their_names() -> None:
    flags = ("--launcher", "pdsh", "--launcher_args=-x c", "--ssh_port", "2222")
    (command,) = commands(*flags, variables={"A": "50%"})
    assert command.words[:9] == ("pdsh", "-S", "-R", "ssh", "-f", "1024", "-w", "a,b", "-x")
    assert "A=50%%" in command.words[-1] and command.words[-1].endswith(" %h")
    assert command.environment["PDSH_SSH_ARGS_APPEND"].endswith("-p 2222") and not command.passes_stdin
    assert sent_job(command.words) == replace(JOB, watch_stdin=True)


def test_slurm_starts_one_task_a_node() -> None:
    flags = ("--launcher", "slurm", "--launcher_args=--gres=gpu:2", "--comment", "c", "--account", "acc")
    (command,) = commands(*flags, variables={"A": "1"})
    assert command.words[:5] == ("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=a,b")
    assert {"--comment=c", "--account=acc", "--gres=gpu:2", "--export=ALL", "--chdir=/here"} <= set(command.words)
    assert command.words[-2] == "zero.launch.node" and command.environment == {"A": "1"}
    assert sent_job(command.words) == JOB


def test_mpi_starts_one_process_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (command,) = commands("--launcher", "openmpi", variables={"A": "1", "B": "2"})
    assert command.words[:6] == ("mpirun", "--allow-run-as-root", "-np", "2", "--host", "a:1,b:1")
    assert shlex.join(command.words).count("-x A -x B") == 1 and command.environment == {"A": "1", "B": "2"}
    (command,) = commands("--launcher", "mpich", variables={"A": "1"})
    assert command.words[:7] == ("mpirun", "-n", "2", "-ppn", "1", "-hosts", "a,b")
    assert "-genv A 1" in shlex.join(command.words) and command.environment == {}
    assert sent_job(command.words) == JOB


def test_local_nodes_are_reached_by_a_prefix() -> None:
    made = commands("--launcher", "local", "--launcher_args", "ip netns exec {host}", variables={"A": "1"})
    assert [command.words[:4] for command in made] == [("ip", "netns", "exec", "a"), ("ip", "netns", "exec", "b")]
    assert all(command.passes_stdin and command.environment == {"A": "1"} for command in made)
    assert [command.words[-1] for command in made] == ["a", "b"]
    assert sent_job(made[1].words) == replace(JOB, watch_stdin=True)
