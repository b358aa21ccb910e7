"""A table that peers share: numbers come with what was written before them, and who waits learns who is late."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import Parent, all_run, running

from offload.errors import BudgetError, NativeError, PeerError, StateError, WatchdogError
from offload.memory import board as boards
from offload.memory.board import NodeBoard, Sleeper
from offload.memory.shared_host_memory import SharedHostMemory, map_peer_memory
from offload.system.descriptors import AllGatherBytes

SECONDS = 30.0


@pytest.fixture(params=["1", "0"], ids=["native", "python"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ZERO_NATIVE", request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def alone(count: int, columns: int) -> list[NodeBoard]:
    """What `count` peers would hold, all in this process."""
    first = SharedHostMemory(NodeBoard.nbytes_for(count, columns), "board")
    others = [SharedHostMemory.open(os.dup(first.descriptor), first.nbytes, "board") for _ in range(count - 1)]
    return [NodeBoard(index, count, columns, region) for index, region in enumerate([first, *others])]


@settings(max_examples=30)
@given(st.data())
def test_every_cell_holds_what_its_peer_published_last(data: st.DataObject) -> None:
    count, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    table = [[0] * columns for _ in range(count)]
    views = alone(count, columns)
    for _ in range(data.draw(st.integers(0, 20))):
        peer, column = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, columns - 1))
        table[peer][column] = data.draw(st.integers(-(1 << 63), (1 << 63) - 1))
        views[peer].publish(column, table[peer][column])
    for view in views:
        assert [[view.read(peer, column) for column in range(columns)] for peer in range(count)] == table
        for column in range(columns):
            column_values = [row[column] for row in table]
            assert view.read_all(column) == column_values
            for value in column_values:
                assert view.is_reached_by_all(column, value) == (min(column_values) >= value)
        view.close()


def test_rows_share_no_cache_line(either_way: None) -> None:
    views = alone(3, 1)
    base = views[0]._memory.data
    views[0].publish(0, 1)
    views[2].publish(0, 1)
    cells = [int(i) * 8 for i in base.view(torch.int64).eq(1).nonzero()]
    assert len(cells) == 2 and all(cell % boards.ROW_ALIGN_BYTES == 0 for cell in cells)
    for view in views:
        view.close()


def test_peers_see_what_was_written_before_it_was_published(either_way: None) -> None:
    rounds, numel = 300, 4096

    def job(index: int, share: AllGatherBytes, parent: Parent) -> str:
        board = NodeBoard.join(index, 2, 2, share)
        regions = map_peer_memory(index, 2, share, SharedHostMemory(numel * 4, "numbers"))
        own, other = (regions[peer].data.view(torch.int32) for peer in (index, 1 - index))

        async def play() -> None:
            for number in range(1, rounds + 1):
                own.fill_(number)
                board.publish(0, number)
                await board.wait_for_peer(1 - index, 0, number, deadline_seconds=SECONDS)
                assert bool((other == number).all())
                board.publish(1, number)
                await board.wait_for_all(1, number, deadline_seconds=SECONDS)

        asyncio.run(play())
        assert board.is_reached_by_all(0, rounds) and not board.is_reached_by_all(0, rounds + 1)
        names = [board.peer_name(peer) for peer in range(2)]
        assert names[index] == f"peer {index} (pid {os.getpid()})"
        share(b"")
        board.close()
        board.close()
        for region in regions:
            region.close()
        return names[0] + names[1]

    assert len(set(all_run(2, job))) == 1


def test_waiting_lets_other_tasks_run_and_urges() -> None:
    first, second = alone(2, 1)
    urged: list[int] = []

    def urge() -> None:
        urged.append(second.read(0, 0))
        if len(urged) == 5:
            first.publish(0, 7)

    async def play() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await second.wait_for_peer(0, 0, 7, deadline_seconds=SECONDS, on_pause=urge)
        task.cancel()
        return turns

    assert asyncio.run(play()) > 5
    assert urged == [0] * 5
    asyncio.run(second.wait_for_peer(0, 0, 7, deadline_seconds=0, on_pause=lambda: pytest.fail("it is there already")))
    for view in (first, second):
        view.close()


def test_a_deadline_names_the_peer_what_was_awaited_and_how_far_it_is() -> None:
    views = alone(3, 2)
    views[0].publish(1, 5)
    views[2].publish(1, 3)
    files = open_files()

    async def one() -> None:
        await views[0].wait_for_peer(2, 1, 5, what="weights of step 5", deadline_seconds=0.01)

    async def everybody() -> None:
        await views[1].wait_for_all(1, 5, deadline_seconds=0.01)

    with pytest.raises(
        WatchdogError, match=r"weights of step 5: expected 5, but after 0.01 s peer 2 \(pid \d+\) is at 3"
    ):
        asyncio.run(one())
    with pytest.raises(
        WatchdogError, match=r"column 1 to reach 5: expected 5, but .* peer 1 .* is at 0, peer 2 .* is at 3"
    ):
        asyncio.run(everybody())
    assert open_files() == files
    for view in views:
        view.close()


def test_a_peer_that_died_is_named_at_once_but_what_it_had_published_counts() -> None:
    def dies(index: int, share: AllGatherBytes, parent: Parent) -> None:
        board = NodeBoard.join(index, 3, 1, share)
        board.publish(0, 2)
        parent.tell("published")
        parent.receive()

    def waits(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        board = NodeBoard.join(index, 3, 1, share)
        parent.tell("joined")
        parent.receive()
        asyncio.run(board.wait_for_peer(1, 0, 2, deadline_seconds=SECONDS))
        assert 1 in board.dead_peers()  # the other one that waits may have ended too
        try:
            asyncio.run(board.wait_for_peer(1, 0, 3, what="its third", deadline_seconds=600))
        except PeerError as error:
            return str(error), error.peers
        return None

    with running([waits, dies, waits]) as peers:
        for peer in peers:
            peer.receive()
        peers[1].kill()
        for peer in (peers[0], peers[2]):
            peer.send("go on")
        for peer in (peers[0], peers[2]):
            text, who = peer.receive()
            assert who == (1,)
            assert text == f"waiting for its third: expected 3, but peer 1 (pid {peers[1].process.pid}) ended at 2"


def test_without_lifelines_a_dead_peer_costs_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        if index == 1:
            monkeypatch.setattr(boards, "_own_pidfd", list)  # a kernel without pidfds
        files = open_files()
        board = NodeBoard.join(index, 2, 1, share)
        board.publish(0, 1)
        asyncio.run(board.wait_for_all(0, 1, deadline_seconds=SECONDS))
        assert board.dead_peers() == []
        board.close()
        assert open_files() == files
        return "fine"

    assert all_run(2, job) == ["fine", "fine"]


def test_a_board_that_cannot_be_made_is_an_error_on_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        if index == 0:
            monkeypatch.setattr(boards, "_try_make_memory", lambda nbytes: BudgetError("board: no memory"))
        files = open_files()
        try:
            NodeBoard.join(index, 3, 4, share)
        except (BudgetError, PeerError) as error:
            assert open_files() == files
            return type(error).__name__, str(error)

    found = all_run(3, job)
    assert found[0] == ("BudgetError", "board: no memory")
    assert found[1] == found[2] == ("PeerError", "the board: peer 0 could not make it; see the error of peer 0")


def test_boards_of_different_sizes_are_refused() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> str:
        try:
            NodeBoard.join(index, 2, 4 if index == 0 else 900, share).close()
        except StateError as error:
            return str(error)
        return "fine"

    first, second = all_run(2, job)
    assert first == "fine" and "the processes do not agree on what they share" in second


def test_cells_outside_and_a_closed_board_are_refused(either_way: None) -> None:
    (board,) = alone(1, 2)
    for peer, column in ((0, 2), (1, 0), (-1, 0), (0, -1)):
        with pytest.raises(StateError, match=r"board of 1 peers and 2 columns: there is no cell"):
            board.read(peer, column)
    board.close()
    for use in (lambda: board.read(0, 0), lambda: board.publish(0, 1), lambda: board.is_reached_by_all(0, 1)):
        with pytest.raises(StateError, match="the board is closed"):
            use()


def test_machines_that_reorder_stores_need_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_NATIVE", "0")
    monkeypatch.setattr(boards.platform, "machine", lambda: "aarch64")
    region = SharedHostMemory(NodeBoard.nbytes_for(1, 1), "board")
    with pytest.raises(NativeError, match=r"on aarch64 needs the native library: run python -m native.build"):
        NodeBoard(0, 1, 1, region)
    region.close()


@pytest.mark.parametrize("timers", [True, False])
def test_naps_end_and_can_be_cancelled(monkeypatch: pytest.MonkeyPatch, timers: bool) -> None:
    if not timers:
        monkeypatch.setattr(boards, "_timers", lambda: None)
    files = open_files()

    async def play() -> None:
        with Sleeper() as naps:
            for seconds in (0.0, 1e-6, 5e-5, 2e-3):
                await naps.sleep(seconds)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(naps.sleep(600), 0.01)
            await naps.sleep(1e-6)

    asyncio.run(play())
    assert open_files() == files
