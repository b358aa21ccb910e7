"""One node's part of a job: its GPUs and cores, torchrun in this process, and afterwards the report of its failures.

torchrun does rendezvous, starts, restarts and signals, and redirects output. What it does not do is here or in `rank`:
it gives ranks 30 s to end after a failure, leaves processes in sessions of their own, leaves ranks when it is killed
itself, and tells other nodes nothing of a failure.

Run as a module it is what a launcher starts on each node.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from offload.accelerator import device_count, visible_variable
from offload.errors import ConfigError, ZeroInfinityError
from offload.memory.run_notes import FOLDER, read_notes
from offload.system.process import core_of
from zero.launch.failures import (
    Failure,
    Peers,
    describe,
    exit_status,
    explain_kill,
    find_first,
    from_torch,
    read_states,
)
from zero.launch.job import LOCAL_NAMES, Job
from zero.launch.rank import OPTIONS

RANK_FILE = Path(__file__).with_name("rank.py")
HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # Signals that torchrun takes over.
# Variables in which launchers that start one process on each node give the node's number.
NODE_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MPI_RANKID", "SLURM_PROCID")
KILL_AFTER_SECONDS = 5.0  # Ranks have so long to end after another one has failed.
TORCHRUN_LOGGER = "torch.distributed.elastic"


def run_node(job: Job, node_rank: int) -> int:
    """Start this node's ranks and wait until they have ended.

    Returns the exit status: 0, the first failed rank's, or 128 + signal. Raises ConfigError: the node lacks the GPUs or
    cores of the job, or its port is not free.
    """
    with (
        # Until torchrun handles signals, they end this process, also while it waits for other nodes.
        handle_signals(signal.SIG_DFL),
        tempfile.TemporaryDirectory(prefix="zero-run-") as folder,
        _environment({**rank_variables(job, job.nodes[node_rank].slots), FOLDER: folder}),
    ):
        before = read_states()
        if job.watch_stdin:  # before the wait for node 0: it can take minutes
            _watch_stdin()
        peers = Peers(job, node_rank) if len(job.nodes) > 1 else None
        with Reaper(folder) as reaper:
            if peers is not None:
                peers.watch(reaper.end_ranks)
            failures, status = _run_ranks(job, node_rank, folder)
            if peers is not None:
                peers.stop_watching()
            if failures or status:
                kill(processes_of(folder))
        if failures and (first := find_first(failures)).exitcode == -signal.SIGKILL:
            cause = explain_kill(before, read_states(), read_notes(Path(folder), "plan"))
            failures[failures.index(first)] = replace(first, cause=cause)
        return _report(job, node_rank, peers, failures, status)


def _run_ranks(job: Job, node_rank: int, folder: str) -> tuple[list[Failure], int]:
    config = LaunchConfig(
        min_nodes=len(job.nodes),
        max_nodes=len(job.nodes),
        nproc_per_node=len(job.nodes[node_rank].slots),
        run_id=job.identity if len(job.nodes) > 1 else uuid.uuid4().hex,  # programs name files and sockets by it
        # torch itself binds a free port and passes it to the ranks: no other process can take it in between.
        rdzv_backend="c10d" if job.master_port is None else "static",
        rdzv_endpoint="localhost:0" if job.master_port is None else f"{job.master_addr}:{job.master_port}",
        rdzv_configs={} if job.master_port is None else {"rank": node_rank},
        local_addr=job.master_addr if job.master_port is None else None,
        max_restarts=job.max_restarts,
        log_line_prefix_template=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        logs_specs=DefaultLogsSpecs(job.log_folder or folder, redirects=Std.ALL if job.log_folder else Std.NONE),
    )
    if hasattr(config, "signals_to_handle"):  # in newer versions
        kinds = [kind for kind in HANDLED_SIGNALS if signal.getsignal(kind) is not signal.SIG_IGN]  # SIGHUP by nohup
        config.signals_to_handle = ",".join(kind.name for kind in kinds)
    words = [word.replace("$", "$$") for word in (str(RANK_FILE), *job.words)]  # torch replaces ${...} in them
    try:
        elastic_launch(config, os.environ.get("PYTHON_EXEC", sys.executable))("-u", *words)
    except ChildFailedError as error:
        failures = from_torch(error.failures, _name(job, node_rank))
        return failures, exit_status(find_first(failures).exitcode)
    except SignalException as error:
        return [], 128 + error.sigval
    except DistNetworkError as error:
        raise ConfigError(
            f"--master_port {job.master_port}: cannot be used ({str(error).splitlines()[0]}); another job may be "
            "using it: choose another port, or on a single node leave it out to get a free one"
        ) from error
    return [], 0


def _report(job: Job, node_rank: int, peers: Peers | None, own: list[Failure], status: int) -> int:
    """Print the first failure of all nodes, once. Returns the exit status of this node."""
    gathered = peers.gather_failures(own, status) if peers is not None else None
    failures = own if gathered is None else gathered
    if failures:
        first = find_first(failures)
        status = exit_status(first.exitcode)  # of the whole job, on every node
        if gathered is None or node_rank == 0 or not job.id:
            print(describe(first, len(failures) - 1, local_rank=job.local_rank), file=sys.stderr, flush=True)
    elif peers is not None and peers.has_failed_peer:
        other = f"node 0 ({_name(job, 0)}) has ended" if gathered is None else "another node was told to end"
        print(f"zero run: {_name(job, node_rank)} ended its ranks, because {other}", file=sys.stderr, flush=True)
    return status


def _name(job: Job, node_rank: int) -> str:
    host = job.nodes[node_rank].host
    return socket.gethostname() if host in LOCAL_NAMES else host


# ---- what ranks inherit -------------------------------------------------------------------------


def rank_variables(job: Job, slots: Sequence[int]) -> dict[str, str]:
    """Environment variables for the ranks of a node. Raises ConfigError: it lacks GPUs or cores."""
    allowed = sorted(os.sched_getaffinity(0))
    missing = [cpu for cpu in job.cores or () if cpu not in allowed]
    if missing:
        raise ConfigError(
            f"--bind_core_list: expected cores that this process may use ({', '.join(map(str, allowed))}), got "
            f"{missing[0]}"
        )
    cores = {cpu: core_of(cpu) for cpu in job.cores or allowed}
    options = {"kind": job.kind, "local_rank": job.local_rank, "launcher": os.getpid(), "cores": None}
    variables = {}
    if job.cores is not None:
        options["cores"] = shares = cores_by_rank(cores, len(slots))
        options["threads"] = [len({cores[cpu] for cpu in share}) for share in shares]
    elif "OMP_NUM_THREADS" not in os.environ:  # updates on the CPU need all cores of the node
        variables["OMP_NUM_THREADS"] = str(max(len(set(cores.values())) // len(slots), 1))
    visible = visible_devices(slots, os.environ.get(visible_variable()), device_count())
    if visible is not None:
        variables[visible_variable()] = visible
    return {**variables, OPTIONS: json.dumps(options)}


def visible_devices(slots: Sequence[int], visible: str | None, device_count: int) -> str | None:
    """The value of `visible_variable` for the ranks of a node; None: there is no GPU, so leave the variable alone.

    Raises ConfigError: a slot is not visible.

    Args:
        slots: of the node; indices into the visible GPUs, from 0.
        visible: the present value of the variable; None if it is not set.
        device_count: number of GPUs that torch sees.
    """
    if device_count == 0:
        return None
    listed = [word.strip() for word in visible.split(",")] if visible else [str(i) for i in range(device_count)]
    count = min(len(listed), device_count)
    beyond = [slot for slot in slots if slot >= count]
    if beyond:
        note = f" with {visible_variable()}={visible}" if visible else ""
        raise ConfigError(
            f"GPU slots: expected 0 to {count - 1} ({count} visible{note}), got {beyond[0]}; slots are numbers of "
            "visible GPUs: lower slots= or --num_gpus, or make more GPUs visible"
        )
    return ",".join(listed[slot] for slot in slots)


def cores_by_rank(core_of_cpu: Mapping[int, object], ranks: int) -> list[list[int]]:
    """CPU numbers for each rank of a node: equal shares of whole, neighbouring cores.

    Raises ConfigError: fewer cores than ranks. `core_of_cpu`: for each CPU, the core of which it is a hardware thread.
    """
    threads: dict[object, list[int]] = {}
    for cpu in sorted(core_of_cpu):
        threads.setdefault(core_of_cpu[cpu], []).append(cpu)
    cores = list(threads.values())
    if len(cores) < ranks:
        raise ConfigError(
            f"--bind_cores_to_rank: expected at least one core for each of {ranks} ranks, got {len(cores)}; use fewer "
            "ranks per node, or leave the flag out"
        )
    bounds = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return [sorted(itertools.chain(*cores[first:last])) for first, last in itertools.pairwise(bounds)]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process's environment has the variables, for ranks to inherit; afterwards it is restored."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- the end of ranks ---------------------------------------------------------------------------


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Inside, the handler gets the signals that end a job, but those that are ignored; afterwards it is restored."""
    before = {kind: signal.getsignal(kind) for kind in HANDLED_SIGNALS}
    try:
        for kind, handler_before in before.items():
            if handler_before is not signal.SIG_IGN:  # SIGHUP by nohup
                signal.signal(kind, handler)
        yield
    finally:
        for kind, handler_before in before.items():
            signal.signal(kind, handler_before)


