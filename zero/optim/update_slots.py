"""Who may update now, and in which memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from offload.memory.arena import Block
from zero.optim.lent_gradients import SpareGradients

WRITES_IN_FLIGHT = 2
"""Records written at once where others can wait: enough to keep a disk busy, and reads come first."""


class Places:
    """Admits updates in the order in which they ask.

    Args:
        slots: how many may use memory of the arena.
        spare: what further ones use.

    Attributes:
        slots: whoever updates a sub-group in memory of the arena holds one.
        writes: whoever writes a record holds one.
    """

    def __init__(self, slots: int, spare: SpareGradients) -> None:
        self._spare = spare
        self._turn = asyncio.Lock()
        self.slots = asyncio.Semaphore(slots)
        self.writes = asyncio.Semaphore(WRITES_IN_FLIGHT if spare.lends else slots)

    @asynccontextmanager
    async def take(self, nbytes: int) -> AsyncIterator[Block | None]:
        """A place for an update that needs `nbytes` of host memory: lent memory, or None for a slot of the arena."""
        async with self._turn:
            block = self._spare.try_lease(nbytes) if nbytes and self.slots.locked() else None
            if block is None:
                await self.slots.acquire()
        try:
            yield block
        finally:
            if block is None:
                self.slots.release()
            else:
                block.release()
