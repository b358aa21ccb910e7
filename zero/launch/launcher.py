"""Makes a job of the flags of `zero run`, and starts it: here, or on each node by the command of a launcher.

It stays until all processes of the job have ended, and ends them when it is ended itself.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offload.accelerator import device_count
from offload.errors import ConfigError
from offload.system.process import die_with_parent
from zero.launch.arguments import check_arguments
from zero.launch.failures import exit_status
from zero.launch.job import Job, is_remote, plan_job
from zero.launch.node import handle_signals, run_node

POLL_SECONDS = 0.1
GRACE_SECONDS = 20.0  # After a node has failed, the others have so long to exchange reports and end by themselves.
END_SECONDS = 45.0  # After the request to end, at least.
EXTRA_SECONDS = 15.0  # So much longer than torchrun waits for ranks after a signal from outside.
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # The variable that sets how long it waits [s].

PDSH_FANOUT = 1024
# BatchMode: several ssh processes cannot ask for a password at once. ServerAlive: a node that vanished is noticed.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
# With these launchers a node's standard input closes whenever the launcher ends, even if it is killed.
STDIN_LAUNCHERS = ("ssh", "local", "pdsh")

# Variables that libraries of a training job read; all others stay on this machine.
PREFIXES = ("NCCL", "GLOO", "UCX", "TORCH", "PYTHON", "PYTORCH", "OMP", "MKL", "HF_", "ZERO_", "DS_", "MLFLOW", "MV2")
# Prefixes of variables that an outer launcher has set for its own ranks.
LOCAL_PREFIXES = ("ZERO_RUN_FOLDER", "ZERO_RANK_OPTIONS", "TORCHELASTIC_")
SHELL_FUNCTION = "BASH_FUNC_"
ENVIRONMENT_FILE = ".deepspeed_env"
# Values are passed on command lines, which all users of a machine can read, so secrets are left out.
SECRET = re.compile(r".*(TOKEN|SECRET|PASSWORD|API_KEY)")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Command:
    words: tuple[str, ...]
    environment: Mapping[str, str]  # Added to this process's environment.
    host: str  # The node's host, or all hosts.
    passes_stdin: bool = False  # Standard input is passed to the node, so closing it ends the node's ranks.


def launch(options: argparse.Namespace) -> int:
    """Run the program on all ranks of the job, or of this node with --no_ssh.

    Returns the exit status: 0, or the status of the first failed rank. Raises ConfigError: a wrong flag or file; says
    where, what was expected and what to do. `options`: from `zero.launch.arguments.add_arguments`.
    """
    check_arguments(options)
    job = plan_job(options, device_count())
    if not is_remote(options, job):
        return run_node(job, options.node_rank or 0)
    variables = variables_for_nodes(os.environ, Path.cwd(), Path.home())
    return run_commands(build_commands(replace(job, id=uuid.uuid4().hex), options, variables, str(Path.cwd())))


# ---- the environment of ranks on other nodes ----------------------------------------------------


def variables_for_nodes(environment: Mapping[str, str], here: Path, home: Path) -> dict[str, str]:
    """The variables that libraries read, but no secrets, and those of files, which win; the one `here` most.

    The files are .deepspeed_env at home and here, or what DS_ENV_FILE names; a user may put secrets into them.
    Raises ConfigError: the file is missing, unreadable or malformed.
    """
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIXES) and not name.startswith(LOCAL_PREFIXES)
        if NAME.fullmatch(name) and not SECRET.fullmatch(name)
    }
    # Modules are searched in the current folder there, as they are here.
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(here), environment.get("PYTHONPATH", ""))))
    file_name = environment.get("DS_ENV_FILE", "")
    # One path, if `file_name` is absolute.
    paths = dict.fromkeys(folder / (file_name or ENVIRONMENT_FILE) for folder in (home, here))
    files = [path for path in paths if os.path.isfile(path)]  # `Path.is_file` raises where no folder may be searched
    if file_name and not files:
        raise ConfigError(
            f"DS_ENV_FILE: expected an existing file, got {file_name} (searched in {here} and {home}); create it or "
            "unset the variable"
        )
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: cannot be read ({error}); expected text in UTF-8 with lines NAME=value; correct the file or "
                "its rights, or remove it"
            ) from error
        variables |= parse_variables(text, str(path))
    return variables


def parse_variables(text: str, name: str) -> dict[str, str]:
    """Variables of lines NAME=value. Blank lines and lines that begin with # are skipped; quotes around values removed.

    Raises ConfigError: another kind of line; names file and line.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip().removeprefix("export ").lstrip()
        # bash exports functions under names that only bash accepts
        if not words or words.startswith(("#", SHELL_FUNCTION)):
            continue
        key, equals, value = words.partition("=")
        if not equals or not NAME.fullmatch(key.strip()) or "\0" in value:
            raise ConfigError(
                f"{name}, line {number}: expected NAME=value, got {words!r}; correct the line or put a # before it"
            )
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables[key.strip()] = value
    return variables


# ---- the command of each launcher ---------------------------------------------------------------


