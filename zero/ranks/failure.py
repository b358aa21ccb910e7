"""Whether the ranks still work together: the first error that says they do not ends it for good."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from offload.errors import PeerError, RankDivergenceError, StateError


class Fate:
    """Of one engine's collectives on this rank. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: list[weakref.WeakMethod[Callable[[BaseException], None]]] = []
        self.failure: BaseException | None = None  # What ended it.
        self.closed = False

    def tell(self, listener: Callable[[BaseException], None]) -> None:
        """Call a bound method when it ends, from whichever thread that is. Its object is not kept alive."""
        self._told.append(weakref.WeakMethod(listener))

    def check(self) -> None:
        """Raises unless all is well."""
        if self.failure is not None:
            raise again(self.failure)
        if self.closed:
            raise StateError("collectives: the engine is closed")

    def end(self, error: BaseException) -> BaseException:
        """All is over because of `error`, unless it is already; returns what it is over for."""
        with self._lock:
            first = self.failure is None
            if first:
                self.failure = error
        if first:
            for reference in self._told:
                if (listener := reference()) is not None:
                    listener(error)
        return self.failure or error


def again(error: BaseException) -> BaseException:
    """The same error for another caller: an exception object carries one traceback."""
    if isinstance(error, RankDivergenceError):
        return type(error)(*error.args)
    return RankDivergenceError(f"the ranks no longer work together since: {type(error).__name__}: {error}")


@contextmanager
def ranks_named(what: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """An error that names peers names ranks too.

    `what`: they do together; `ranks`: peer -> its rank; None: peers have their ranks' numbers.
    """
    try:
        yield
    except PeerError as error:
        lost = [peer if ranks is None else ranks[peer] for peer in error.peers]
        raise PeerError(f"{what} with {', '.join(f'rank {rank}' for rank in lost)}: {error}", lost) from error
