"""DeepSpeed's other commands, by name: `ds_report`, `dsr`, `ds_io`, `ds_ssh`, ...

Their files in `alias/bin`, and in the distribution named deepspeed, all call `main`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from offload.errors import ZeroInfinityError
from zero.compat import launcher
from zero.compat.disk_speed import ds_io
from zero.compat.elasticity import ds_elastic
from zero.launch.arguments import DEFAULT_HOSTFILE
from zero.launch.commands import SSH
from zero.launch.hosts import read_hostfile

Words = Sequence[str]
_print_lock = threading.Lock()
"""Threads of `ds_ssh` print for several hosts at the same time, but only one thread may use a text stream."""

REFUSED = {
    "ds_bench": (
        "DeepSpeed's benchmarks of collectives are not part of zero-infinity; for NCCL use nccl-tests, for a whole "
        "step engine.statistics(); `zero doctor` lists the collectives that work on this machine"
    ),
    "ds_nvme_tune": (
        "the engine's aio defaults are what measured fastest, and are not tuned; `zero doctor --probe PATH` measures a "
        "disk"
    ),
}


def ds_report(words: Words) -> int:
    """`zero doctor`."""
    parser = argparse.ArgumentParser(
        prog="ds_report", description="Show what this machine has: the same as `zero doctor`."
    )
    for flag in ("--hide_operator_status", "--hide_errors_and_warnings"):
        parser.add_argument(flag, action="store_true", help="no effect")
    parser.parse_args(words)
    return launcher.report()


def ds_ssh(words: Words) -> int:
    """Run one command on all hosts of a hostfile at once. Returns the status of the first host that failed."""
    parser = argparse.ArgumentParser(prog="ds_ssh", description="Run a command on all hosts of a hostfile.")
    parser.add_argument("-f", "--hostfile", default=DEFAULT_HOSTFILE, help="lines HOST slots=N (%(default)s)")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the command, as for a shell: its words are joined by spaces"
    )
    options = parser.parse_args(words)
    if not options.command:
        parser.error("expected a command, got none")
    line = " ".join(options.command)
    if options.hostfile == DEFAULT_HOSTFILE and not os.path.exists(DEFAULT_HOSTFILE):
        print(
            f"ds_ssh: {DEFAULT_HOSTFILE} does not exist, so the command runs on this machine only: {line}",
            file=sys.stderr,
        )
        return subprocess.run(["sh", "-c", line]).returncode
    hosts = list(read_hostfile(options.hostfile))
    with ThreadPoolExecutor(len(hosts)) as pool:
        # Wait for all hosts before looking for a failure: an abandoned iterator cancels the calls not yet begun.
        statuses = list(pool.map(lambda host: _run_on_host(host, line), hosts))
    return next((status for status in statuses if status), 0)


def _run_on_host(host: str, line: str) -> int:
    """Run the command there; each line of output is printed with the host's name in front."""
    with subprocess.Popen(
        [*SSH, host, line], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for answer in process.stdout or ():
            _print_line(sys.stdout, f"{host}: {answer.rstrip()}")
    if process.returncode:
        _print_line(sys.stderr, f"ds_ssh: {host}: {shlex.quote(line)} ended with status {process.returncode}")
    return process.returncode


def _print_line(stream: TextIO, line: str) -> None:
    with _print_lock:
        print(line, file=stream, flush=True)


COMMANDS: Mapping[str, Callable[[Words], int]] = {
    "deepspeed": launcher.main,
    "ds": launcher.main,
    "ds_report": ds_report,
    "dsr": ds_report,
    "ds_io": ds_io,
    "ds_ssh": ds_ssh,
    "ds_elastic": ds_elastic,
}


def main() -> int:
    """Run the command under whose name this process was started. Returns its exit status."""
    name = Path(sys.argv[0]).name
    if name in REFUSED:
        print(f"{name}: {REFUSED[name]}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name](sys.argv[1:])
    except (ZeroInfinityError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
