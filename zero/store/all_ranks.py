"""Work of all ranks together: if one rank fails, all ranks fail, so none continues alone or waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from offload.errors import DamagedError, StateError, StorageError, ZeroInfinityError
from zero.store.collectives import Collectives

T = TypeVar("T")
GOOD, FAILED = b"\0", b"\1"


class AllRanks:
    """Work of all ranks. If one rank fails, it raises its own error, and other ranks raise an error that names it.

    Attributes:
        shared_errors: kinds of errors that other ranks raise as the same kind. All ranks must know that a checkpoint is
            damaged, even if they have an error of their own, so that all can load another one.
        default_error: the kind that other ranks raise for all other errors.
    """

    shared_errors: tuple[type[ZeroInfinityError], ...] = (DamagedError,)
    default_error: type[ZeroInfinityError] = StateError

    def __init__(self, collectives: Collectives) -> None:
        self._collectives, self.placement = collectives, collectives.placement
        self.is_first = collectives.placement.rank == 0

    def run_on_all(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on every rank. Raises as `all_gather_results`."""
        try:
            result = action()
        except Exception as failure:  # after any error the other ranks must not wait for this one
            self.all_gather_results(what, failure=failure)
            raise
        self.all_gather_results(what)
        return result

    def run_on_first(self, what: str, action: Callable[[], T]) -> T | None:
        """As `run_on_all`, but only the first rank runs `action`; None on the others."""
        return self.run_on_all(what, action if self.is_first else lambda: None)

    def all_gather_results(self, what: str, payload: bytes = b"", failure: Exception | None = None) -> list[bytes]:
        """Every rank's payload, in rank order.

        Raises ZeroInfinityError: a rank has failed; names the rank and the reason. This rank's own failure is raised
        unchanged.

        Args:
            what: the same words on every rank.
            payload: any bytes.
            failure: the error of this rank, if it has failed.
        """
        answers = self._collectives.all_gather_bytes(
            what, GOOD + payload if failure is None else FAILED + self._encode_failure(failure)
        )
        failures = {rank: json.loads(answer[1:]) for rank, answer in enumerate(answers) if answer[:1] == FAILED}
        if not failures:
            return [answer[1:] for answer in answers]
        error = self._decode_failures(what, failures)
        if failure is None or (isinstance(error, DamagedError) and not isinstance(failure, DamagedError)):
            raise error from failure
        raise failure

    def _encode_failure(self, failure: Exception) -> bytes:
        kind = next((kind.__name__ for kind in self.shared_errors if isinstance(failure, kind)), None)
        place = [failure.errno, failure.path, failure.offset] if isinstance(failure, StorageError) else None
        return json.dumps([kind, f"{type(failure).__name__}: {failure}", place]).encode()

    def _decode_failures(
        self, what: str, failures: dict[int, tuple[str | None, str, tuple[int, str, int] | None]]
    ) -> Exception:
        ranks = "; ".join(f"rank {rank} has failed ({text})" for rank, (_, text, _) in failures.items())
        message = f"{what} ends with an error of another rank: {ranks}"
        place_of_kind = {name: place for name, _, place in failures.values()}
        kind = next((kind for kind in self.shared_errors if kind.__name__ in place_of_kind), self.default_error)
        place = place_of_kind.get(kind.__name__)
        if kind is StorageError and place is not None:
            errno, path, offset = place
            return StorageError(message, errno=errno, path=path, offset=offset, free_bytes=None)
        return kind(message)


class DeferringFailures(AllRanks):
    """As `AllRanks`, for work in many pieces: the next `all_gather_results` reports the failure of a piece."""

    shared_errors = (StorageError,)
    _failure: Exception | None = None

    @contextmanager
    def deferring_failure(self) -> Iterator[None]:
        """The next `all_gather_results` raises a failure inside this context on all ranks; a single rank raises it at
        once.
        """
        try:
            yield
        except (ZeroInfinityError, OSError, MemoryError) as error:
            self._failure = self._failure or error
            if self.placement.is_single_rank:
                raise

    @property
    def has_failed(self) -> bool:
        """True once this rank's own work has failed."""
        return self._failure is not None

    def all_gather_results(self, what: str, payload: bytes = b"", failure: Exception | None = None) -> list[bytes]:
        return super().all_gather_results(what, payload, failure or self._failure)
