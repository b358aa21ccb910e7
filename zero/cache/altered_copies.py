"""Copies of units whose values were altered for a generation: in use, or parked until the next call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from zero.cache.policy import HotUnits
from zero.cache.residency import Residency, UnitEntry, UnitState
from zero.cache.unit_fetcher import UnitFetcher
from zero.params.binding import UnitBinding


class AlteredValues(Protocol):
    """Values that a copy has been altered for."""

    def undo(self) -> None:
        """The copy is about to be evicted: the values are to be used without it."""


class AlteredCopies:
    """The part of the coordinator that keeps altered copies. It has the attributes and the three methods below."""

    _units: Residency
    _hot: HotUnits
    _fetcher: UnitFetcher
    _bindings: list[UnitBinding]
    _altered: dict[int, list[AlteredValues]]
    _parked: set[int]

    def _fetch_and_bind(self, entry: UnitEntry) -> None:
        raise NotImplementedError

    def _keep_or_evict(self, entry: UnitEntry, upcoming: Iterator[int]) -> None:
        raise NotImplementedError

    def _evict_bound(self, entry: UnitEntry) -> None:
        raise NotImplementedError

    def is_pinned_for_generation(self, index: int) -> bool:
        """True if the values are on the device, and the generation pins them there: the caller may read them."""
        entry = self._units[index]
        if entry.state == UnitState.BOUND and index in self._hot.pinned and entry.arrival is not None:
            self._fetcher.use_on_current_stream(entry.arrival)
            return True
        return False

    def is_parked(self, index: int) -> bool:
        return index in self._parked

    def _fetch_for_generation(self, entry: UnitEntry) -> bool:
        """Fetch and pin a unit for the generation. False: there is no room for it, or a call or an editor uses it."""
        if entry.is_in_use or entry.state in (UnitState.PERSISTENT, UnitState.EDITED):
            return False
        self._fetch_and_bind(entry)
        self._hot.note_use(entry.index)
        self._keep_or_evict(entry, iter(()))
        return entry.index in self._hot.pinned

    def fetch_to_alter(self, index: int, values: AlteredValues) -> bool:
        """Fetch a unit, and pin it for the generation in a copy whose values may be altered.

        False: there is no such copy, or no room for one. `values.undo` is called before the copy is evicted.
        """
        entry = self._units[index]
        if not self._fetch_for_generation(entry) or entry.arrival is None or entry.arrival.block is None:
            return False
        self._fetcher.wait_for_uses(entry.arrival)
        self._altered.setdefault(index, []).append(values)
        return True

    def drop_altered(self) -> None:
        """Evict every altered copy, used or not: a call that raised has left them."""
        for index in [*self._altered]:
            self._evict_bound(self._units[index])

    def park_altered(self) -> None:
        """Unbind the altered copies and keep them: any use but `resume_altered` drops the copy and fetches the unit."""
        for index in [*self._altered]:
            entry, binding = self._units[index], self._bindings[index]
            arrival = entry.arrival
            if entry.state != UnitState.BOUND or arrival is None or entry.is_pinned or binding.has_changes:
                self._evict_bound(entry)
                continue
            for values in self._altered.pop(index):
                values.undo()
            self._fetcher.unbind(binding, arrival, modified=True)
            self._units.move(entry, UnitState.EVICTED)
            self._units.move(entry, UnitState.IN_FLIGHT, arrival)
            self._parked.add(index)

    def resume_altered(self, index: int, values: Sequence[AlteredValues]) -> bool:
        """Show a parked copy, altered as it is. False: it is gone. `values`: as for `fetch_to_alter`."""
        entry = self._units[index]
        if index not in self._parked or entry.is_in_use:
            return False
        self._parked.discard(index)
        self._altered[index] = list(values)
        if not self._fetch_for_generation(entry) or entry.arrival is None:
            return False
        self._fetcher.wait_for_uses(entry.arrival)
        return True
