"""Collectives in shared memory: each peer offers its flat gradient and reads its own shard of all peers' gradients.

[Note: who writes where] Nothing is copied before it is summed. A shard is read only by the peers that own it; if this
is a single peer, it may write its sum into the shard while the other peers still read their shards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import NoReturn

import torch

from offload.errors import PeerError, StateError, WatchdogError
from offload.memory.board import NodeBoard
from offload.memory.shared_host_memory import SharedHostMemory

SLOTS = 16  # Default limit of collectives in flight.

# Columns: the collective that this peer offered last; the one it failed in (0: none, LEFT: it has closed).
LATEST, FAILED, COMMON_COLUMNS = 0, 1, 2
LEFT = -1
# Columns of a slot: offset, length and unit of the flat buffer; the number of the collective when offered, when read.
OFFSET, NBYTES, UNIT, OFFERED, READ, SLOT_COLUMNS = 0, 1, 2, 3, 4, 5


class NodeCollectives:
    """Collectives over flat buffers in shared memory, numbered 1, 2, ...; equal on all peers. For one event loop.

    After an error of a collective itself it cannot be used any more, and the other peers learn of the error at once.

    Args:
        board: of `columns(slots)` columns for `slots` collectives in flight; a further one waits. This object owns it
            from now on.
        memories: the memory of each peer's flat buffers, in peer order, mapped in this process; the caller closes them.
        shard: (index, count): this peer reads shard `index` of `count` of every flat buffer.
        deadline_seconds: how long to wait for another peer.
        check: called during waits; an error that it raises ends the wait.
    """

    def __init__(
        self,
        board: NodeBoard,
        memories: Sequence[SharedHostMemory],
        shard: tuple[int, int],
        deadline_seconds: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if len(memories) != board.count or not 0 <= shard[0] < shard[1]:
            raise StateError(
                f"collectives of {board.count} peers: got {len(memories)} memories, and shard {shard[0]} of {shard[1]}"
            )
        self._board, self._memories, self._shard = board, tuple(memories), shard
        self._deadline_seconds, self._check = deadline_seconds, check
        self._slots = slots = (board.columns - COMMON_COLUMNS) // SLOT_COLUMNS
        self._in_flight: set[int] = set()  # Numbers that were entered and are not finished.
        self._next = [number or slots for number in range(slots)]  # Per slot: the number that may use it next.
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._failure: BaseException | None = None
        self._closed = False

    @staticmethod
    def columns(slots: int = SLOTS) -> int:
        """Columns of the board that the collectives need."""
        return COMMON_COLUMNS + slots * SLOT_COLUMNS

    @contextlib.asynccontextmanager
    async def reduce_scatter(
        self, number: int, offset: int, nbytes: int, *, unit: int = 0
    ) -> AsyncIterator[list[torch.Tensor]]:
        """Collective `number`: this peer's flat buffer is bytes [offset, offset + nbytes) of its memory.

        Entering waits until every peer offers its buffer. Leaving waits until every peer has read, so that the memory
        can be reused; it does so even if the block raised. Several collectives may be in flight, and each peer may
        enter them in another order, as long as it enters all.

        Args:
            number: 1, 2, ...; each once.
            offset: where the flat buffer begins in this peer's memory.
            nbytes: of the flat buffer; a multiple of the number of shards, the same on all peers.
            unit: any number that must be the same on all peers.

        Returns:
            On entering: this peer's shard of each peer's flat buffer, uint8 views in peer order, valid inside.

        Raises:
            StateError: the number was used, the flat buffer is not inside the memory, or an earlier collective failed.
            PeerError: a peer has ended, has failed, or offers another unit or length; names the peers.
            WatchdogError: a peer does nothing within the deadline; names it.
        """
        what = f"collective {number} (unit {unit}, {nbytes:,} bytes)"
        try:
            self._enter(number, offset, nbytes)
            await self._offer(number, offset, nbytes, unit)
            await self._wait_for_all(number, OFFERED, f"{what} to be offered")
            shards = self._shards(number, nbytes, unit)
        except BaseException as error:
            self._fail(number, error)
            raise
        try:
            yield shards
        except Exception:
            await self._leave(number, what)  # the error concerns this peer only: the others must still get their shards
            raise
        except BaseException as error:
            self._fail(number, error)
            raise
        await self._leave(number, what)

    def close(self) -> None:
        """Leave: peers that wait for this one learn of it at once. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._failure is None:
                self._board.publish(FAILED, LEFT)
            self._board.close()

    def _enter(self, number: int, offset: int, nbytes: int) -> None:
        self._check_usable(number)
        if number in self._in_flight or number < self._next[number % self._slots]:
            raise StateError(f"collective {number}: numbers begin at 1, and each is used once")
        memory, count = self._memories[self._board.index], self._shard[1]
        if nbytes % count or not (offset >= 0 and nbytes >= 0 and offset + nbytes <= memory.nbytes):
            raise StateError(
                f"collective {number}: bytes [{offset:,}, {offset + nbytes:,}) have to be a multiple of {count} and "
                f"lie in the shared memory of {memory.nbytes:,}"
            )
        self._in_flight.add(number)

    async def _offer(self, number: int, offset: int, nbytes: int, unit: int) -> None:
        """Publish the offer once its slot is free, when all peers have read the buffer that used the slot before."""
        while self._next[number % self._slots] != number:
            self._waiters[number] = asyncio.get_running_loop().create_future()
            await self._waiters[number]
            self._check_usable(number)
        board = self._board
        for column, value in ((OFFSET, offset), (NBYTES, nbytes), (UNIT, unit), (OFFERED, number)):
            board.publish(self._column(number, column), value)
        board.publish(LATEST, max(number, board.read(board.index, LATEST)))

    async def _leave(self, number: int, what: str) -> None:
        self._board.publish(self._column(number, READ), number)
        try:
            await self._wait_for_all(number, READ, f"{what} to be read")
        except BaseException as error:
            self._fail(number, error)
            raise
        self._in_flight.discard(number)
        self._next[number % self._slots] = next_number = number + self._slots
        self._wake([next_number])

    def _fail(self, number: int, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            with contextlib.suppress(StateError):  # closed meanwhile; `error` is the one that the caller must get
                self._board.publish(FAILED, max(number, 1))
        self._wake(list(self._waiters))

    def _wake(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            waiter = self._waiters.pop(number, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _check_usable(self, number: int) -> None:
        if self._failure is not None:
            raise StateError(f"collective {number}: an earlier one failed: {self._failure}") from self._failure

    async def _wait_for_all(self, number: int, column: int, what: str) -> None:
        try:
            await self._board.wait_for_all(
                self._column(number, column),
                number,
                what=what,
                deadline_seconds=self._deadline_seconds,
                on_pause=partial(self._check_others, self._column(number, column), number),
            )
        except WatchdogError as error:
            raise WatchdogError(f"{error}; last offered by each peer: {self._board.read_all(LATEST)}") from error

    def _check_others(self, column: int, awaited: int) -> None:
        """Raise PeerError if a peer has failed, or has closed before it reached `awaited`; or the error of `check`.

        A peer that failed because the offers differ says so in its own error; here the offers are compared again.
        """
        self._check()
        board = self._board
        numbers = board.read_all(FAILED)  # read first: numbers that a peer published before it closed count
        failed = [
            peer
            for peer, number in enumerate(numbers)
            if number and peer != board.index and not (number == LEFT and board.read(peer, column) >= awaited)
        ]
        if failed:
            offers = self._offers(awaited)
            diverging = [
                peer for peer, offer in enumerate(offers) if offer[0] == awaited and offer != offers[board.index]
            ]
            if offers[board.index][0] == awaited and diverging:
                self._raise_divergence(awaited, offers, diverging)
            ends = {peer: f"stopped in collective {numbers[peer]}" for peer in failed}
            ends |= {peer: "has closed its collectives" for peer in failed if numbers[peer] == LEFT}
            names = ", ".join(f"{self._board.peer_name(peer)} {ends[peer]}" for peer in failed)
            raise PeerError(f"{names}; see the error of that peer", failed)

    def _shards(self, number: int, nbytes: int, unit: int) -> list[torch.Tensor]:
        """This peer's shard of every flat buffer, if all offers are equal."""
        offers, offsets = self._offers(number), self._board.read_all(self._column(number, OFFSET))
        if diverging := [peer for peer, offer in enumerate(offers) if offer != (number, unit, nbytes)]:
            self._raise_divergence(number, offers, diverging)
        index, count = self._shard
        shard_bytes = nbytes // count
        begins = [offset + index * shard_bytes for offset in offsets]
        return [memory.data[begin : begin + shard_bytes] for memory, begin in zip(self._memories, begins, strict=True)]

    def _offers(self, number: int) -> list[tuple[int, int, int]]:
        """(collective, unit, bytes) in the collective's slot, for each peer."""
        columns = (self._board.read_all(self._column(number, column)) for column in (OFFERED, UNIT, NBYTES))
        return list(zip(*columns, strict=True))

    def _raise_divergence(self, number: int, offers: Sequence[tuple[int, int, int]], peers: list[int]) -> NoReturn:
        table = "; ".join(
            f"{self._board.peer_name(peer)}: collective {offered}, unit {unit}, {nbytes:,} bytes"
            for peer, (offered, unit, nbytes) in enumerate(offers)
        )
        raise PeerError(f"collective {number}: the peers run different collectives: {table}", peers)

    def _column(self, number: int, column: int) -> int:
        return COMMON_COLUMNS + number % self._slots * SLOT_COLUMNS + column
