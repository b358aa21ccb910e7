"""Ranks that do not do the same: an error that names ranks and modules on every rank that waits, and no hang."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPool, join_group

from offload.io.io_loop import IoLoop
from offload.streams import Streams
from zero.dist.comm import Comm
from zero.dist.process_groups import ProcessGroups

Pool = Callable[[int], RankPool]
DEADLINE_SECONDS = 5.0
HANG_SECONDS = 60.0
"""A rank that has not answered by then hangs, which is what must not be."""


@contextmanager
def opened(deadline_seconds: float = DEADLINE_SECONDS) -> Any:
    """(comm, mover, gather) of this rank, in a process group of its own."""
    join_group()
    mover = IoLoop()
    comm = Comm(torch.device("cpu"), Streams(), deadline_seconds=deadline_seconds)
    group = comm.group(range(comm.world_size))

    def gather(unit: int, numel: int = 64, job: Any = None) -> Any:
        flat = torch.zeros(numel * comm.world_size)
        ticket = comm.enqueue("gather", unit, f"blocks.{unit}")
        return mover.submit("gather", comm.all_gather(ticket, flat, group))

    try:
        yield comm, mover, gather
    finally:
        comm.close()
        mover.close()


def caught(action: Callable[[], Any]) -> tuple[str, str]:
    """Of the error that `action` raises: its type and its text."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# ---- what differs ---------------------------------------------------------------------------------------------------


def skipping(culprit: int, units: list[int], skipped: int, then: str) -> list[tuple[str, str]]:
    with opened() as (comm, _, gather):

        def work() -> None:
            for unit in units:
                if not (comm.rank == culprit and unit == skipped):
                    gather(unit).result()
            if then == "agree":
                comm.all_gather_bytes("norm")

        told = [caught(work), caught(lambda: comm.all_gather_bytes("again")), caught(lambda: gather(0).result())]
        return told


@pytest.mark.parametrize("world_size, then", [(2, "agree"), (4, "agree")])
@pytest.mark.parametrize("skipped", [1, 3])
def test_a_skipped_module_is_named_on_all_ranks(rank_pool: Pool, world_size: int, then: str, skipped: int) -> None:
    results = rank_pool(world_size).run(skipping, 1, [0, 1, 2, 3], skipped, then, timeout_seconds=HANG_SECONDS)
    for told in results:
        for kind, text in told:
            assert kind == "RankDivergenceError"
            assert f"gather of unit {skipped} (blocks.{skipped})" in text and "rank 1: " in text


def swapping(sizes: dict[int, int]) -> tuple[str, str]:
    with opened() as (comm, _, gather):
        order = [0, 2, 1, 3] if comm.rank == 1 else [0, 1, 2, 3]

        def work() -> None:
            """What differs may be told by the next gather already, before anybody has waited."""
            for transfer in [gather(unit, sizes[unit]) for unit in order]:
                transfer.result()

        return caught(work)


@pytest.mark.parametrize("sizes", [{0: 8, 1: 8, 2: 8, 3: 8}, {0: 8, 1: 100, 2: 5000, 3: 8}])
def test_swapped_modules_are_named_whatever_their_sizes(rank_pool: Pool, sizes: dict[int, int]) -> None:
    results = rank_pool(2).run(swapping, sizes, timeout_seconds=HANG_SECONDS)
    for kind, text in results:
        assert kind == "RankDivergenceError"
        assert "differ at number 2: rank 0: gather of unit 1 (blocks.1); rank 1: gather of unit 2 (blocks.2)" in text


def counting(more: int) -> tuple[str, str]:
    with opened() as (comm, _, gather):

        def work() -> None:
            for unit in range(3 + more * comm.rank):
                gather(unit).result()
            comm.all_gather_bytes("step")

        return caught(work)


def test_one_micro_batch_more_is_told_on_both_sides(rank_pool: Pool) -> None:
    for kind, text in rank_pool(2).run(counting, 2, timeout_seconds=HANG_SECONDS):
        assert kind == "RankDivergenceError"
        assert "rank 0: agree (step); rank 1: gather of unit 3 (blocks.3)" in text


