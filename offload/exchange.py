"""Gradients change hands in shared memory: each peer offers its flat gradient and reads its own slice of everybody's.

[Note: who writes where] Slice i of every flat is read by peer i alone. So peer i may reduce into its own flat's slice
i while the others still read the rest, and nothing is copied before it is added up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

import torch

from offload.board import Board
from offload.errors import PeerError, StateError
from offload.sharing import SharedRegion

SLOTS = 8
"""Collectives in flight at most, unless said otherwise."""
SECONDS_MAX = 300.0

OFFERED, FAILED, SHARED_COLUMNS = 0, 1, 2
"""Columns: how many collectives this peer has offered its flat for, in order; the one it failed in, or 0."""
OFFSET, NBYTES, UNIT, READ, SLOT_COLUMNS = 0, 1, 2, 3, 4
"""Columns of a slot: where the flat is, how long, whose it is; the number of the collective that was read last."""


class SharedExchange:
    """Collectives over flats in shared memory, numbered 1, 2, ... alike on all peers. Used from one event loop.

    After an error the exchange is of no use any more, and the others learn of it at once.

    Args:
        index: number of this peer.
        count: number of peers.
        board: theirs, with `columns(slots)` columns from `first_column` on for this exchange; stays the caller's.
        regions: the memory that each peer's flats lie in, in peer order, as mapped here; stay the caller's.
        slots: collectives in flight at most; a further one waits. The same on all peers.
        first_column: where the columns of this exchange begin.
        deadline_seconds: how long to wait for another peer.
    """

    def __init__(
        self,
        index: int,
        count: int,
        board: Board,
        regions: Sequence[SharedRegion],
        *,
        slots: int = SLOTS,
        first_column: int = 0,
        deadline_seconds: float = SECONDS_MAX,
    ) -> None:
        if (index, count, len(regions)) != (board.index, board.count, board.count):
            raise StateError(
                f"exchange of peer {index} of {count} with {len(regions)} regions: the board is peer {board.index}'s "
                f"of {board.count}"
            )
        self._index, self._count, self._board, self._regions = index, count, board, tuple(regions)
        self._slots, self._first, self._deadline_seconds = slots, first_column, deadline_seconds
        self._entered = 0
        self._turn = asyncio.Lock()
        self._leaving: list[asyncio.Future[None] | None] = [None] * slots
        self._failure: BaseException | None = None

    @staticmethod
    def columns(slots: int = SLOTS) -> int:
        """Columns of the board that an exchange needs."""
        return SHARED_COLUMNS + slots * SLOT_COLUMNS

    @contextlib.asynccontextmanager
    async def reduce(
        self, number: int, offset: int, nbytes: int, *, unit: int = 0
    ) -> AsyncIterator[list[torch.Tensor]]:
        """Collective `number`: this peer's flat is bytes [offset, offset + nbytes) of its region.

        Entering waits until every peer offers its flat; leaving waits until every peer has read, so that the memory
        can be used again. Several may be under way; they are entered in the order of their numbers.

        Args:
            number: 1 more than the last one that was entered.
            offset: where the flat begins in this peer's region.
            nbytes: of the flat, a multiple of the number of peers, and the same on all of them.
            unit: any number that has to be the same on all of them.

        Returns:
            On entering: slice `index` of each peer's flat, uint8 views in peer order, valid inside. The own one may be
            written to.

        Raises:
            StateError: the number is not the next, the flat does not lie in the region, or an earlier one failed.
            PeerError: a peer has ended, has failed, or offers something else; names them.
            WatchdogError: a peer does nothing within the deadline; names it.
        """
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        what = f"collective {number} (unit {unit}, {nbytes:,} bytes)"
        read = self._column(number, READ)
        try:
            self._enter(number, offset, nbytes)
            await self._offer(number, offset, nbytes, unit, left)
            await self._everybody(OFFERED + self._first, number, f"{what} to be offered")
            yield self._slices(number, nbytes, unit)
            self._board.publish(read, number)
            await self._everybody(read, number, f"{what} to be read")
        except BaseException as error:
            if self._failure is None:
                self._failure = error
                self._board.publish(self._first + FAILED, max(number, 1))
            raise
        finally:
            left.set_result(None)

    def _enter(self, number: int, offset: int, nbytes: int) -> None:
        if self._failure is not None:
            raise StateError(f"collective {number}: an earlier one failed: {self._failure}") from self._failure
        if number != self._entered + 1:
            raise StateError(f"collective {number}: the next one is {self._entered + 1}")
        region = self._regions[self._index]
        if nbytes % self._count or not (offset >= 0 and nbytes >= 0 and offset + nbytes <= region.nbytes):
            raise StateError(
                f"collective {number}: bytes [{offset:,}, {offset + nbytes:,}) have to be a multiple of "
                f"{self._count} and lie in the shared memory of {region.nbytes:,}"
            )
        self._entered = number

    async def _offer(self, number: int, offset: int, nbytes: int, unit: int, left: asyncio.Future[None]) -> None:
        """Publish it, after those before it and once its slot is free; it is free again when `left` is done."""
        slot = number % self._slots
        async with self._turn:
            before = self._leaving[slot]
            if before is not None:
                await asyncio.wait([before])
            self._leaving[slot] = left
            if self._failure is not None:
                raise StateError(f"collective {number}: an earlier one failed: {self._failure}") from self._failure
            for column, value in ((OFFSET, offset), (NBYTES, nbytes), (UNIT, unit)):
                self._board.publish(self._column(number, column), value)
            self._board.publish(self._first + OFFERED, number)

    async def _everybody(self, column: int, number: int, what: str) -> None:
        await self._board.everybody_reached(
            column, number, what=what, deadline_seconds=self._deadline_seconds, urge=self._check_others
        )

    def _check_others(self) -> None:
        """Raise PeerError if somebody has given up."""
        numbers = self._board.read_all(self._first + FAILED)
        if failed := [peer for peer, number in enumerate(numbers) if number and peer != self._index]:
            names = ", ".join(f"{self._board.name(peer)} gave up in collective {numbers[peer]}" for peer in failed)
            raise PeerError(f"{names}; its own error says why", failed)

    def _slices(self, number: int, nbytes: int, unit: int) -> list[torch.Tensor]:
        lengths, units = (self._board.read_all(self._column(number, column)) for column in (NBYTES, UNIT))
        if len(set(lengths)) != 1 or len(set(units)) != 1:
            self._diverged(number, list(zip(units, lengths, strict=True)))
        offsets = self._board.read_all(self._column(number, OFFSET))
        own = nbytes // self._count
        begins = [offset + self._index * own for offset in offsets]
        return [region.data[begin : begin + own] for region, begin in zip(self._regions, begins, strict=True)]

    def _diverged(self, number: int, offers: list[tuple[int, int]]) -> NoReturn:
        mine = offers[self._index]
        others = [peer for peer, offer in enumerate(offers) if offer != mine]
        table = "; ".join(
            f"{self._board.name(peer)}: unit {unit}, {nbytes:,} bytes" for peer, (unit, nbytes) in enumerate(offers)
        )
        raise PeerError(f"collective {number}: the peers do not do the same: {table}", others)

    def _column(self, number: int, column: int) -> int:
        return self._first + SHARED_COLUMNS + number % self._slots * SLOT_COLUMNS + column