class Reaper(logging.Handler):
    """Kills ranks that do not heed SIGTERM after another one has failed: torchrun alone would wait 30 s.

    It reads torchrun's log, the only place that shows when it ends ranks. If a user or scheduler has asked for the end,
    ranks keep the time that torchrun gives them (TORCH_ELASTIC_SHUTDOWN_TIMEOUT), since they may be writing a
    checkpoint. `folder`: of the run, whose name is in its processes' environment.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(logging.WARNING)
        self._folder = folder
        self._timer: threading.Timer | None = None
        self._has_death_signal = False

    def __enter__(self) -> Reaper:
        logging.getLogger(TORCHRUN_LOGGER).addHandler(self)
        return self

    def __exit__(self, *ignored: object) -> None:
        logging.getLogger(TORCHRUN_LOGGER).removeHandler(self)
        if self._timer is not None:
            self._timer.cancel()

    def emit(self, record: logging.LogRecord) -> None:
        if "death signal" in str(record.msg):
            self._has_death_signal = True
        elif "closing signal" in str(record.msg) and not self._has_death_signal:
            self._start_timer()

    def _start_timer(self) -> None:
        """Kill the processes that run now after KILL_AFTER_SECONDS, but not later ones, which belong to a restart."""
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(KILL_AFTER_SECONDS, kill, args=(processes_of(self._folder),))
            self._timer.daemon = True
            self._timer.start()

    def end_ranks(self) -> None:
        """After a failure of another node: end this node's ranks as torchrun does on SIGTERM, but with a shorter limit.

        If torchrun is already ending them, a rank of this node has failed, and torchrun must live on to report it.
        """
        if self._timer is None:
            self._start_timer()
            os.kill(os.getpid(), signal.SIGTERM)


def processes_of(folder: str) -> list[psutil.Process]:
    """The ranks of a run, and all processes that they have started."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(FOLDER) == folder:
                processes.append(process)
    return processes


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL the processes that still run; psutil notices if a process id has been reused."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


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