def unnoticed_by_messages() -> tuple[str, str]:
    """Ranks that wait for nobody compare digests all the same."""
    with opened() as (comm, _, _gather):
        for unit in range(100):
            comm.enqueue("gather", unit + (comm.rank == 1 and unit == 30), "x")
        end = time.monotonic() + 40
        while time.monotonic() < end:
            told = caught(lambda: comm.enqueue("gather", 0, "y"))
            if told[0]:
                return told
            time.sleep(0.1)
        return "", "nothing was noticed"


@pytest.mark.slow
def test_ranks_that_wait_for_nobody_are_compared_too(rank_pool: Pool) -> None:
    kinds = [kind for kind, _ in rank_pool(2).run(unnoticed_by_messages, timeout_seconds=HANG_SECONDS)]
    assert kinds == ["RankDivergenceError"] * 2


# ---- who has left ---------------------------------------------------------------------------------------------------


def leaving(how: str, where: str) -> tuple[str, str]:
    with opened() as (comm, _, gather):
        gather(0).result()
        if comm.rank == 1 and how == "closes":
            comm.close()
            return "", ""
        if comm.rank == 1 and how == "cannot read":
            comm.cancel(comm.enqueue("gather", 1, "blocks.1"), OSError(5, "disk is gone"))
            return caught(lambda: comm.all_gather_bytes("step"))
        if comm.rank == 1 and how == "dies":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "agree":
            return caught(lambda: comm.all_gather_bytes("step"))
        return caught(lambda: gather(1).result())


@pytest.mark.parametrize("where", ["gather", "agree"])
def test_a_rank_that_closes_is_named_where_others_wait(rank_pool: Pool, where: str) -> None:
    for rank, (kind, text) in enumerate(rank_pool(4).run(leaving, "closes", where, timeout_seconds=HANG_SECONDS)):
        if rank != 1:
            assert kind == "RankLostError"
            assert "rank 1 has closed its engine or ended; its last was number 1, gather of unit 0 (blocks.0)" in text
            assert ("gather of unit 1 (blocks.1)" if where == "gather" else "agree (step)") in text


def test_a_rank_that_cannot_take_part_tells_the_others_why(rank_pool: Pool) -> None:
    for kind, text in rank_pool(2).run(leaving, "cannot read", "gather", timeout_seconds=HANG_SECONDS):
        assert kind == "RankDivergenceError"
        assert "rank 1 could not take part in gather of unit 1 (blocks.1): OSError: [Errno 5] disk is gone" in text


@pytest.mark.parametrize("where", ["gather", "agree"])
def test_a_rank_that_is_killed_is_named(rank_pool: Pool, where: str) -> None:
    results = rank_pool(4).run(leaving, "dies", where, timeout_seconds=HANG_SECONDS, errors="return")
    assert isinstance(results.pop(1), RankError)
    for kind, text in results:
        assert kind == "RankLostError"
        assert "rank 1 has failed: its process has died" in text
        assert ("gather of unit 1 (blocks.1)" if where == "gather" else "agree (step)") in text


def dying_while_opening(groups_before: int) -> tuple[str, str]:
    opens = ProcessGroups.new_group

    def opened_or_dead(lines: ProcessGroups, *args: Any) -> Any:
        if dist.get_rank() == 1 and len(lines._handles) == groups_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return opens(lines, *args)

    join_group()
    ProcessGroups.new_group = opened_or_dead  # type: ignore[method-assign]
    if dist.get_rank() == 1 and groups_before < 0:
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        comm = Comm(torch.device("cpu"), Streams(), deadline_seconds=DEADLINE_SECONDS)
        comm.group(range(comm.world_size))

    try:
        return caught(work)
    finally:
        ProcessGroups.new_group = opens  # type: ignore[method-assign]


