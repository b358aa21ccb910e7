"""One node's part of a job: torchrun, in this process, and afterwards the report of its failures.

Run as a module it is what a launcher starts on each node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed import DistNetworkError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from offload.accelerator import device_count, visible_variable
from offload.errors import ConfigError, ZeroInfinityError
from offload.node.run_notes import FOLDER, read_notes
from offload.system.process import core_of
from zero.launch.affinity import cores_by_rank, usable_cpus, visible_devices
from zero.launch.commands import torchrun_arguments
from zero.launch.first_failure import Failure, describe, find_first, from_torch
from zero.launch.job import LOCAL_NAMES, Job
from zero.launch.memory import MemoryState, explain_kill, read_states
from zero.launch.peers import Peers
from zero.launch.rank import OPTIONS
from zero.launch.reaper import RUN_ID, Reaper

RANK_FILE = Path(__file__).with_name("rank.py")
HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # Signals that torchrun takes over.
SIGNALS_FLAG = "--signals-to-handle"  # Of torchrun, in newer versions.
# Variables in which launchers that start one process on each node give the node's number.
NODE_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MPI_RANKID", "SLURM_PROCID")


def run_node(job: Job, node_rank: int) -> int:
    """Start this node's ranks and wait until they have ended.

    Returns the exit status: 0, the first failed rank's, or 128 + signal. Raises ConfigError: the node lacks the GPUs or
    cores of the job, or its port is not free.
    """
    run_id = uuid.uuid4().hex
    with (
        _default_signals(),
        tempfile.TemporaryDirectory(prefix="zero-run-") as folder,
        _environment(job, node_rank, run_id, folder),
    ):
        before = read_states()
        if job.watch_stdin:  # before the wait for node 0: it can take minutes
            _watch_stdin()
        peers = Peers(job, node_rank) if len(job.nodes) > 1 else None
        with Reaper(run_id) as reaper:
            if peers is not None:
                peers.watch(lambda: _end_ranks(reaper))
            failures, status = _run_ranks(job, node_rank, folder)
            if peers is not None:
                peers.stop_watching()
            if failures or status:
                reaper.kill_remaining()
        own = None
        if failures:
            own = _add_cause(find_first(failures), before, Path(folder))
        return _report(job, node_rank, peers, own, len(failures) - 1, status)


def _run_ranks(job: Job, node_rank: int, folder: str) -> tuple[list[Failure], int]:
    # torchrun replaces ${...} in the words, and takes those before "--" for flags of its own if they begin like one.
    entry = ["--", *(word.replace("$", "$$") for word in (str(RANK_FILE), *job.program.words))]
    words = torchrun_arguments(job, node_rank, entry, job.log_folder or folder)
    ignored = [kind for kind in HANDLED_SIGNALS if signal.getsignal(kind) is signal.SIG_IGN]  # SIGHUP by nohup
    if ignored and SIGNALS_FLAG in torchrun.get_args_parser()._option_string_actions:
        words.insert(0, f"{SIGNALS_FLAG}={','.join(kind.name for kind in HANDLED_SIGNALS if kind not in ignored)}")
    try:
        torchrun.run(torchrun.parse_args(words))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = from_torch(error.failures, _name(job, node_rank))
        first = find_first(failures)
        return failures, first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return [], 128 + error.sigval
    except DistNetworkError as error:
        raise ConfigError(
            f"--master_port {job.master_port}: cannot be used ({str(error).splitlines()[0]}); another job may be "
            "using it: choose another port, or on a single node leave it out to get a free one"
        ) from error
    return [], 0


def _add_cause(failure: Failure, before: Sequence[MemoryState], folder: Path) -> Failure:
    if failure.exitcode != -signal.SIGKILL:
        return failure
    return replace(failure, cause=explain_kill(before, read_states(), read_notes(folder, "plan")))


def _report(job: Job, node_rank: int, peers: Peers | None, own: Failure | None, more: int, status: int) -> int:
    """Print the first failure of all nodes, once. Returns the exit status of this node."""
    failures, further = ([own] if own else []), more if own else 0
    gathered = peers.gather_failures(own, more, status) if peers is not None else None
    if gathered is not None:
        failures, further = gathered
    if failures:
        code = find_first(failures).exitcode  # of the whole job, on every node
        status = code if code > 0 else 128 - code
    if failures and (gathered is None or node_rank == 0 or not job.quiet):
        first = find_first(failures)
        words = describe(first, further + len(failures) - 1, local_rank=job.program.local_rank)
        print(words, file=sys.stderr, flush=True)
    elif peers is not None and not failures and peers.has_failed_peer:
        other = f"node 0 ({_name(job, 0)}) has ended" if gathered is None else "another node was told to end"
        print(f"zero run: {_name(job, node_rank)} ended its ranks, because {other}", file=sys.stderr, flush=True)
    return status


def _name(job: Job, node_rank: int) -> str:
    host = job.nodes[node_rank].host
    return socket.gethostname() if host in LOCAL_NAMES else host


def _end_ranks(reaper: Reaper) -> None:
    """After a failure of another node: end this node's ranks as torchrun does on SIGTERM, but with a shorter limit.

    If torchrun is already ending them, a rank of this node has failed, and torchrun must live on to report it.
    """
    if reaper.is_ending:
        return
    reaper.start_kill_timer()
    os.kill(os.getpid(), signal.SIGTERM)


def _watch_stdin() -> None:
    """End this node's ranks when the process that started it ends. The ranks get an empty standard input."""
    launcher_stdin = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(launcher_stdin, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="zero-stdin", daemon=True).start()


