"""How nodes learn of each other's failures: a few keys in the store that torchrun's rendezvous runs on.

torchrun ends the ranks of a node when one of them fails. The other nodes would notice when a collective does, which may
take minutes or for ever; so each node looks every half second whether another one has failed.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    TCPStore,
)

from offload.errors import ConfigError
from zero.launch.first_failure import Failure
from zero.launch.job import Job

POLL_SECONDS = 0.5
SETTLE_SECONDS = 10.0  # Nodes wait so long for each other's reports.
MEET_SECONDS = 600  # As long as torchrun waits for all nodes.
LOST_SECONDS = 3.0  # After the store has gone, the ranks have so long to end by themselves.
HERE_SECONDS = 30.0  # After its store answers, node 0 has so long to confirm that it is of this job.
HERE, FAILED, DONE, READ = "here", "failed", "done", "read"


class Peers:
    """This node's view of the others. Raises ConfigError: the port is in use, or node 0 does not appear in time.

    `job`: must have several nodes.
    """

    def __init__(self, job: Job, node_rank: int) -> None:
        self._job, self._node_rank = job, node_rank
        self._stop_event, self.has_failed_peer = threading.Event(), False
        where = f"{job.master_addr}:{job.master_port}"
        try:
            server = TCPStore(
                job.master_addr,
                job.master_port or 0,
                None,
                node_rank == 0,
                timedelta(seconds=MEET_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,  # torchrun opens its own store on the same server
            )
            self._store = PrefixStore(f"zero/{job.identity}", server)
        except DistNetworkError as error:
            if node_rank == 0:
                raise ConfigError(
                    f"--master_port {job.master_port}: cannot be opened on node 0 ({_first_line(error)}); another job "
                    "may be using it: choose another port"
                ) from error
            raise ConfigError(
                f"node {node_rank} ({job.nodes[node_rank].host}) cannot reach node 0 at {where} "
                f"({_first_line(error)}); check that node 0 is running and that --master_addr is an address that this "
                "node can reach"
            ) from error
        if node_rank == 0:
            self._store.set(HERE, "1")
            return
        try:
            self._store.wait([HERE], timedelta(seconds=HERE_SECONDS))
        except DistStoreError as error:
            raise ConfigError(
                f"--master_port {job.master_port}: another job answers at {where}; choose another port, or check that "
                "all nodes are given the same command"
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

    def gather_failures(self, own: Failure | None, more: int, status: int) -> tuple[list[Failure], int] | None:
        """Exchange failures with the other nodes; node 0 stays until all have ended, since the store ends with it.

        Returns all nodes' first failures and the number of further ones; None when the store is gone.

        Args:
            own: this node's first failure; None if it has none.
            more: number of its further failed ranks.
            status: not 0: the ranks of all nodes end, also if none of this node's has failed by itself.
        """
        count, first = len(self._job.nodes), self._node_rank == 0
        try:
            if own is not None:
                self._store.set(f"{FAILED}/{self._node_rank}", json.dumps({"first": asdict(own), "more": more}))
            if own is not None or status:
                self._store.set(FAILED, "1")
            self._store.add(DONE, 1)
            if first or self._store.check([FAILED]):
                self._wait_for(DONE, count)
            failures, further = [], 0
            for index in range(count):
                if self._store.check([f"{FAILED}/{index}"]):
                    report = json.loads(self._store.get(f"{FAILED}/{index}"))
                    failures.append(Failure(**report["first"]))
                    further += report["more"]
            self._store.add(READ, 1)
            if first:
                self._wait_for(READ, count, limit_wait=True)
            return failures, further
        except (DistError, RuntimeError, ValueError):
            return None

    def _wait_for(self, key: str, count: int, *, limit_wait: bool = False) -> None:
        """Wait for all nodes; once one has failed, or if it `limit_wait`, no longer than it takes them to report."""
        deadline = None
        with contextlib.suppress(KeyError):
            while self._store.add(key, 0) < count and (deadline is None or time.monotonic() < deadline):
                if deadline is None and (limit_wait or self._store.check([FAILED])):
                    deadline = time.monotonic() + SETTLE_SECONDS
                time.sleep(POLL_SECONDS / 5)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