@pytest.mark.broad
@pytest.mark.parametrize("groups_before", [-1, 0, 1])
def test_a_rank_that_dies_while_the_engine_is_made_is_named(rank_pool: Pool, groups_before: int) -> None:
    results = rank_pool(3).run(dying_while_opening, groups_before, timeout_seconds=HANG_SECONDS, errors="return")
    assert isinstance(results.pop(1), RankError)
    for kind, text in results:
        assert kind == "RankLostError" and "opening the " in text
        assert (
            "nothing is known about rank 1" if groups_before < 0 else "rank 1 has failed: its process has died"
        ) in text


def failing_job() -> tuple[str, str]:
    with opened() as (comm, mover, _):
        group = comm.group(range(comm.world_size))
        ticket = comm.enqueue("gather", 7, "blocks.7")

        async def job() -> None:
            if comm.rank == 1:
                await asyncio.sleep(0.1)
                raise OSError(5, "disk is gone")
            await comm.all_gather(ticket, torch.zeros(8), group)

        async def guarded() -> None:
            try:
                await job()
            except OSError as error:
                comm.cancel(ticket, error)
                raise

        return caught(mover.submit("job", guarded()).result)


def test_a_read_that_fails_reaches_the_ranks_that_wait(rank_pool: Pool) -> None:
    (kind, text), (own_kind, _) = rank_pool(2).run(failing_job, timeout_seconds=HANG_SECONDS)
    assert own_kind == "OSError" and kind == "RankDivergenceError"
    assert "rank 1 could not take part in gather of unit 7 (blocks.7): OSError" in text


def waiting_by_other_means() -> tuple[str, str]:
    with opened() as (comm, _, _gather):
        if comm.rank == 1:
            return "", ""
        end = time.monotonic() + HANG_SECONDS
        with comm.waiting("the slice of blocks.3"):
            while time.monotonic() < end:
                told = caught(comm.raise_if_failed)
                if told[0]:
                    return told
                time.sleep(0.01)
        return "", "nothing was noticed"


def test_who_waits_by_other_means_is_told_too(rank_pool: Pool) -> None:
    (kind, text), _ = rank_pool(2).run(waiting_by_other_means, timeout_seconds=HANG_SECONDS)
    assert kind == "RankLostError" and "rank 0 waits in the slice of blocks.3; rank 1 has closed" in text


# ---- who is slow ----------------------------------------------------------------------------------------------------


def slow(seconds: float) -> list[str]:
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logging.getLogger("zero").addHandler(Listener())
    with opened(1.0) as (comm, _, gather):
        for unit in range(2):
            if comm.rank == unit:
                time.sleep(seconds)
            gather(unit).result()
        if comm.rank == 0:
            time.sleep(seconds)
        comm.all_gather_bytes("step")
    return told


@pytest.mark.broad
def test_a_slow_rank_is_waited_for_and_told_about(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(slow, 3.0)
    assert any("in gather of unit 0 (blocks.0): rank 0 is in no collective" in line for line in second)
    assert any("in gather of unit 1 (blocks.1): rank 1 is in no collective" in line for line in first)
    assert any("in agree (step): rank 0 is in no collective" in line for line in second)


# ---- afterwards -----------------------------------------------------------------------------------------------------


def parting_and_going_on(rounds: int) -> tuple[list[str], int]:
    """Engines one after the other in one process: the next one works, and no thread stays behind."""
    kinds = []
    for number in range(rounds):
        with opened() as (comm, _, gather):
            gather(0).result()
            kinds.append(caught(lambda: gather(5 + comm.rank * (number % 2)).result())[0])  # noqa: B023
    dist.destroy_process_group()
    return kinds, sum(thread.name == "zero-watch" for thread in threading.enumerate())


def test_the_next_engine_works(rank_pool: Pool) -> None:
    expected = (["", "RankDivergenceError"] * 2, 0)
    assert rank_pool(2).run(parting_and_going_on, 4, timeout_seconds=HANG_SECONDS) == [expected] * 2