@contextlib.contextmanager
def _default_signals() -> Iterator[None]:
    """Until torchrun handles signals, let them end this process, also while it waits for other nodes."""
    before = {kind: signal.getsignal(kind) for kind in HANDLED_SIGNALS}
    if before[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextlib.contextmanager
def _environment(job: Job, node_rank: int, run_id: str, folder: str) -> Iterator[None]:
    """Inside, this process's environment is the one for ranks to inherit; afterwards it is restored."""
    slots = job.nodes[node_rank].slots
    cpus = usable_cpus(job.cores or ())
    cores, threads = None, [0] * len(slots)
    if job.cores is not None:
        cores, threads = cores_by_rank(cpus, [core_of(cpu) for cpu in cpus], len(slots))
    options = {
        "kind": job.program.kind,
        "local_rank": job.program.local_rank,
        "launcher": os.getpid(),
        "cores": cores,
        "threads": threads,
        "threads_said": "OMP_NUM_THREADS" in os.environ,
    }
    before = dict(os.environ)
    variable = visible_variable()
    visible = visible_devices(slots, before.get(variable), device_count())
    if visible is not None:
        os.environ[variable] = visible
    if job.cores is None:
        # torchrun would set 1 for several ranks, but updates on the CPU need all cores of the node.
        share = max(len({core_of(cpu) for cpu in cpus}) // len(slots), 1)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
    os.environ.update({OPTIONS: json.dumps(options), RUN_ID: run_id, FOLDER: folder})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def find_node_rank(job: Job, options: argparse.Namespace) -> int:
    """The node rank of this process. Raises ConfigError: it is no node of the job."""
    hosts = [node.host for node in job.nodes]
    if options.host is not None:
        alike = [index for index, host in enumerate(hosts) if host.rpartition("@")[2] == options.host]
        if options.host not in hosts and len(alike) == 1:  # pdsh leaves the user's name out
            return alike[0]
        if options.host not in hosts:
            raise ConfigError(f"zero.launch.node: expected a host of {', '.join(hosts)}, got {options.host!r}")
        return hosts.index(options.host)
    if os.environ.get("SLURMD_NODENAME") in hosts:  # slurm sorts its nodes, but the hostfile need not be sorted
        return hosts.index(os.environ["SLURMD_NODENAME"])
    number = next((os.environ[name] for name in NODE_RANK_VARIABLES if os.environ.get(name, "").isdigit()), None)
    if number is None or int(number) >= len(hosts):
        raise ConfigError(
            f"zero.launch.node: expected a number below {len(hosts)} in one of {', '.join(NODE_RANK_VARIABLES)}, got "
            f"{number}; the launcher must start one process on each node"
        )
    return int(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """The process that a launcher starts on a node. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m zero.launch.node", description=(__doc__ or "").splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--host", help="this node's name in the job")
    which.add_argument("--from-launcher", action="store_true", help="the launcher's environment says which node")
    parser.add_argument("job", help="the argument that zero run makes")
    options = parser.parse_args(arguments)
    try:
        job = Job.decode(options.job)
        return run_node(job, find_node_rank(job, options))
    except ZeroInfinityError as error:
        print(f"zero run: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
