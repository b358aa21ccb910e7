"""Copies of units whose values were altered for a generation: in use, or parked until its next call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zero.params.binding import UnitBinding
from zero.schedule.loader import Loader
from zero.schedule.policy import HotUnits
from zero.schedule.residency import Residency, UnitOnDevice, UnitState


class AlteredCopies:
    """The part of the coordinator that keeps altered copies. It has the attributes and the three methods below."""

    _units: Residency
    _hot: HotUnits
    _loader: Loader
    _bound: list[UnitBinding]
    _undo: dict[int, list[Callable[[], None]]]
    _parked: set[int]

    def _bring(self, one: UnitOnDevice) -> None:
        raise NotImplementedError

    def _keep_or_release(self, one: UnitOnDevice, upcoming: Iterator[int]) -> None:
        raise NotImplementedError

    def _release(self, one: UnitOnDevice) -> None:
        raise NotImplementedError

    def is_kept(self, index: int) -> bool:
        """True if the values are on the device, and the generation keeps them there: the caller may read them."""
        one = self._units[index]
        if one.state == UnitState.LIVE and index in self._hot.kept and one.arrival is not None:
            self._loader.follow(one.arrival)
            return True
        return False

    def is_parked(self, index: int) -> bool:
        return index in self._parked

    def _keep(self, one: UnitOnDevice) -> bool:
        """Fetch a unit that the generation keeps. False: there is no room for it, or a call or an editor uses it."""
        if one.used or one.state in (UnitState.HOME, UnitState.EDITED):
            return False
        self._bring(one)
        self._hot.used(one.index)
        self._keep_or_release(one, iter(()))
        return one.index in self._hot.kept

    def alter(self, index: int, undo: Callable[[], None]) -> bool:
        """Fetch a unit that the generation keeps in a copy of its own, so that its values may be altered there.

        False: there is no such copy, or no room for one. `undo` is called before the copy is released.
        """
        one = self._units[index]
        if not self._keep(one) or one.arrival is None or one.arrival.block is None:
            return False
        self._loader.follow_uses(one.arrival)
        self._undo.setdefault(index, []).append(undo)
        return True

    def drop_altered(self) -> None:
        """Release every altered copy, used or not: a call that raised has left them."""
        for index in [*self._undo]:
            self._release(self._units[index])

    def park_altered(self) -> None:
        """Take the altered copies away from the parameters, and keep them: any other use drops its copy and reads."""
        for index in [*self._undo]:
            one, bound = self._units[index], self._bound[index]
            arrival = one.arrival
            if one.state != UnitState.LIVE or arrival is None or one.stays or bound.has_changes:
                self._release(one)
                continue
            for undo in self._undo.pop(index):
                undo()
            self._loader.unbind(bound, arrival, modified=True)
            self._units.move(one, UnitState.AWAY)
            self._units.move(one, UnitState.COMING, arrival)
            self._parked.add(index)

    def resume_altered(self, index: int, undo: list[Callable[[], None]]) -> bool:
        """Show a parked copy, altered as it is. False: it is gone. `undo`: as for `alter`."""
        one = self._units[index]
        if index not in self._parked or one.used:
            return False
        self._parked.discard(index)
        self._undo[index] = undo
        if not self._keep(one) or one.arrival is None:
            return False
        self._loader.follow_uses(one.arrival)
        return True
