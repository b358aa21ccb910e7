"""Which rank of a job failed first and why: among the ranks of a node, by the kernel's counts, and among all nodes."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    TCPStore,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from offload.errors import ConfigError
from offload.sizes import format_bytes
from offload.system.linux import limit_bytes, memory_groups, number_in, table_in
from zero.launch.job import Job

# Signals of a rank's own failure. The reaper sends SIGKILL too, but seconds after a failure, which is then the earlier.
CRASHES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
# Words in the errors of a rank whose peer has gone.
PEER_ERROR = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Dist(Backend|Network|Store)Error|gloo|NCCL|process group|TCPStore"
)
LOCAL_RANK = "--local_rank"
ARGPARSE_STATUS = 2  # Exit status with which argparse ends a script, after its own message.
LAST_LINES = 5  # The last lines of an error: its message, and the line of the script that raised it.
RULE = "=" * 72
NEAR_LIMIT = 0.98

POLL_SECONDS = 0.5
SETTLE_SECONDS = 10.0  # Nodes wait so long for each other's reports.
MEET_SECONDS = 600  # As long as torchrun waits for all nodes.
LOST_SECONDS = 3.0  # After the store has gone, the ranks have so long to end by themselves.
HERE_SECONDS = 30.0  # After its store answers, node 0 has so long to confirm that it is of this job.
HERE, FAILED, DONE, READ = "here", "failed", "done", "read"


# ---- the first failure --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    rank: int
    host: str
    exitcode: int  # Negative: the number of the signal that ended it.
    seconds: float  # Since the epoch, when it was noticed or raised.
    text: str = ""  # Traceback or message.
    cause: str = ""  # The kernel's information about it.

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Smallest for the first failure: a rank's own failure before one that follows from another's, then by time."""
        crashed = self.exitcode < 0 and -self.exitcode in CRASHES
        last_line = (self.text.strip().splitlines() or [""])[-1]
        is_effect = not crashed and (self.exitcode == -signal.SIGTERM or bool(PEER_ERROR.search(last_line)))
        return is_effect, self.seconds

    @property
    def ending(self) -> str:
        if self.exitcode >= 0:
            return f"exit code {self.exitcode}"
        number = -self.exitcode
        return f"killed by {next((kind.name for kind in signal.Signals if kind == number), f'signal {number}')}"


def exit_status(exitcode: int) -> int:
    """The status as a shell gives it: 128 + signal for a process that a signal ended."""
    return exitcode if exitcode >= 0 else 128 - exitcode


def from_torch(failures: Mapping[int, ProcessFailure], host: str) -> list[Failure]:
    """The failed ranks of this node, as reported by torchrun."""
    reported = []
    for rank, failure in failures.items():
        message = failure.error_file_data.get("message", "")
        content = message if isinstance(message, dict) else {}
        extra = content.get("extraInfo", {})
        text = str(extra.get("py_callstack", "")) or content.get("message", "")
        seconds = extra.get("seconds", failure.timestamp)  # torchrun's own timestamp is in whole seconds, rounded down
        reported.append(Failure(rank, host, failure.exitcode, float(seconds), text))
    return reported


def find_first(failures: Iterable[Failure]) -> Failure:
    return min(failures, key=lambda failure: failure.sort_key)


def describe(failure: Failure, others: int, *, local_rank: bool = True) -> str:
    """The final message of a job that failed.

    Args:
        failure: the first failure.
        others: number of further failed ranks, most likely as a consequence.
        local_rank: the scripts get --local_rank.
    """
    head = f"zero run: rank {failure.rank} on {failure.host} failed first: {failure.ending}"
    if others:
        head += f"; {others} other rank{'s' * (others != 1)} ended after it"
    lines = [RULE, head]
    if failure.text:
        lines.append(failure.text.rstrip())
    if failure.cause:
        lines.append(f"rank {failure.rank} on {failure.host}: {failure.cause}")
    if not failure.text and not failure.cause:
        lines.append("(no traceback: the program exited by itself; see its own output above)")
    if local_rank and _may_be_local_rank(failure):
        lines.append(
            f"zero run passes {LOCAL_RANK} to the script, as DeepSpeed does; use --no_local_rank to leave it out"
        )
    return "\n".join([*lines, RULE])


