"""Where each unit is: one object per unit, one enum, and a table of the legal moves; and how often units came.

The coordinator is the only writer. Order matters: units are listed in the order in which they entered a state, so that
all ranks make the same choice among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from offload.errors import StateError
from offload.streams import MaybeEvent
from zero.params.layout import Unit
from zero.schedule.loader import Arrival


class UnitState(Enum):
    """State of a unit's values on the device."""

    AWAY = "where its planes keep them"
    COMING = "on their way, or waiting in a block"
    LIVE = "in a block, and its parameters see them"
    EDITED = "in memory of an editor, and its parameters see them"
    HOME = "always there; its parameters look away while a step changes it"


# State -> states that may follow.
MOVES = {
    UnitState.AWAY: {UnitState.COMING, UnitState.EDITED},
    UnitState.COMING: {UnitState.LIVE, UnitState.AWAY},
    UnitState.LIVE: {UnitState.AWAY},
    UnitState.EDITED: {UnitState.AWAY},
    UnitState.HOME: set[UnitState](),
}

RESIDENT = {UnitState.COMING, UnitState.LIVE}  # States that take memory of the pool.


class UnitOnDevice:
    """One unit: where it is, and who uses it.

    Attributes:
        arrival: its values, while it is coming or live.
        forward_uses: open calls of a forward.
        backward_uses: calls that gradients have reached and not passed.
        recomputing: open calls of a recomputation.
        recomputed: a backward has fetched it: it stays until a backward use of it ends, or the whole backward.
        returned: it was used by a recomputing call, and such a call has returned.
        seen: it was read with gradients outside any call: it stays until a backward has ended.
        edited: an editor shows its live values: it stays until the editor is done.
        shown: after the work that has filled the memory of an editor.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.state = UnitState.HOME if unit.persistent else UnitState.AWAY
        self.arrival: Arrival | None = None
        self.forward_uses = self.backward_uses = self.recomputing = 0
        self.recomputed = self.returned = self.seen = self.edited = False
        self.shown: MaybeEvent = None

    @property
    def index(self) -> int:
        return self.unit.index

    @property
    def used(self) -> bool:
        """A call uses it, or a backward waits for it."""
        return bool(self.forward_uses or self.backward_uses or self.recomputed)

    @property
    def stays(self) -> bool:
        """It cannot be evicted."""
        return self.used or self.seen or self.edited

    @property
    def waits(self) -> bool:
        """It was recomputed, and no open call uses it: if it is evicted, gradients will fetch it again."""
        return self.recomputed and not (
            self.forward_uses or self.backward_uses or self.recomputing or self.seen or self.edited
        )


class Residency:
    """All units of one engine. `units`: in model order."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [UnitOnDevice(unit) for unit in units]
        self._listed: dict[UnitState, dict[int, UnitOnDevice]] = {state: {} for state in UnitState}
        for one in self._units:
            self._listed[one.state][one.index] = one
        self.resident_numel = 0  # Elements of all units in RESIDENT states.
        self.departures = 0  # How often a unit has gone away.

    def __getitem__(self, index: int) -> UnitOnDevice:
        return self._units[index]

    def __iter__(self) -> Iterator[UnitOnDevice]:
        return iter(self._units)

    def move(self, one: UnitOnDevice, state: UnitState, arrival: Arrival | None = None) -> None:
        """The unit is in `state` from now on; `arrival` is given if the state is COMING or LIVE.

        Raises StateError: the table has no such move.
        """
        if state not in MOVES[one.state]:
            raise StateError(f"unit {one.unit.name}: cannot go from {one.state.name} to {state.name}")
        del self._listed[one.state][one.index]
        self._listed[state][one.index] = one
        self.resident_numel += one.unit.numel * ((state in RESIDENT) - (one.state in RESIDENT))
        self.departures += state == UnitState.AWAY
        one.state, one.arrival = state, arrival

    def at(self, state: UnitState) -> list[UnitOnDevice]:
        """Units in this state, in the order in which they entered it."""
        return list(self._listed[state].values())

    def resident(self) -> list[int]:
        """Units in RESIDENT states: live ones, then coming ones."""
        return [*self._listed[UnitState.LIVE], *self._listed[UnitState.COMING]]

    def in_use(self) -> set[int]:
        """Live units that cannot be evicted."""
        return {one.index for one in self._listed[UnitState.LIVE].values() if one.stays}

    def movable(self) -> list[int]:
        """Units that can be evicted: those not in use; if there are none, those that only wait for gradients."""
        resident, in_use = self.resident(), self.in_use()
        return [i for i in resident if i not in in_use] or [i for i in resident if self[i].waits]


@dataclass(slots=True)
class FetchCounters:
    """Counters of the fetches and releases of one engine."""

    gathers: int = 0
    gathered_bytes: int = 0
    hits: int = 0  # The unit was on the device when it was used.
    late: int = 0  # The unit was in flight when it was used.
    misses: int = 0  # The unit was neither there nor in flight when it was used.
    releases: Counter[int] = field(default_factory=Counter)
    expert_row_bytes: int = 0  # The part of `gathered_bytes` for rows of packed experts that were fetched alone.
    whole_experts: Counter[int] = field(default_factory=Counter)  # How often packed experts were fetched whole.
    live_numel_peak: int = 0

    def note_fetch(self, nbytes: int, live_numel: int) -> None:
        """So many bytes were fetched, and then so many elements were live."""
        self.gathers += 1
        self.gathered_bytes += nbytes
        self.live_numel_peak = max(self.live_numel_peak, live_numel)
