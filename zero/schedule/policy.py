"""Decides which units to fetch and which to evict: pure functions, ints in, decisions out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero.plan.plan import Limits


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
    next_use = _first_positions(upcoming)
    candidates = sorted(
        (u for u in resident if u not in pinned), key=lambda u: next_use.get(u, len(upcoming)), reverse=True
    )
    evict: list[int] = []
    for candidate in candidates:
        if excess <= 0:
            break
        evict.append(candidate)
        excess -= numel[candidate]
    return tuple(evict) if excess <= 0 else None


def plan_prefetch(
    resident: Iterable[int], pinned: set[int], upcoming: Sequence[int], numel: Mapping[int, int], limits: Limits
) -> Moves:
    """Loads worth starting now, and the evictions they need.

    If there is room, one unit is always in flight ahead of its use. Further units are loaded until the look-ahead is
    full. A unit is evicted for another only if it is needed later than the other.
    """
    present = list(resident)
    next_use = _first_positions(upcoming)
    free_numel = limits.live_numel_max - sum(numel[u] for u in present)
    evict: list[int] = []
    load: list[int] = []
    ahead_numel = 0
    for position, unit in enumerate(upcoming):
        if next_use[unit] != position:
            continue  # a later use of the same unit
        if unit in present and unit not in evict:
            if load:
                ahead_numel += numel[unit]
            continue
        if load and ahead_numel + numel[unit] > limits.prefetch_numel:
            break
        victims = sorted(
            (u for u in present if u not in pinned and u not in evict and next_use.get(u, len(upcoming)) > position),
            key=lambda u: next_use.get(u, len(upcoming)),
            reverse=True,
        )
        chosen: list[int] = []
        room = free_numel
        while room < numel[unit] and victims:
            chosen.append(victims.pop(0))
            room += numel[chosen[-1]]
        if room < numel[unit]:
            break
        if load:
            ahead_numel += numel[unit]
        evict += chosen
        load.append(unit)
        free_numel = room - numel[unit]
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


def _first_positions(upcoming: Sequence[int]) -> dict[int, int]:
    positions: dict[int, int] = {}
    for index, unit in enumerate(upcoming):
        positions.setdefault(unit, index)
    return positions
