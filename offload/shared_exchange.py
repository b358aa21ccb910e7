"""Whole arrays of several processes, of which each needs the same slice of all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch

from offload.board import Board
from offload.descriptors import Share
from offload.errors import StateError
from offload.sharing import SharedRegion

SLOTS = 16


class SharedExchange:
    """Lets every peer read its slice of what all peers have laid down.

    Args:
        board: of 4 * SLOTS columns.
        regions: of each peer.
        part: (index, count) of the slice that this peer reads.
    """

    def __init__(self, board: Board, regions: Sequence[SharedRegion], part: tuple[int, int]) -> None:
        self._board, self._regions, self._part = board, list(regions), part

    @classmethod
    def join(
        cls, index: int, count: int, share: Share, regions: Sequence[SharedRegion], part: tuple[int, int]
    ) -> SharedExchange:
        """Every peer calls this."""
        return cls(Board.join(index, count, 4 * SLOTS, share), regions, part)

    @asynccontextmanager
    async def reduce(self, number: int, offset: int, nbytes: int) -> AsyncIterator[list[torch.Tensor]]:
        """Yields this peer's slice of what each peer laid down under `number`; ends when all have read."""
        board, slot = self._board, 4 * (number % SLOTS)
        board.publish(slot, offset)
        board.publish(slot + 1, nbytes)
        board.publish(slot + 2, number)
        what = f"exchange {number}"
        await board.everybody_reached(slot + 2, number, what=what, deadline_seconds=120)
        sizes = board.read_all(slot + 1)
        if set(sizes) != {nbytes}:
            raise StateError(f"{what}: the peers lay down {sizes} bytes")
        index, count = self._part
        begin, end = index * nbytes // count, (index + 1) * nbytes // count
        yield [
            region.data[at + begin : at + end] for region, at in zip(self._regions, board.read_all(slot), strict=True)
        ]
        board.publish(slot + 3, number)
        await board.everybody_reached(slot + 3, number, what=f"the end of {what}", deadline_seconds=120)

    def close(self) -> None:
        """Idempotent."""
        self._board.close()
