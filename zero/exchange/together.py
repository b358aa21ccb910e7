"""Work that all ranks do together: if one rank fails, all ranks fail, so none continues alone or waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from offload.errors import DamagedError, StateError, StorageError, ZeroInfinityError
from zero.exchange.exchange import Exchange

T = TypeVar("T")
GOOD, FAILED = b"\0", b"\1"


class Together:
    """Work of all ranks. If one rank fails, it raises its own error, and other ranks raise an error that names it.

    Attributes:
        keeps: kinds of errors that other ranks raise as the same kind. All ranks must know that a checkpoint is
            damaged, even if they have an error of their own, so that all can take another one.
        otherwise: the kind that other ranks raise for all other errors.
    """

    keeps: tuple[type[ZeroInfinityError], ...] = (DamagedError,)
    otherwise: type[ZeroInfinityError] = StateError

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.placement = exchange, exchange.placement
        self.is_first = exchange.placement.rank == 0

    def do(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on every rank. Raises as `exchange`."""
        try:
            result = action()
        except Exception as failure:  # after any error the other ranks must not wait for this one
            self.exchange(what, failure=failure)
            raise
        self.exchange(what)
        return result

    def first(self, what: str, action: Callable[[], T]) -> T | None:
        """As `do`, but only the first rank runs `action`; None on the others."""
        return self.do(what, action if self.is_first else lambda: None)

    def exchange(self, what: str, payload: bytes = b"", failure: Exception | None = None) -> list[bytes]:
        """Every rank's payload, in rank order.

        Raises ZeroInfinityError: a rank has failed; names the rank and the reason. This rank's own failure is raised
        unchanged.

        Args:
            what: the same words on every rank.
            payload: any bytes.
            failure: the error of this rank, if it has failed.
        """
        answers = self._exchange.agree(what, GOOD + payload if failure is None else FAILED + self._told(failure))
        told = {rank: json.loads(answer[1:]) for rank, answer in enumerate(answers) if answer[:1] == FAILED}
        if not told:
            return [answer[1:] for answer in answers]
        error = self._heard(what, told)
        if failure is None or (isinstance(error, DamagedError) and not isinstance(failure, DamagedError)):
            raise error from failure
        raise failure

    def _told(self, failure: Exception) -> bytes:
        kind = next((kind.__name__ for kind in self.keeps if isinstance(failure, kind)), None)
        place = [failure.errno, failure.path, failure.offset] if isinstance(failure, StorageError) else None
        return json.dumps([kind, f"{type(failure).__name__}: {failure}", place]).encode()

    def _heard(self, what: str, told: dict[int, tuple[str | None, str, tuple[int, str, int] | None]]) -> Exception:
        ranks = "; ".join(f"rank {rank} has failed ({text})" for rank, (_, text, _) in told.items())
        said = f"{what} ends with an error of another rank: {ranks}"
        kept = {name: place for name, _, place in told.values()}
        kind = next((kind for kind in self.keeps if kind.__name__ in kept), self.otherwise)
        place = kept.get(kind.__name__)
        if kind is StorageError and place is not None:
            errno, path, offset = place
            return StorageError(said, errno=errno, path=path, offset=offset, free_bytes=None)
        return kind(said)


class Relay(Together):
    """As `Together`, for work in many pieces: the next `exchange` reports the failure of a piece."""

    keeps = (StorageError,)
    _failure: Exception | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """The next `exchange` raises a failure inside this context on all ranks; a rank alone raises it at once."""
        try:
            yield
        except (ZeroInfinityError, OSError, MemoryError) as error:
            self._failure = self._failure or error
            if self.placement.alone:
                raise

    @property
    def failed(self) -> bool:
        """True once this rank's own work has failed."""
        return self._failure is not None

    def exchange(self, what: str, payload: bytes = b"", failure: Exception | None = None) -> list[bytes]:
        return super().exchange(what, payload, failure or self._failure)
