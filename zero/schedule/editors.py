"""Units that an editor has bound to memory of its own, outside what is used and released."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

from zero.schedule.loader import Arrival, Loader


class LendsUnits:
    """Mixed into the coordinator, which leaves alone what an editor has."""

    _arrivals: dict[int, Arrival]
    _live: dict[int, Arrival]
    _held: set[int]
    _loader: Loader

    @abstractmethod
    def _in_use(self) -> set[int]: ...

    @abstractmethod
    def _release(self, index: int) -> None: ...

    @abstractmethod
    def _discard(self, index: int) -> None: ...

    def let_go(self, index: int) -> None:
        """Release the unit if no use of it is open, so that an editor may bind it to memory of its own."""
        self._loader.drain()
        if index in self._arrivals:
            self._discard(index)
        if index in self._live and index not in self._in_use():
            self._release(index)

    def rewritten(self, indices: Collection[int] | None = None, unstored: Collection[int] = ()) -> None:
        """See `Loader.rewritten`."""
        self._loader.rewritten(indices, unstored)

    def hold(self, index: int) -> None:
        """The unit is bound by an editor: uses find it present and leave it alone."""
        self._held.add(index)

    def held(self, index: int) -> bool:
        """True between `hold` and `unhold`."""
        return index in self._held

    def unhold(self, index: int) -> None:
        """The editor is about to unbind the unit."""
        self._held.discard(index)