def build_commands(job: Job, options: argparse.Namespace, variables: Mapping[str, str], folder: str) -> list[Command]:
    """The commands to start here so that every node runs its part. Raises ConfigError: --launcher_args is no words.

    Args:
        options: says which launcher reaches the nodes, and how.
        variables: environment variables for the ranks.
        folder: the current folder of the program on every node.
    """
    try:
        more = shlex.split(options.launcher_args)
    except ValueError as error:
        raise ConfigError(f"--launcher_args {options.launcher_args}: expected words of a shell: {error}") from error
    launcher, port = options.launcher, options.ssh_port
    sent = replace(job, watch_stdin=launcher in STDIN_LAUNCHERS).encode()
    node = [sys.executable, "-u", "-m", "zero.launch.node", sent]  # and its host, unless the launcher sets a number
    hosts = [host for host, _ in job.nodes]
    count, listed = str(len(hosts)), ",".join(hosts)
    if launcher == "local":
        prefixes = [[word.replace("{host}", host) for word in more] for host in hosts]
        return [
            Command((*prefix, *node, host), variables, host, passes_stdin=True)
            for prefix, host in zip(prefixes, hosts, strict=True)
        ]
    # The line for a remote shell: change to the folder, and become the node's process.
    assignments = [f"{name}={value}" for name, value in sorted(variables.items())]
    line = f"cd {shlex.quote(folder)} && exec {shlex.join(['env', *assignments, *node])}"
    if launcher == "ssh":
        ssh = [*SSH, *([] if port is None else ["-p", str(port)]), *more]
        return [Command((*ssh, host, f"{line} {shlex.quote(host)}"), {}, host, passes_stdin=True) for host in hosts]
    environment = dict(variables)
    if launcher == "pdsh":
        append = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
        environment = {} if port is None else {"PDSH_SSH_ARGS_APPEND": f"{append} -p {port}".strip()}
        words = ["pdsh", "-S", "-R", "ssh", "-f", str(PDSH_FANOUT), "-w", listed, *more]
        words.append(line.replace("%", "%%") + " %h")  # pdsh replaces %h by the host
    elif launcher == "slurm":
        # srun starts one task on each node, and this task starts the ranks: srun must not bind it to the first core.
        words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={listed}"]
        words += ["--kill-on-bad-exit=1", "--cpu-bind=none", "--export=ALL", f"--chdir={folder}"]
        words += [f"--{name}={value}" for name in ("comment", "account") if (value := getattr(options, name))]
        words += [*more, *node]
    elif launcher == "mpi":  # OpenMPI, which takes the values of variables from its own environment
        words = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-np", count]
        words += ["--host", ",".join(f"{host}:1" for host in hosts), "--map-by", "ppr:1:node", "--bind-to", "none"]
        words += ["--wdir", folder, *(word for name in sorted(variables) for word in ("-x", name)), *more, *node]
    else:  # mpich, mvapich or impi
        environment = {}
        words = ["mpirun", "-n", count, "-ppn", "1", "-hosts", listed, "-wdir", folder]
        words += [word for name, value in sorted(variables.items()) for word in ("-genv", name, value)]
        words += ["-genv", "I_MPI_PIN", "0"] if launcher == "impi" else []  # we bind the ranks ourselves, if at all
        words += [*more, *node]
    return [Command(tuple(words), environment, listed)]


# ---- running the commands -----------------------------------------------------------------------


def run_commands(commands: Sequence[Command]) -> int:
    """Start the commands and wait for them.

    Returns 0 if all succeeded, else the status of the first that failed (128 + signal if a signal ended it). Raises
    ConfigError: the launcher's program is not installed here.
    """
    children: dict[subprocess.Popen[bytes], Command] = {}
    signals: list[int] = []
    try:
        with handle_signals(lambda number, _: signals.append(number)):
            for command in commands:
                children[_start(command)] = command
            return _wait(dict(children), signals)
    finally:
        _end(children, signal.SIGKILL)
        for child in children:
            child.wait()


def _start(command: Command) -> subprocess.Popen[bytes]:
    launcher = os.getpid()
    try:
        # A new session, so that signals of the terminal reach only this process, which then ends the nodes in order.
        return subprocess.Popen(
            command.words,
            env={**os.environ, **command.environment},
            stdin=subprocess.PIPE if command.passes_stdin else subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(launcher),
        )
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError(
            f"--launcher: {command.words[0]} cannot be started here ({error.strerror}); install it, choose another "
            "launcher (ssh needs nothing but ssh), or start every node yourself with --no_ssh --node_rank N"
        ) from error


def _wait(running: dict[subprocess.Popen[bytes], Command], signals: Sequence[int]) -> int:
    """Wait for the commands; end the others after one has failed or a signal came, at once after a second signal."""
    status, is_ending, deadline = 0, False, float("inf")
    while running:
        for child in [child for child in running if child.poll() is not None]:
            _report_lost_node(child.returncode, running.pop(child))
            if child.returncode and not status:
                status, deadline = exit_status(child.returncode), time.monotonic() + GRACE_SECONDS
        if signals and not is_ending:
            status, deadline = status or 128 + signals[0], time.monotonic()
        if time.monotonic() >= deadline or len(signals) > 1:
            _end(running, signal.SIGKILL if is_ending else signal.SIGTERM)
            is_ending, deadline = True, time.monotonic() + shutdown_seconds(os.environ)
        time.sleep(POLL_SECONDS)
    return status


def shutdown_seconds(environment: Mapping[str, str]) -> float:
    """How long the nodes' processes may take to end."""
    timeout = environment.get(SHUTDOWN_TIMEOUT, "")
    return max(END_SECONDS, (int(timeout) if timeout.isdigit() else 0) + EXTRA_SECONDS)


def _report_lost_node(code: int, command: Command) -> None:
    """Report a node whose process was killed or lost, since the node itself could not report it."""
    if code < 0 or (code == 255 and command.words[0] == "ssh"):
        ending = f"signal {-code}" if code < 0 else f"status {code} of ssh"
        print(
            f"zero run: the command on {command.host} ended without any output: {ending}", file=sys.stderr, flush=True
        )


def _end(children: Iterable[subprocess.Popen[bytes]], kind: signal.Signals) -> None:
    """Close the children's standard input, or signal those that do not listen to it; SIGKILL is for all."""
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
        if child.stdin is None or kind == signal.SIGKILL:
            child.send_signal(kind)  # none, if it has ended
