"""Makes a job of the flags of `zero run`, and starts it here or through a launcher.

It stays until all processes of the job have ended, and ends them when it is ended itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from offload.accelerator import device_count
from offload.errors import ConfigError
from offload.system.process import die_with_parent
from zero.launch.arguments import check_arguments
from zero.launch.commands import Command, Transport, build_commands
from zero.launch.exported_variables import variables_for_nodes
from zero.launch.job import is_remote, plan_job
from zero.launch.node import run_node

POLL_SECONDS = 0.1
GRACE_SECONDS = 20.0  # After a node has failed, the others have so long to exchange reports and end by themselves.
END_SECONDS = 45.0  # After the request to end, at least.
EXTRA_SECONDS = 15.0  # So much longer than torchrun waits for ranks after a signal from outside.
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # The variable that sets how long it waits [s].


def launch(options: argparse.Namespace) -> int:
    """Run the program on all ranks of the job, or of this node with --no_ssh.

    Returns the exit status: 0, or the status of the first failed rank. Raises ConfigError: a wrong flag or file; says
    where, what was expected and what to do. `options`: from `zero.launch.arguments.add_arguments`.
    """
    check_arguments(options)
    job = plan_job(options, device_count())
    if not is_remote(options, job):
        return run_node(job, options.node_rank or 0)
    try:
        more = tuple(shlex.split(options.launcher_args))
    except ValueError as error:
        raise ConfigError(f"--launcher_args {options.launcher_args}: expected words of a shell: {error}") from error
    transport = Transport(options.launcher, more, options.ssh_port, options.comment, options.account)
    variables = variables_for_nodes(os.environ, Path.cwd(), Path.home())
    job = replace(job, id=uuid.uuid4().hex)
    commands = build_commands(job, transport, variables, str(Path.cwd()), as_root=os.geteuid() == 0)
    return run_commands(commands)


def run_commands(commands: Sequence[Command]) -> int:
    """Start the commands and wait for them.

    Returns 0 if all succeeded, else the status of the first that failed (128 + signal if a signal ended it). Raises
    ConfigError: the launcher's program is not installed here.
    """
    children: list[subprocess.Popen[bytes]] = []
    try:
        with _collect_signals() as signals:
            for command in commands:
                children.append(_start(command))
            return _wait(children, commands, signals)
    finally:
        _kill(children)


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


def _wait(children: Sequence[subprocess.Popen[bytes]], commands: Sequence[Command], signals: list[int]) -> int:
    status, is_ending, deadline = 0, False, float("inf")
    watched = dict(zip(children, commands, strict=True))
    while watched:
        for child in [child for child in watched if child.poll() is not None]:
            _report_lost_node(child, watched.pop(child))
            if child.returncode and not status:
                status = child.returncode if child.returncode > 0 else 128 - child.returncode
                deadline = time.monotonic() + GRACE_SECONDS
        if signals and not is_ending:
            status, deadline = status or 128 + signals[0], time.monotonic()
        if time.monotonic() >= deadline or len(signals) > 1:  # a second signal: at once
            end = _kill if is_ending else _request_end
            end(list(watched))
            is_ending, deadline = True, time.monotonic() + shutdown_seconds(os.environ)
        time.sleep(POLL_SECONDS)
    return status


def shutdown_seconds(environment: Mapping[str, str]) -> float:
    """How long the nodes' processes may take to end."""
    timeout = environment.get(SHUTDOWN_TIMEOUT, "")
    return max(END_SECONDS, (int(timeout) if timeout.isdigit() else 0) + EXTRA_SECONDS)


def _report_lost_node(child: subprocess.Popen[bytes], command: Command) -> None:
    """Report a node whose process was killed or lost, since the node itself could not report it."""
    code = child.returncode
    if code < 0 or (code == 255 and command.words[0] == "ssh"):
        ending = f"signal {-code}" if code < 0 else f"status {code} of ssh"
        print(
            f"zero run: the command on {command.host} ended without any output: {ending}", file=sys.stderr, flush=True
        )


def _request_end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        else:
            child.terminate()


def _kill(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Inside, signals do not end this process but are collected in the yielded list."""
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    kinds = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    kinds = [kind for kind in kinds if signal.getsignal(kind) is not signal.SIG_IGN]  # SIGHUP by nohup
    before = [signal.signal(kind, on_signal) for kind in kinds]
    try:
        yield signals
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
