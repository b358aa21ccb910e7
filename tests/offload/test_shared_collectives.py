"""Gradients in shared memory: every peer gets its slice of everybody's flat, and no memory is reused too early."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from peers import Parent, all_run, running

from offload.errors import PeerError, StateError, WatchdogError
from offload.kernels import kernels
from offload.memory.board import NodeBoard
from offload.memory.node_collectives import FAILED, NodeCollectives
from offload.memory.pool import BlockPool
from offload.memory.shared_host_memory import SharedHostMemory, map_peer_memory
from offload.system.descriptors import AllGatherBytes

CPU = torch.device("cpu")
SECONDS = 60.0
REGION_BYTES = 1 << 20


def exchange_of(
    index: int,
    count: int,
    share: AllGatherBytes,
    regions: list[SharedHostMemory],
    part: tuple[int, int],
    slots: int = 4,
    deadline_seconds: float = SECONDS,
) -> NodeCollectives:
    """What every peer makes, all of them together."""
    board = NodeBoard.join(index, count, NodeCollectives.columns(slots), share)
    return NodeCollectives(board, regions, part, deadline_seconds)


class Party:
    """A peer with a region and an exchange."""

    def __init__(
        self, index: int, count: int, share: AllGatherBytes, *, slots: int = 4, deadline_seconds: float = SECONDS
    ) -> None:
        self.index, self.count = index, count
        self.region = SharedHostMemory(REGION_BYTES, "gradients")
        self.regions = map_peer_memory(index, count, share, self.region)
        self.exchange = exchange_of(index, count, share, self.regions, (index, count), slots, deadline_seconds)

    def close(self) -> None:
        self.exchange.close()
        for region in self.regions:
            region.close()


def contribution(seed: int, number: int, peer: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed * 1000 + number) * 10 + peer)
    return torch.randn(numel, generator=generator).to(torch.bfloat16)


async def exchanged(party: Party, seed: int, collectives: int) -> list[torch.Tensor]:
    """Run them, several at a time, with pauses everywhere. What this peer reduced, in order of number."""
    alike, own = random.Random(seed), random.Random(seed * 100 + party.index)
    numels = [party.count * alike.choice([1, 7, 100, 4096, 5000]) for _ in range(collectives)]
    arena = BlockPool("flats", 16 * 4096 * party.count, "knob", CPU, shared=party.region)
    found: list[torch.Tensor] = [torch.empty(0)] * collectives
    leased = [asyncio.Event() for _ in range(collectives + 1)]
    leased[0].set()

    async def pause() -> None:
        if own.random() < 0.5:
            await asyncio.sleep(own.choice([0, 0, 1e-4, 2e-3]))

    async def one(number: int) -> None:
        numel = numels[number - 1]
        await leased[number - 1].wait()  # memory is given in order; else two peers could each lack what the other has
        block = await arena.allocate_async(numel * 2, "flat")
        leased[number].set()
        flat = block.view(torch.bfloat16, numel)
        await pause()
        flat.copy_(contribution(seed, number, party.index, numel))
        offset, nbytes = party.region.offset_of(block.data), block.data.numel()
        async with party.exchange.reduce_scatter(number, offset, nbytes, unit=seed + number) as found_slices:
            slices = [piece.view(torch.bfloat16) for piece in found_slices]
            await pause()
            stored = slices[party.index]  # in place: only this peer reads it
            kernels.reduce_ranks(stored, slices, scale=1 / party.count)
            found[number - 1] = stored.clone()
            await pause()
        block.data.fill_(0xFF)  # who still read it would find NaN
        block.free()

    await asyncio.gather(*(one(number) for number in range(1, collectives + 1)))
    arena.close()
    return found


def expected(seed: int, collectives: int, index: int, count: int) -> list[torch.Tensor]:
    alike, found = random.Random(seed), []
    for number in range(1, collectives + 1):
        numel = count * alike.choice([1, 7, 100, 4096, 5000])
        own = slice(index * numel // count, (index + 1) * numel // count)
        total = torch.zeros(numel // count)
        for peer in range(count):
            total = total + contribution(seed, number, peer, numel)[own].float()
        found.append((total * torch.tensor(1 / count)).to(torch.bfloat16))
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_peer_gets_the_sum_of_its_slices_whatever_the_sizes_and_the_order_of_arrival(count: int) -> None:
    collectives, seeds = 40, range(3)

    def job(index: int, share: AllGatherBytes, parent: Parent) -> int:
        right = 0
        for seed in seeds:
            party = Party(index, count, share, slots=[4, 1, 7][seed])
            found = asyncio.run(exchanged(party, seed, collectives))
            for ours, reference in zip(found, expected(seed, collectives, index, count), strict=True):
                assert torch.equal(ours, reference)
                right += 1
            party.close()
        return right

    assert all_run(count, job) == [collectives * len(seeds)] * count


# ---- failures ----------------------------------------------------------------------------------


def outcome(
    party: Party, play: Callable[[NodeCollectives], Coroutine[Any, Any, None]]
) -> tuple[str, str, tuple[int, ...]]:
    """Kind, text and peers of the error in which `play` ends."""
    try:
        asyncio.run(play(party.exchange))
    except (PeerError, StateError, WatchdogError, ValueError) as error:
        return type(error).__name__, str(error), getattr(error, "peers", ())
    return "", "", ()


async def plain(exchange: NodeCollectives, number: int, nbytes: int = 3 * 64, unit: int = 5) -> None:
    async with exchange.reduce_scatter(number, 0, nbytes, unit=unit):
        pass


def look_when_others_have_failed(exchange: NodeCollectives, count: int) -> None:
    """What this peer waits for next, it looks at once `count` others have given up."""
    board = exchange._board
    reached = board.wait_for_all

    async def late(column: int, value: int, *, on_pause: Callable[[], None], **more: Any) -> None:
        while sum(number > 0 for number in board.read_all(FAILED)) < count:
            await asyncio.sleep(0.01)
        on_pause()
        await reached(column, value, on_pause=on_pause, **more)

    board.wait_for_all = late  # type: ignore[method-assign]


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("what", ["unit", "length"])
def test_peers_that_do_not_do_the_same_are_all_told_who(what: str, late: bool) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        party = Party(index, 3, share)

        async def play(exchange: NodeCollectives) -> None:
            await plain(exchange, 1)
            odd = index == 1
            if odd and late:
                look_when_others_have_failed(exchange, 2)
            await plain(exchange, 2, 3 * (8 if odd and what == "length" else 64), 6 if odd and what == "unit" else 5)

        return outcome(party, play)

    found = all_run(3, job)
    assert [kind for kind, _, _ in found] == ["PeerError"] * 3
    assert [peers for _, _, peers in found] == [(1,), (0, 2), (1,)]
    there = "unit 6, 192 bytes" if what == "unit" else "unit 5, 24 bytes"
    for _, text, _ in found:
        assert text.startswith("collective 2: the peers run different collectives: peer 0 (pid ")
        assert text.count("collective 2, unit 5, 192 bytes") == 2 and text.count(there) == 1


def test_a_peer_that_dies_is_named_by_all_others_at_once() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        party = Party(index, 3, share, deadline_seconds=600)

        async def play(exchange: NodeCollectives) -> None:
            await plain(exchange, 1)
            parent.tell("one is done")
            if index == 1:
                parent.receive()
            await plain(exchange, 2)

        return outcome(party, play)

    with running([job] * 3) as peers:
        for peer in peers:
            assert peer.receive() == "one is done"
        peers[1].kill()
        for peer in (peers[0], peers[2]):
            kind, text, who = peer.receive()
            assert (kind, who) in (("PeerError", (1,)), ("PeerError", (2 if peer is peers[0] else 0,)))
            if who == (1,):
                assert (
                    "collective 2 (unit 5, 192 bytes) to be offered: expected 2, but peer 1 (pid " in text
                    and "ended at 0" in text
                )
            else:
                assert "stopped in collective 2; see the error of that peer" in text


def test_a_peer_that_dies_while_it_reads_is_named_too() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        party = Party(index, 2, share, deadline_seconds=600)

        async def play(exchange: NodeCollectives) -> None:
            async with exchange.reduce_scatter(1, 0, 64):
                if index == 1:
                    parent.tell("reading")
                    parent.receive()

        return outcome(party, play)

    with running([job] * 2) as peers:
        assert peers[1].receive() == "reading"
        peers[1].kill()
        kind, text, who = peers[0].receive()
        assert kind == "PeerError" and who == (1,)
        assert "collective 1 (unit 0, 64 bytes) to be read: expected 1, but peer 1 " in text


def test_an_error_inside_is_its_peers_own_affair() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        party = Party(index, 3, share)

        async def play(exchange: NodeCollectives) -> None:
            async with exchange.reduce_scatter(1, 0, 3 * 8):
                if index == 2:
                    raise ValueError("no room")

        return outcome(party, play), outcome(party, lambda exchange: plain(exchange, 2))

    found = all_run(3, job)
    assert [first for first, _ in found] == [("", "", ()), ("", "", ()), ("ValueError", "no room", ())]
    assert [again for _, again in found] == [("", "", ())] * 3


def test_a_peer_that_gives_up_tells_the_others_and_all_their_exchanges_are_over() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        party = Party(index, 3, share, slots=2, deadline_seconds=600)

        async def play(exchange: NodeCollectives) -> None:
            if index != 2:
                await asyncio.gather(*(plain(exchange, number) for number in range(1, 7)))
            else:
                await plain(exchange, 1)
                await plain(exchange, 1)

        first = outcome(party, play)
        again = outcome(party, lambda exchange: plain(exchange, 7))
        share(b"")
        return first, again

    found = all_run(3, job)
    assert found[2][0] == ("StateError", "collective 1: numbers begin at 1, and each is used once", ())
    for first, _ in found[:2]:
        assert (
            first[0] == "PeerError" and "stopped in collective" in first[1] and "see the error of that peer" in first[1]
        )
    for first, (kind, text, _) in found:
        assert kind == "StateError" and text == f"collective 7: an earlier one failed: {first[1]}"


def test_a_peer_that_does_nothing_is_named_when_the_deadline_passes() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        party = Party(index, 2, share, deadline_seconds=0.05)
        found = outcome(party, lambda exchange: plain(exchange, 1, 64)) if index == 0 else None
        share(b"")
        return found

    kind, text, _ = all_run(2, job)[0]
    assert kind == "WatchdogError"
    assert (
        "collective 1 (unit 5, 64 bytes) to be offered: expected 1, but after 0.05 s peer 1 (pid " in text
        and "is at 0" in text
    )


def test_a_cancelled_collective_ends_the_exchange() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        party = Party(index, 2, share)

        async def play(exchange: NodeCollectives) -> None:
            if index == 1:
                await plain(exchange, 1, 64)
                return
            task = asyncio.create_task(plain(exchange, 1, 64))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            share(b"")
            raise ValueError("cancelled" if task.cancelled() else "not cancelled")

        if index == 1:
            share(b"")
        return outcome(party, play)

    first, second = all_run(2, job)
    assert first[1] == "cancelled"
    assert second[0] == "PeerError" and second[2] == (0,) and "stopped in collective 1" in second[1]


def test_what_a_check_raises_ends_the_wait() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        party = Party(index, 2, share)
        looks: list[int] = []

        def check() -> None:
            looks.append(0)
            if len(looks) == 3:
                raise ValueError("somebody else has failed")

        board = NodeBoard.join(index, 2, NodeCollectives.columns(), share)
        exchange = NodeCollectives(board, party.regions, (index, 2), SECONDS, check)
        party.exchange = exchange
        found = outcome(party, lambda exchange: plain(exchange, 1, 64)) if index == 0 else None
        share(b"")
        return found

    assert all_run(2, job)[0] == ("ValueError", "somebody else has failed", ())


def test_closing_while_one_waits_hides_no_error() -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        party = Party(index, 2, share)

        async def play(exchange: NodeCollectives) -> None:
            task = asyncio.create_task(plain(exchange, 1, 64))
            await asyncio.sleep(0)
            exchange.close()
            await task

        found = outcome(party, play) if index == 0 else None
        share(b"")
        return found

    assert all_run(2, job)[0] == ("StateError", "the board is closed", ())


@pytest.mark.parametrize(
    ("number", "offset", "nbytes", "message"),
    [
        (0, 0, 64, "collective 0: numbers begin at 1, and each is used once"),
        (1, 0, 65, "multiple of 2"),
        (1, -4, 64, r"bytes \[-4, 60\)"),
        (1, REGION_BYTES - 4, 8, "lie in the shared memory of 1,048,576"),
    ],
)
def test_what_cannot_be_offered_is_refused_here_and_known_there(
    number: int, offset: int, nbytes: int, message: str
) -> None:
    def job(index: int, share: AllGatherBytes, parent: Parent) -> Any:
        party = Party(index, 2, share)

        async def play(exchange: NodeCollectives) -> None:
            if index == 0:
                async with exchange.reduce_scatter(number, offset, nbytes):
                    raise AssertionError("entered")
            await plain(exchange, 1, 64)

        found = outcome(party, play)
        share(b"")
        return found

    first, second = all_run(2, job)
    assert first[0] == "StateError"
    with pytest.raises(StateError, match=message):
        raise StateError(first[1])
    assert second[0] == "PeerError" and second[2] == (0,)


def test_an_exchange_has_a_region_for_each_peer_and_a_slice_that_there_is() -> None:
    region = SharedHostMemory(NodeBoard.nbytes_for(1, 90), "board")
    board = NodeBoard(0, 1, 90, region)
    for regions, part in (([region] * 2, (0, 1)), ([region], (1, 1)), ([region], (-1, 1))):
        with pytest.raises(StateError, match=r"collectives of 1 peers: got \d memories, and shard -?\d of 1"):
            NodeCollectives(board, regions, part, SECONDS)
    board.close()


def test_peers_may_read_the_same_slice() -> None:
    """Two groups of two: each slice has two readers."""

    def job(index: int, share: AllGatherBytes, parent: Parent) -> list[list[int]]:
        region = SharedHostMemory(4096, "gradients")
        regions = map_peer_memory(index, 4, share, region)
        exchange = exchange_of(index, 4, share, regions, (index % 2, 2))
        region.data[8:12] = torch.tensor([10 * index, 10 * index, 10 * index + 1, 10 * index + 1])

        async def play() -> list[list[int]]:
            async with exchange.reduce_scatter(1, 8, 4) as slices:
                return [piece.tolist() for piece in slices]

        found = asyncio.run(play())
        exchange.close()
        return found

    assert all_run(4, job) == [[[10 * peer + index % 2] * 2 for peer in range(4)] for index in range(4)]


def test_a_peer_that_has_read_may_leave_while_others_have_not() -> None:
    """Number 0 leaves as soon as it may; number 1 still waits for number 2, and looks who has left meanwhile."""

    def job(index: int, share: AllGatherBytes, parent: Parent) -> list[list[int]]:
        region = SharedHostMemory(4096, "gradients")
        regions = map_peer_memory(index, 3, share, region)
        exchange = exchange_of(index, 3, share, regions, (0, 1))
        region.data[:4] = index

        async def play() -> list[list[int]]:
            found: list[list[int]] = []

            async def one() -> None:
                async with exchange.reduce_scatter(1, 0, 4) as slices:
                    found.extend(piece.tolist() for piece in slices)
                    if index == 2:
                        await asyncio.sleep(0.5)

            if index == 0:  # it publishes that it has read, and is gone before the last one has
                task = asyncio.create_task(one())
                while not found:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.05)
                exchange.close()
                with contextlib.suppress(StateError):
                    await task
            else:
                await one()
            return found

        found = asyncio.run(play())
        exchange.close()
        return found

    assert all_run(3, job) == [[[peer] * 4 for peer in range(3)]] * 3
