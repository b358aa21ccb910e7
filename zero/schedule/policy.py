"""Decides which units to fetch, to keep and to evict: ints in, decisions out, no unit is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero.plan.plan import Limits

STREAMED_AT_ONCE = 2  # Units that need room besides the kept ones: one in use, one in flight.
MUCH_HOTTER = 2  # A unit that is used more than this many times as often replaces another.


@dataclass(frozen=True, slots=True)
class Moves:
    """Units to evict and units to load now: first evict, then load."""

    evict: tuple[int, ...] = ()
    load: tuple[int, ...] = ()


def make_room(
    unit: int,
    resident: Iterable[int],
    pinned: set[int],
    upcoming: Sequence[int],
    numel: Mapping[int, int],
    live_numel_max: int,
) -> tuple[int, ...] | None:
    """Units to evict so that `unit` fits; None if it cannot fit.

    The unit whose next use is furthest away is evicted first; units without a known use before all others (Belady).
    """
    resident = list(resident)
    excess = sum(numel[u] for u in resident) + numel[unit] - live_numel_max
    next_use = first_positions(upcoming)
    candidates = sorted(
        (u for u in resident if u not in pinned), key=lambda u: next_use.get(u, len(upcoming)), reverse=True
    )
    return _enough(candidates, excess, numel)


def _enough(units: Iterable[int], needed_numel: int, numel: Mapping[int, int]) -> tuple[int, ...] | None:
    """The first units that have `needed_numel` elements together; None: all have fewer."""
    found: list[int] = []
    for unit in units:
        if needed_numel <= 0:
            break
        found.append(unit)
        needed_numel -= numel[unit]
    return tuple(found) if needed_numel <= 0 else None


def plan_prefetch(
    resident: Iterable[int], pinned: set[int], upcoming: Sequence[int], numel: Mapping[int, int], limits: Limits
) -> Moves:
    """Loads worth starting now, and the evictions they need.

    If there is room, one unit is always in flight ahead of its use. Further units are loaded until the look-ahead is
    full. A unit is evicted for another only if it is needed later than the other.
    """
    present = list(resident)
    there, next_use = set(present), first_positions(upcoming)  # there may be thousands
    free_numel = limits.live_numel_max - sum(numel[u] for u in present)
    evict: list[int] = []
    load: list[int] = []
    ahead_numel = 0
    for position, unit in enumerate(upcoming):
        if next_use[unit] != position:
            continue  # a later use of the same unit
        if unit in there:
            if load:
                ahead_numel += numel[unit]
            continue
        if load and ahead_numel + numel[unit] > limits.prefetch_numel:
            break
        chosen: tuple[int, ...] | None = ()
        if free_numel < numel[unit]:
            movable = (u for u in present if u in there and u not in pinned)
            later = [u for u in movable if next_use.get(u, len(upcoming)) > position]
            later.sort(key=lambda u: next_use.get(u, len(upcoming)), reverse=True)
            chosen = _enough(later, numel[unit] - free_numel, numel)
        if chosen is None:
            break
        if load:
            ahead_numel += numel[unit]
        evict += chosen
        there.difference_update(chosen)
        load.append(unit)
        free_numel += sum(numel[u] for u in chosen) - numel[unit]
    return Moves(tuple(evict), tuple(load))


def reuse_distance(unit: int, upcoming: Iterable[int], numel: Mapping[int, int]) -> int | None:
    """Elements used before the next use of `unit`; None if no such use is foreseen.

    Source: ZeRO-Infinity (arXiv:2104.07857); the key is `stage3_max_reuse_distance`.
    """
    distance_numel = 0
    for other in upcoming:
        if other == unit:
            return distance_numel
        distance_numel += numel[other]
    return None


def until(upcoming: Iterable[int], numel_max: int, numel: Mapping[int, int]) -> Iterator[int]:
    """The uses up to and including the one with which the sum of their elements exceeds `numel_max`."""
    total = 0
    for unit in upcoming:
        yield unit
        total += numel[unit]
        if total > numel_max:
            return


def first_positions(upcoming: Sequence[int]) -> dict[int, int]:
    positions: dict[int, int] = {}
    for index, unit in enumerate(upcoming):
        positions.setdefault(unit, index)
    return positions


class HotUnits:
    """The units that stay on the device between the forwards of a generation.

    Every token uses the same units in the same order. For such a cycle the best cache keeps a fixed part and streams
    the rest. So a kept unit stays, and gives way only to a unit that is used far more often (a unit of the decoder
    replaces one of the encoder, which was kept first; a popular expert replaces a rare one).

    `numel`: elements of every unit that is fetched and released.
    """

    def __init__(self, numel: Mapping[int, int]) -> None:
        self._numel, self._live_numel_max = numel, 0
        self._uses: Counter[int] = Counter()
        self.kept: set[int] = set()
        self.on = False  # Inside a generation.

    def begin(self, live_numel_max: int) -> None:
        """`live_numel_max`: elements that may be on the device at once."""
        self._live_numel_max = live_numel_max
        self.on = True
        self._uses.clear()

    def shrink(self, live_numel_max: int) -> None:
        """There is less room from now on."""
        self._live_numel_max = live_numel_max

    def end(self) -> frozenset[int]:
        """The generation is over; returns the units that were kept."""
        kept = frozenset(self.kept)
        self.on = False
        self.kept.clear()
        return kept

    def used(self, unit: int) -> None:
        if self.on:
            self._uses[unit] += 1

    def forget(self, unit: int) -> None:
        self.kept.discard(unit)

    def offer(self, unit: int, in_use: Collection[int]) -> tuple[int, ...] | None:
        """A use of the unit has ended. Returns the units to release so that it can stay; None: it does not stay.

        `in_use`: units that cannot be released now.
        """
        if not self.on:
            return None
        if unit in self.kept:
            return ()
        movable = [other for other in self.kept if other not in in_use]
        colder = [other for other in movable if self._uses[unit] > MUCH_HOTTER * self._uses[other]]
        leave = self._to_make_room(unit, in_use, sorted(colder, key=lambda other: self._uses[other]))
        if leave is None:
            # A large unit is worth more than smaller ones: the streamed units then need less room.
            even = [other for other in movable if self._uses[unit] >= self._uses[other]]
            leave = self._to_make_room(unit, in_use, sorted(even, key=lambda other: (self._numel[other], other)))
            if leave is None or sum(self._numel[other] for other in leave) >= self._numel[unit]:
                return None
        self.kept.add(unit)
        self.kept.difference_update(leave)
        return tuple(leave)

    def _to_make_room(self, unit: int, in_use: Collection[int], candidates: list[int]) -> list[int] | None:
        """The shortest list of first candidates whose release lets the unit stay; None: releasing all is not enough."""
        held = {unit, *self.kept, *in_use}
        held_numel = sum(self._numel[other] for other in held)
        rest_numel = sum(self._numel.values()) - held_numel
        largest_numel = max((n for other, n in self._numel.items() if other not in held), default=0)
        leave: list[int] = []
        # Units that are not held are streamed and need room too.
        while held_numel + min(STREAMED_AT_ONCE * largest_numel, rest_numel) > self._live_numel_max:
            if len(leave) == len(candidates):
                return None
            leave.append(candidates[len(leave)])
            given_up_numel = self._numel[leave[-1]]
            held_numel, rest_numel = held_numel - given_up_numel, rest_numel + given_up_numel
            largest_numel = max(largest_numel, given_up_numel)
        return leave
