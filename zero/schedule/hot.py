"""Decides which units stay on the device while a model generates: pure bookkeeping, ints in, decisions out.

Every token uses the same units in the same order. For such a cycle the best cache keeps a fixed part and streams
the rest. So a kept unit stays, and gives way only to a unit that is used far more often (a unit of the decoder
replaces one of the encoder, which was kept first; a popular expert replaces a rare one).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

STREAMED_AT_ONCE = 2  # Units that need room besides the kept ones: one in use, one in flight.
MUCH_HOTTER = 2  # A unit that is used more than this many times as often replaces another.


class HotUnits:
    """The units that stay between the forwards of a generation.

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
