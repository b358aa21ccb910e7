"""Decides which units to fetch, to keep and to evict: ints in, decisions out, no unit is touched."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero.plan.plan import Limits

STREAMED_AT_ONCE = 2  # Units that need room besides the pinned ones: one in use, one in flight.
HORIZON = 2  # Times the live limit: so far ahead an eviction looks; units that are needed later are all alike.
MUCH_HOTTER = 2  # A unit that is used more than this many times as often replaces another.


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """Units to evict and units to fetch now: first evict, then fetch.

    `is_complete`: after that every predicted unit is on the device.
    """

    evict: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()
    is_complete: bool = False


def choose_victims(
    unit: int,
    resident: Iterable[int],
    pinned: Callable[[int], bool],
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
        (u for u in resident if not pinned(u)), key=lambda u: next_use.get(u, len(upcoming)), reverse=True
    )
    return _enough(candidates, excess, numel)


def _enough(units: Iterable[int], needed_numel: int, numel: Mapping[int, int]) -> tuple[int, ...] | None:
    """The first units that have `needed_numel` elements together; None: all have fewer."""
    chosen: list[int] = []
    for unit in units:
        if needed_numel <= 0:
            break
        chosen.append(unit)
        needed_numel -= numel[unit]
    return tuple(chosen) if needed_numel <= 0 else None


def plan_prefetch(
    resident: Iterable[int],
    pinned: Callable[[int], bool],
    upcoming: Iterable[int],
    numel: Mapping[int, int],
    limits: Limits,
) -> PrefetchPlan:
    """Fetches worth starting now, and the evictions they need.

    If there is room, one unit is always in flight ahead of its use. Further units are fetched until the look-ahead is
    full. A unit is evicted for another only if it is needed later than the other. `upcoming` is read as far as needed:
    there may be thousands of units, and a decision is made at each use.
    """
    present = dict.fromkeys(resident)  # a set that keeps the order
    free_numel = limits.live_numel_max - sum([numel[u] for u in present])
    evict: list[int] = []
    fetch: list[int] = []
    ahead_numel, is_complete = 0, False
    next_use: dict[int, int] = {}
    uses = _first_uses(upcoming, next_use)
    while (unit := next(uses, None)) is not None:
        if unit in present:
            if fetch:
                ahead_numel += numel[unit]
            continue
        if fetch and ahead_numel + numel[unit] > limits.prefetch_numel:
            break
        chosen: tuple[int, ...] | None = ()
        if free_numel < numel[unit]:
            later = [u for u in present if next_use.get(u, math.inf) > next_use[unit] and not pinned(u)]
            if later:
                # From now on `next_use` has every unit that matters.
                uses = iter([*take_until(uses, HORIZON * limits.live_numel_max, numel)])
                later.sort(key=lambda u: next_use.get(u, math.inf), reverse=True)
            chosen = _enough(later, numel[unit] - free_numel, numel)
        if chosen is None:
            break
        if fetch:
            ahead_numel += numel[unit]
        evict += chosen
        for other in chosen:
            del present[other]
        fetch.append(unit)
        free_numel += sum(numel[u] for u in chosen) - numel[unit]
    else:
        is_complete = True
    return PrefetchPlan(tuple(evict), tuple(fetch), is_complete)


def _first_uses(upcoming: Iterable[int], next_use: dict[int, int]) -> Iterator[int]:
    """Each unit at its first use, whose position is noted in `next_use`."""
    for position, unit in enumerate(upcoming):
        if unit not in next_use:
            next_use[unit] = position
            yield unit


def is_reused_soon(unit: int, upcoming: Iterable[int], numel: Mapping[int, int], limits: Limits) -> bool:
    """True if the unit stays until its next use: the reuse distance is short, and all units used until then fit too.

    The reuse distance is the number of elements that are used in between; a unit that is used twice counts twice.
    Source: ZeRO-Infinity (arXiv:2104.07857); the key is `stage3_max_reuse_distance`.
    """
    distance_numel, free_numel = 0, limits.live_numel_max - numel[unit]
    between: set[int] = set()
    for other in upcoming:
        if other == unit:
            return True
        distance_numel += numel[other]
        if other not in between:
            between.add(other)
            free_numel -= numel[other]
        if distance_numel > limits.reuse_numel_max or free_numel < 0:
            return False
    return False


def take_until(upcoming: Iterable[int], numel_max: int, numel: Mapping[int, int]) -> Iterator[int]:
    """The uses up to and including the one with which the sum of their elements exceeds `numel_max`."""
    total = 0
    for unit in upcoming:
        yield unit
        total += numel[unit]
        if total > numel_max:
            return


def first_positions(upcoming: Iterable[int]) -> dict[int, int]:
    positions: dict[int, int] = {}
    for _ in _first_uses(upcoming, positions):
        pass
    return positions


class HotUnits:
    """The units that stay on the device between the forwards of a generation.

    Every token uses the same units in the same order. For such a cycle the best cache keeps a fixed part and streams
    the others. So a pinned unit stays, and is replaced only by a unit that is used far more often (a unit of the
    decoder replaces one of the encoder, which was pinned first; a popular expert replaces a rare one).

    There may be thousands of units: a use looks at all pinned ones only if it may replace some.

    `numel`: elements of every unit that is fetched and evicted.
    """

    def __init__(self, numel: Mapping[int, int]) -> None:
        self._numel, self._live_numel_max = numel, 0
        self._uses: Counter[int] = Counter()
        self._coldest: list[tuple[int, int]] = []  # Heap of (uses, unit) of pinned units; uses may have grown since.
        self.pinned: set[int] = set()
        self._in_use: set[int] = set()  # Units whose use has not ended.
        self._resident_numel = 0  # Elements of the units that are pinned or in use.
        self._streamed = Counter(numel.values())  # Elements of a unit -> how many such units are not resident.
        self._sizes = sorted(self._streamed, reverse=True)
        self._pinned_by_size: dict[int, set[int]] = {size: set() for size in self._sizes}  # Elements -> units.
        self._numel_of_all = sum(numel.values())
        self.is_active = False  # Inside a generation.

    def begin_generation(self, live_numel_max: int) -> None:
        """`live_numel_max`: elements that may be on the device at once."""
        self._live_numel_max = live_numel_max
        self.is_active = True
        self._uses.clear()
        self._coldest = [(0, unit) for unit in sorted(self.pinned)]

    def shrink(self, live_numel_max: int) -> None:
        """There is less room from now on."""
        self._live_numel_max = live_numel_max

    def end_generation(self) -> frozenset[int]:
        """The generation is over; returns the units that were pinned."""
        pinned = frozenset(self.pinned)
        self.is_active = False
        self._coldest = []
        for unit in pinned | self._in_use:
            self.unpin(unit)
        return pinned

    def note_use(self, unit: int) -> None:
        """A use of the unit begins."""
        if self.is_active:
            self._uses[unit] += 1
            self._set_status(unit, pinned=unit in self.pinned, in_use=True)

    def unpin(self, unit: int) -> None:
        self._set_status(unit, pinned=False, in_use=False)

    def _set_status(self, unit: int, *, pinned: bool, in_use: bool) -> None:
        was_resident = unit in self.pinned or unit in self._in_use
        for group in (self.pinned, self._pinned_by_size[self._numel[unit]]):
            (group.add if pinned else group.discard)(unit)
        (self._in_use.add if in_use else self._in_use.discard)(unit)
        change = (pinned or in_use) - was_resident
        self._resident_numel += change * self._numel[unit]
        self._streamed[self._numel[unit]] -= change

    def try_pin(self, unit: int, in_use: Callable[[int], bool]) -> tuple[int, ...] | None:
        """A use of the unit has ended. Returns the units to evict so that it can stay; None: it does not stay.

        `in_use`: true for a unit that cannot be evicted now.
        """
        if not self.is_active:
            return None
        if unit in self.pinned:
            self._set_status(unit, pinned=True, in_use=False)
            return ()
        # It is on the device, and needs its room until this is decided.
        self._set_status(unit, pinned=False, in_use=True)
        uses, numel = self._uses, self._numel
        colder: list[int] = []
        if MUCH_HOTTER * self._fewest_uses() < uses[unit]:
            colder = [other for other in self.pinned if MUCH_HOTTER * uses[other] < uses[unit] and not in_use(other)]
        evict = self._choose_evictions(sorted(colder, key=lambda other: (uses[other], other)))
        if evict is None:
            # A large unit is worth more than smaller ones: the streamed units then need less room.
            smaller = (other for size in self._sizes if size < numel[unit] for other in self._pinned_by_size[size])
            even = [other for other in smaller if uses[other] <= uses[unit] and not in_use(other)]
            evict = self._choose_evictions(sorted(even, key=lambda other: (numel[other], other)))
            if evict is not None and sum(numel[other] for other in evict) >= numel[unit]:
                evict = None
        self._set_status(unit, pinned=evict is not None, in_use=False)
        if evict is None:
            return None
        heapq.heappush(self._coldest, (uses[unit], unit))
        for other in evict:
            self._set_status(other, pinned=False, in_use=False)
        return tuple(evict)

    def _fewest_uses(self) -> float:
        """Uses of the pinned unit that has the fewest."""
        while self._coldest:
            uses, unit = self._coldest[0]
            if unit not in self.pinned:
                heapq.heappop(self._coldest)
            elif uses < self._uses[unit]:
                heapq.heapreplace(self._coldest, (self._uses[unit], unit))
            else:
                return uses
        return math.inf

    def _choose_evictions(self, candidates: list[int]) -> list[int] | None:
        """The shortest list of first candidates whose eviction lets all others stay; None: evicting all is not enough.

        Units that are not resident are streamed and need room too.
        """
        resident_numel, streamed_numel = self._resident_numel, self._numel_of_all - self._resident_numel
        largest_numel = next((size for size in self._sizes if self._streamed[size]), 0)
        evict: list[int] = []
        while resident_numel + min(STREAMED_AT_ONCE * largest_numel, streamed_numel) > self._live_numel_max:
            if len(evict) == len(candidates):
                return None
            evict.append(candidates[len(evict)])
            evicted_numel = self._numel[evict[-1]]
            resident_numel, streamed_numel = resident_numel - evicted_numel, streamed_numel + evicted_numel
            largest_numel = max(largest_numel, evicted_numel)
        return evict
