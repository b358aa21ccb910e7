"""What all ranks do, so that what fails on one fails on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from offload.errors import DamagedError, StateError
from zero.exchange.exchange import Exchange

T = TypeVar("T")


class Together:
    """What all ranks do, so that what fails on one fails on all.

    Args:
        exchange: with the other ranks.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.is_first = exchange.placement.rank == 0

    def do(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on every rank; raise if it failed on any.

        Raises:
            DamagedError: a rank has found a checkpoint damaged; on all ranks, so that all can take another one.
            StateError: it failed on another rank; says on which and why.
        """
        error: Exception | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as failed:  # whatever it is, the others must not wait for this rank
            error = failed
        answers = self._exchange.agree(what, b"" if error is None else f"{type(error).__name__}: {error}".encode())
        wrong = [f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers) if answer]
        if not isinstance(error, DamagedError) and any(a.startswith(DamagedError.__name__.encode()) for a in answers):
            raise DamagedError(f"{what}: {'; '.join(wrong)}") from error
        if error is not None:
            raise error
        if wrong:
            raise StateError(f"{what} failed on another rank: {'; '.join(wrong)}")
        return result  # type: ignore[return-value]

    def first(self, what: str, action: Callable[[], T]) -> T | None:
        """As `do`, on the first rank alone; None on the others."""
        if self.is_first:
            return self.do(what, action)
        self.do(what, lambda: None)
        return None
