"""Processes on one machine for tests: forked, so that they start at once, and always killed at the end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from offload.system.descriptors import AllGatherBytes

SECONDS_MAX = 60.0
CONTEXT = multiprocessing.get_context("fork")


class Failed(AssertionError):
    """A peer raised the error in the message, or did not answer."""


class Peer:
    """One process as its parent sees it."""

    def __init__(self, process: Any, end: Connection) -> None:
        self.process, self._end = process, end

    def send(self, value: Any) -> None:
        self._end.send(value)

    def receive(self) -> Any:
        """The peer's next message; its error is raised here."""
        if not self._end.poll(SECONDS_MAX):
            raise Failed(f"peer {self.process.name} said nothing for {SECONDS_MAX:g} s")
        try:
            fine, value = self._end.recv()
        except EOFError:
            raise Failed(f"peer {self.process.name} has ended") from None
        if not fine:
            raise Failed(f"peer {self.process.name}:\n{value}")
        return value

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


class Parent:
    """The test as a peer sees it."""

    def __init__(self, end: Connection) -> None:
        self._end = end

    def tell(self, value: Any) -> None:
        self._end.send((True, value))

    def receive(self) -> Any:
        """The test's next message; None when it has ended."""
        try:
            return self._end.recv()
        except EOFError:
            return None


Job = Callable[[int, AllGatherBytes, Parent], Any]
"""(number of the peer, connection to the other peers, connection to the test) -> the result that the test receives."""


class Wires:
    """Pipes between every two peers, and between each peer and the test; made before the peers are forked."""

    def __init__(self, count: int) -> None:
        self.count = count
        pairs = {(i, j): CONTEXT.Pipe() for i in range(count) for j in range(i + 1, count)}
        self.ends = {
            (i, j): pairs[min(i, j), max(i, j)][int(i > j)] for i in range(count) for j in range(count) if i != j
        }
        self.tests, self.peers = zip(*(CONTEXT.Pipe() for _ in range(count)), strict=True)

    def keep(self, index: int) -> None:
        """Close all ends except those of peer `index`; -1: of the test. Then the others notice when a process ends."""
        for end in (*self.tests, *(end for (owner, _), end in self.ends.items() if owner != index)):
            if index >= 0 or end not in self.tests:
                end.close()
        for other, end in enumerate(self.peers):
            if other != index:
                end.close()

    def share(self, index: int, payload: bytes) -> list[bytes]:
        others = [other for other in range(self.count) if other != index]
        for other in others:
            self.ends[index, other].send_bytes(payload)
        found = {other: self.ends[index, other].recv_bytes() for other in others}
        return [found.get(other, payload) for other in range(self.count)]


def _run(index: int, job: Job, wires: Wires) -> None:
    wires.keep(index)
    end = wires.peers[index]
    try:
        end.send((True, job(index, partial(wires.share, index), Parent(end))))
    except BaseException:
        end.send((False, traceback.format_exc()))


@contextlib.contextmanager
def running(jobs: Sequence[Job]) -> Iterator[list[Peer]]:
    """One process for each job. Those that still run at the end are killed."""
    wires = Wires(len(jobs))
    peers: list[Peer] = []
    try:
        for index, job in enumerate(jobs):
            process = CONTEXT.Process(target=_run, args=(index, job, wires), name=str(index), daemon=True)
            process.start()
            peers.append(Peer(process, wires.tests[index]))
        wires.keep(-1)
        yield peers
    finally:
        for peer in peers:
            peer.process.kill()
            peer.process.join()
        for end in wires.tests:
            end.close()


def all_run(count: int, job: Job) -> list[Any]:
    """The results of `count` processes that run `job`."""
    with running([job] * count) as peers:
        return [peer.receive() for peer in peers]
