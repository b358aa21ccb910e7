"""Where each unit is: one object per unit, one enum, a table of the legal moves, and counters of the fetches.

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
from zero.cache.unit_fetcher import Arrival
from zero.params.layout import Unit


class UnitState(Enum):
    """State of a unit's values on the device."""

    EVICTED = "in its tiered arrays"
    IN_FLIGHT = "in flight, or waiting in a block"
    BOUND = "in a block, and its parameters see them"
    EDITED = "in memory of an editor, and its parameters see them"
    PERSISTENT = "always there; its parameters are unbound while a step changes it"


# State -> states that may follow.
TRANSITIONS = {
    UnitState.EVICTED: {UnitState.IN_FLIGHT, UnitState.EDITED},
    UnitState.IN_FLIGHT: {UnitState.BOUND, UnitState.EVICTED},
    UnitState.BOUND: {UnitState.EVICTED},
    UnitState.EDITED: {UnitState.EVICTED},
    UnitState.PERSISTENT: set[UnitState](),
}

RESIDENT = {UnitState.IN_FLIGHT, UnitState.BOUND}  # States that take memory of the pool.


class UnitEntry:
    """One unit: where it is, and who uses it.

    Attributes:
        arrival: its values, while it is in flight or bound.
        forward_uses: open calls of a forward.
        backward_uses: calls that gradients have reached and not passed.
        recomputing: open calls of a recomputation.
        is_recomputed: a backward has fetched it: it stays until a backward use of it ends, or the backward itself.
        has_recompute_returned: it was used by a recomputing call, and such a call has returned.
        is_read_for_backward: it was read with gradients outside any call: it stays until a backward has ended.
        is_edited: an editor works on its bound values: it stays until the editor is done.
        edit_event: after the work that has filled the memory of an editor.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.state = UnitState.PERSISTENT if unit.persistent else UnitState.EVICTED
        self.arrival: Arrival | None = None
        self.forward_uses = 0
        self.backward_uses = 0
        self.recomputing = 0
        self.is_recomputed = False
        self.has_recompute_returned = False
        self.is_read_for_backward = False
        self.is_edited = False
        self.edit_event: MaybeEvent = None

    @property
    def index(self) -> int:
        return self.unit.index

    @property
    def is_in_use(self) -> bool:
        """A call uses it, or a backward waits for it."""
        return bool(self.forward_uses or self.backward_uses or self.is_recomputed)

    @property
    def is_pinned(self) -> bool:
        """It stays; only a unit that merely `awaits_gradients` may be evicted to make room."""
        return self.is_in_use or self.is_read_for_backward or self.is_edited

    @property
    def awaits_gradients(self) -> bool:
        """It was recomputed, and no open call uses it: if it is evicted, gradients will fetch it again."""
        return self.is_recomputed and not (
            self.forward_uses or self.backward_uses or self.recomputing or self.is_read_for_backward or self.is_edited
        )


class Residency:
    """All units of one engine. `units`: in model order."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [UnitEntry(unit) for unit in units]
        self._by_state: dict[UnitState, dict[int, UnitEntry]] = {state: {} for state in UnitState}
        for entry in self._units:
            self._by_state[entry.state][entry.index] = entry
        self.resident_numel = 0  # Elements of all units in RESIDENT states.
        self.evictions = 0  # How often a unit was evicted.

    def __getitem__(self, index: int) -> UnitEntry:
        return self._units[index]

    def __iter__(self) -> Iterator[UnitEntry]:
        return iter(self._units)

    def move(self, entry: UnitEntry, state: UnitState, arrival: Arrival | None = None) -> None:
        """The unit is in `state` from now on; `arrival` is not None if the state is IN_FLIGHT or BOUND.

        Raises StateError: the table has no such move.
        """
        if state not in TRANSITIONS[entry.state]:
            raise StateError(f"unit {entry.unit.name}: cannot go from {entry.state.name} to {state.name}")
        del self._by_state[entry.state][entry.index]
        self._by_state[state][entry.index] = entry
        self.resident_numel += entry.unit.numel * ((state in RESIDENT) - (entry.state in RESIDENT))
        self.evictions += state == UnitState.EVICTED
        entry.state, entry.arrival = state, arrival

    def in_state(self, state: UnitState) -> list[UnitEntry]:
        """Units in this state, in the order in which they entered it."""
        return list(self._by_state[state].values())

    def resident_units(self) -> list[int]:
        """Units in RESIDENT states: bound ones, then those in flight."""
        return [*self._by_state[UnitState.BOUND], *self._by_state[UnitState.IN_FLIGHT]]

    def pinned_units(self) -> set[int]:
        """Bound units that are pinned."""
        return {entry.index for entry in self._by_state[UnitState.BOUND].values() if entry.is_pinned}

    def evictable_units(self) -> list[int]:
        """Units that can be evicted: those not in use; if there are none, those that only wait for gradients."""
        resident, in_use = self.resident_units(), self.pinned_units()
        return [i for i in resident if i not in in_use] or [i for i in resident if self[i].awaits_gradients]


@dataclass(slots=True)
class FetchCounters:
    """Counters of the fetches and evictions of one engine."""

    fetches: int = 0
    gathered_bytes: int = 0
    hits: int = 0  # The unit was on the device when it was used.
    late: int = 0  # The unit was in flight when it was used.
    misses: int = 0  # The unit was neither there nor in flight when it was used.
    evictions: Counter[int] = field(default_factory=Counter)
    expert_row_bytes: int = 0  # The part of `gathered_bytes` for rows of packed experts that were fetched alone.
    whole_experts: Counter[int] = field(default_factory=Counter)  # How often all rows of packed experts were fetched.
    live_numel_peak: int = 0

    def note_fetch(self, nbytes: int, live_numel: int) -> None:
        """So many bytes were fetched, and then so many elements were on the device."""
        self.fetches += 1
        self.gathered_bytes += nbytes
        self.live_numel_peak = max(self.live_numel_peak, live_numel)