def _may_be_local_rank(failure: Failure) -> bool:
    """True if the script may have failed because it did not expect --local_rank, for example as argv[1]."""
    if not failure.text and not failure.cause:
        return failure.exitcode == ARGPARSE_STATUS
    return any(LOCAL_RANK in line for line in failure.text.rstrip().splitlines()[-LAST_LINES:])


# ---- the kernel's counts ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryState:
    """One place that limits memory: a cgroup, or the machine."""

    name: str
    limit_bytes: int | None  # None: no limit here.
    peak_bytes: int | None  # Highest use so far; None: not known.
    kills: int  # Number of processes killed for memory since it exists.
    hits: int  # Number of times that the limit was hit.


def read_states(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[MemoryState]:
    """The memory cgroups of this process, innermost first, then the machine. Unreadable cgroups are left out."""
    groups = [_state(*group) for group in memory_groups(proc, cgroups)]
    total = table_in(proc / "meminfo").get("MemTotal:")
    kills = table_in(proc / "vmstat").get("oom_kill", 0)
    machine = MemoryState("the machine", None if total is None else total * 1024, None, kills, 0)
    return [*(state for state in groups if state is not None), machine]


def _state(folder: Path, mount: Path, is_v2: bool) -> MemoryState | None:
    counts = table_in(folder / ("memory.events" if is_v2 else "memory.oom_control"))
    if not counts and (is_v2 or number_in(folder / "memory.limit_in_bytes") is None):
        return None
    peaks = ("memory.peak", "memory.current") if is_v2 else ("memory.max_usage_in_bytes",)
    known = (number_in(folder / peak) for peak in peaks)
    return MemoryState(
        f"cgroup /{folder.relative_to(mount)}".replace("/.", "/"),
        limit_bytes(folder, is_v2=is_v2),
        next((peak for peak in known if peak is not None), None),
        counts.get("oom_kill", 0),
        counts.get("max", 0) if is_v2 else number_in(folder / "memory.failcnt") or 0,
    )


def explain_kill(
    before: Sequence[MemoryState], after: Sequence[MemoryState], plans: Mapping[int, Mapping[str, Any]]
) -> str:
    """Why a rank on this node got SIGKILL, as far as the kernel knows.

    Args:
        before: states when the ranks were started.
        after: states now.
        plans: rank of this node -> plan of its engine.
    """
    first = {state.name: state for state in before}
    # The machine counts the kills of all processes, so its count is used only if no cgroup has one.
    places = [state for state in after if state.name in first and state is not after[-1]] or after[-1:]
    kills = sum(state.kills - first[state.name].kills for state in places if state.name in first)
    words = "no plan is known (no engine was made)"
    with contextlib.suppress(KeyError, TypeError, ValueError):  # a note of another version
        if plans:
            planned = sum(int(plan["host_bytes"]) + int(plan["baseline_bytes"]) for plan in plans.values())
            words = f"planned {format_bytes(planned)}"
    if kills <= 0:
        return (
            "the kernel counted no out-of-memory kill here during the run, so something else sent the signal, such "
            f"as a scheduler or an administrator ({words})"
        )
    place = _tightest(first, after)
    limit = "unknown" if place.limit_bytes is None else format_bytes(place.limit_bytes)
    peak = "" if place.peak_bytes is None else f", peak {format_bytes(place.peak_bytes)}"
    ranks = f" by {len(plans)} rank{'s' * (len(plans) != 1)} here" if plans else ""
    return (
        f"kernel OOM: {words}{ranks}, limit {limit} of {place.name}{peak}. A plan does not include activations and "
        "the data loader: lower memory_budget.host or the micro-batch, offload to nvme, use fewer ranks per node, or "
        "raise the limit"
    )


def _tightest(first: Mapping[str, MemoryState], after: Sequence[MemoryState]) -> MemoryState:
    """The place whose limit was reached; the machine if no cgroup's limit was."""

    def was_hit(state: MemoryState) -> bool:
        before = first.get(state.name)
        near = state.limit_bytes is not None and (state.peak_bytes or 0) >= NEAR_LIMIT * state.limit_bytes
        return near and (before is None or state.hits > before.hits)

    return min((state for state in after if was_hit(state)), default=after[-1], key=lambda s: s.limit_bytes or 0)


# ---- the other nodes ----------------------------------------------------------------------------


class Peers:
    """How nodes learn of each other's failures: a few keys in the store that torchrun's rendezvous runs on.

    torchrun ends the ranks of a node when one of them fails, but tells no other node; those would notice when a
    collective does, which may take minutes or for ever. So each node looks often whether another one has failed.

    Raises ConfigError: the port is in use, or node 0 does not appear in time.

    `job`: must have several nodes.
    """

    def __init__(self, job: Job, node_rank: int) -> None:
        self._job, self._node_rank = job, node_rank
        self._stop_event, self.has_failed_peer = threading.Event(), False
        where = f"{job.master_addr}:{job.master_port}"
        is_first, wait_time = node_rank == 0, timedelta(seconds=MEET_SECONDS)
        try:
            # torchrun opens its own store on the same server, hence `multi_tenant`.
            options = {"wait_for_workers": False, "multi_tenant": True}
            server = TCPStore(job.master_addr, job.master_port or 0, None, is_first, wait_time, **options)
            self._store = PrefixStore(f"zero/{job.identity}", server)
            if is_first:
                self._store.set(HERE, "1")
            else:
                self._store.wait([HERE], timedelta(seconds=HERE_SECONDS))
        except DistStoreError as error:
            raise ConfigError(
                f"--master_port {job.master_port}: another job answers at {where}; choose another port, or check that "
                "all nodes are given the same command"
            ) from error
        except DistNetworkError as error:
            line = (str(error).splitlines() or [""])[0]
            if is_first:
                raise ConfigError(
                    f"--master_port {job.master_port}: cannot be opened on node 0 ({line}); another job may be using "
                    "it: choose another port"
                ) from error
            raise ConfigError(
                f"node {node_rank} ({job.nodes[node_rank].host}) cannot reach node 0 at {where} ({line}); check that "
                "node 0 is running and that --master_addr is an address that this node can reach"
            ) from error

    def watch(self, end: Callable[[], None]) -> None:
        """Call `end` on a separate thread once another node has failed, or node 0 is gone."""
        threading.Thread(target=self._watch, args=(end,), name="zero-peers", daemon=True).start()

    def _watch(self, end: Callable[[], None]) -> None:
        while not self._stop_event.wait(POLL_SECONDS):
            try:
                if not self._store.check([FAILED]):
                    continue
            except (DistError, RuntimeError):
                if self._stop_event.wait(LOST_SECONDS):
                    return
            self.has_failed_peer = True
            end()
            return

    def stop_watching(self) -> None:
        """This node's ranks have ended or failed, so `end` need not be called any more."""
        self._stop_event.set()

    def gather_failures(self, failures: Sequence[Failure], status: int) -> list[Failure] | None:
        """Exchange failures with the other nodes; node 0 stays until all have ended, since the store ends with it.

        Returns the failures of all nodes; None when the store is gone.

        Args:
            failures: of this node.
            status: not 0: the ranks of all nodes end, also if none of this node's has failed by itself.
        """
        is_first = self._node_rank == 0
        try:
            own = json.dumps([asdict(failure) for failure in failures])
            self._store.set(f"{FAILED}/{self._node_rank}", own)
            if failures or status:
                self._store.set(FAILED, "1")
            self._store.add(DONE, 1)
            if is_first or self._store.check([FAILED]):
                self._wait_for(DONE)
            keys = [f"{FAILED}/{node}" for node in range(len(self._job.nodes))]
            reports = [self._store.get(key) for key in keys if self._store.check([key])]
            gathered = [Failure(**values) for report in reports for values in json.loads(report)]
            self._store.add(READ, 1)
            if is_first:
                self._wait_for(READ)
            return gathered
        except (DistError, RuntimeError, ValueError):
            return None

    def _wait_for(self, key: str) -> None:
        """Wait for all nodes; once one has failed, or all have ended, no longer than it takes them to report."""
        deadline = math.inf
        while self._store.add(key, 0) < len(self._job.nodes) and time.monotonic() < deadline:
            if deadline == math.inf and (key == READ or self._store.check([FAILED])):
                deadline = time.monotonic() + SETTLE_SECONDS
            time.sleep(POLL_SECONDS / 5)
