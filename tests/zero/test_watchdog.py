"""The watchdog of one rank, with a store in memory: whom it knows to have ended, and what it does without answers."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import torch.distributed as dist

from offload.errors import RankLostError
from zero.dist.failure_state import FailureState
from zero.dist.sequence import OperationLog
from zero.dist.watchdog import Position, StatusBoard, Watchdog, process_namespace


def watchdog(board: StatusBoard, state: FailureState, abort: Callable[[], None] = lambda: None) -> Watchdog:
    return Watchdog(board, OperationLog(), state, 0, 2, 0.3, abort)


def test_a_process_that_has_died_is_known_by_what_it_had_published() -> None:
    store = dist.HashStore()
    with subprocess.Popen(["true"]) as process:
        pass
    StatusBoard(store, 1, 2).publish_position(Position(process_namespace=process_namespace(), pid=process.pid))
    watch = watchdog(StatusBoard(store, 0, 2), FailureState())
    try:
        assert watch.ended_ranks([1]) == {1: "its process has died"}
    finally:
        watch.stop()


class SilentBoard(StatusBoard):
    """A store that no longer answers once there is a failure."""

    def publish_position(self, position: Position) -> None:
        if position.error:
            raise ConnectionError("no answer")
        super().publish_position(position)


def test_a_failure_ends_the_connections_although_the_store_does_not_answer() -> None:
    aborts, state = list[float](), FailureState()
    watch = watchdog(SilentBoard(dist.HashStore(), 0, 2), state, lambda: aborts.append(time.monotonic()))
    try:
        state.fail(RankLostError("rank 1 is lost"))
        watch.wake()
        deadline = time.monotonic() + 60
        while not aborts and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(aborts) == 1
    finally:
        watch.stop()
