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

from torch.distributed import DistError, DistNetworkError, TCPStore  # type: ignore[attr-defined]

from offload.errors import ConfigError
from zero.launch.first_failure import Failure
from zero.launch.job import Job

LOOK_SECONDS = 0.5
SETTLE_SECONDS = 10.0  # Nodes wait so long for each other's reports.
MEET_SECONDS = 600  # As long as torchrun waits for all nodes.
LOST_SECONDS = 3.0  # After the store has gone, the ranks have so long to end by themselves.
FAILED, DONE, READ = "zero/failed", "zero/done", "zero/read"


class Peers:
    """This node's view of the others. Raises ConfigError: the port is in use, or node 0 does not appear in time.

    `job`: must have several nodes.
    """

    def __init__(self, job: Job, node_rank: int) -> None:
        self._job, self._node_rank = job, node_rank
        self._over, self.failed = threading.Event(), False
        where = f"{job.master_addr}:{job.master_port}"
        try:
            self._store = TCPStore(
                job.master_addr,
                job.master_port or 0,
                None,
                node_rank == 0,
                timedelta(seconds=MEET_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,  # torchrun opens its own store on the same server
            )
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

    def watch(self, end: Callable[[], None]) -> None:
        """Call `end` on a separate thread once another node has failed, or node 0 is gone."""
        threading.Thread(target=self._watch, args=(end,), name="zero-peers", daemon=True).start()

    def _watch(self, end: Callable[[], None]) -> None:
        while not self._over.wait(LOOK_SECONDS):
            try:
                if not self._store.check([FAILED]):
                    continue
            except (DistError, RuntimeError):
                if self._over.wait(LOST_SECONDS):
                    return
            self.failed = True
            end()
            return

    def ended(self) -> None:
        """This node's ranks have ended or failed, so `end` need not be called any more."""
        self._over.set()

    def settle(self, own: Failure | None, more: int) -> tuple[list[Failure], int] | None:
        """Exchange failures with the other nodes.

        Returns all nodes' first failures and the number of further ones; None when the store is gone.

        `own`: this node's first failure; None if it has none. `more`: number of its further failed ranks.
        """
        count = len(self._job.nodes)
        try:
            if own is not None:
                self._store.set(f"{FAILED}/{self._node_rank}", json.dumps({"first": asdict(own), "more": more}))
                self._store.set(FAILED, "1")
            self._store.add(DONE, 1)
            self._wait_for(DONE, count)
            found, further = [], 0
            for index in range(count):
                if self._store.check([f"{FAILED}/{index}"]):
                    told = json.loads(self._store.get(f"{FAILED}/{index}"))
                    found.append(Failure(**told["first"]))
                    further += told["more"]
            self._store.add(READ, 1)
            if self._node_rank == 0:  # the store ends with this process
                self._wait_for(READ, count)
            return found, further
        except (DistError, RuntimeError, ValueError):
            return None

    def _wait_for(self, key: str, count: int) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        with contextlib.suppress(KeyError):
            while self._store.add(key, 0) < count and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS / 5)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
