"""Whose turn it is: collectives are launched by number, whichever job is ready first."""

from __future__ import annotations

import asyncio

from zero.ranks.failure import again


class Order:
    """The next number to be launched, and who waits for theirs. The mover's loop only."""

    def __init__(self) -> None:
        self.next = 0
        self._passed: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._failure: BaseException | None = None

    async def turn(self, number: int) -> None:
        """Return once every smaller number has passed. Raises RankDivergenceError: what `fail` was told."""
        if self._failure is not None:
            raise again(self._failure)
        if number == self.next:
            return
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._waiting[number]
        finally:
            del self._waiting[number]

    def passed(self, number: int) -> None:
        """It is launched, or will never be."""
        self._passed.add(number)
        while self.next in self._passed:
            self._passed.discard(self.next)
            self.next += 1
        follower = self._waiting.get(self.next)
        if follower is not None and not follower.done():
            follower.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Nothing is launched any more; who waits gets `error`."""
        self._failure = error
        for follower in self._waiting.values():
            if not follower.done():
                follower.set_exception(again(error))