# ---- what a launcher starts on a node -----------------------------------------------------------


def find_node_rank(job: Job, host: str | None) -> int:
    """The node rank of this process: its host's, or as the launcher's variables say. Raises ConfigError: neither."""
    hosts = [node.host for node in job.nodes]
    if host is None:
        host = os.environ.get("SLURMD_NODENAME")  # slurm sorts its nodes, but the hostfile need not be sorted
        number = next((os.environ[name] for name in NODE_RANK_VARIABLES if os.environ.get(name, "").isdigit()), None)
        if host in hosts:
            return hosts.index(host)
        if number is not None and int(number) < len(hosts):
            return int(number)
        raise ConfigError(
            f"zero.launch.node: expected a number below {len(hosts)} in one of {', '.join(NODE_RANK_VARIABLES)}, got "
            f"{number}; the launcher must start one process on each node"
        )
    if host in hosts:
        return hosts.index(host)
    alike = [index for index, known in enumerate(hosts) if known.rpartition("@")[2] == host]
    if len(alike) == 1:  # pdsh leaves the user's name out
        return alike[0]
    raise ConfigError(f"zero.launch.node: expected a host of {', '.join(hosts)}, got {host!r}")


def main(words: Sequence[str]) -> int:
    """Run this node's part. Returns the exit status. `words`: the encoded job, and this node's host if it is known."""
    try:
        job = Job.decode(words[0])
        return run_node(job, find_node_rank(job, words[1] if len(words) > 1 else None))
    except ZeroInfinityError as error:
        print(f"zero run: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
