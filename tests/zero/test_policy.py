"""The policy's decisions, held against what they promise and against slow models of the same thing."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zero.cache.policy import PrefetchPlan, choose_victims, is_reused_soon, plan_prefetch
from zero.plan.plan import Limits

UNITS = range(7)
units = st.sampled_from(list(UNITS))
numels = st.fixed_dictionaries({unit: st.integers(1, 40) for unit in UNITS})


@st.composite
def situations(draw: Any) -> tuple[list[int], set[int], list[int], dict[int, int], Limits]:
    """Residents that fit, some of them pinned; a future; limits."""
    numel = draw(numels)
    resident = draw(st.lists(units, unique=True, max_size=5))
    pinned = set(draw(st.lists(st.sampled_from(resident), unique=True))) if resident else set()
    upcoming = draw(st.lists(units, max_size=14))
    live = draw(st.integers(max(sum(numel[u] for u in resident), 1), 200))
    return resident, pinned, upcoming, numel, Limits(
        live_numel_max=live, prefetch_numel=draw(st.integers(0, 120)), reuse_numel_max=draw(st.integers(0, 200))
    )  # fmt: skip


def after(resident: list[int], moves: PrefetchPlan) -> list[int]:
    return [unit for unit in resident if unit not in moves.evict] + list(moves.fetch)


def first_use(unit: int, upcoming: list[int]) -> int:
    return upcoming.index(unit) if unit in upcoming else len(upcoming)


@given(situations())
def test_prefetching_never_exceeds_the_live_limit(situation: Any) -> None:
    resident, pinned, upcoming, numel, limits = situation
    moves = plan_prefetch(resident, pinned.__contains__, upcoming, numel, limits)
    assert sum(numel[u] for u in after(resident, moves)) <= limits.live_numel_max


@given(situations())
def test_prefetching_moves_each_unit_once_and_only_where_it_can(situation: Any) -> None:
    resident, pinned, upcoming, numel, limits = situation
    moves = plan_prefetch(resident, pinned.__contains__, upcoming, numel, limits)
    assert len(set(moves.evict)) == len(moves.evict) and len(set(moves.fetch)) == len(moves.fetch)
    assert set(moves.evict) <= set(resident) - pinned
    assert set(moves.fetch) <= set(upcoming)
    assert not set(moves.fetch) & (set(resident) - set(moves.evict))
    assert not set(moves.fetch) & set(moves.evict), "what is wanted back at once must not be evicted"


@given(situations())
def test_nothing_is_evicted_for_something_needed_later(situation: Any) -> None:
    resident, pinned, upcoming, numel, limits = situation
    moves = plan_prefetch(resident, pinned.__contains__, upcoming, numel, limits)
    if moves.evict:
        assert moves.fetch
        latest = max(first_use(unit, upcoming) for unit in moves.fetch)
        assert all(first_use(unit, upcoming) > latest for unit in moves.evict)


@given(situations())
def test_units_are_loaded_in_the_order_of_their_use_and_none_is_skipped(situation: Any) -> None:
    resident, pinned, upcoming, numel, limits = situation
    moves = plan_prefetch(resident, pinned.__contains__, upcoming, numel, limits)
    absent = [u for u in dict.fromkeys(upcoming) if u not in resident]
    assert list(moves.fetch) == absent[: len(moves.fetch)]


@given(situations())
def test_one_unit_is_always_in_flight_if_it_fits(situation: Any) -> None:
    resident, pinned, upcoming, numel, limits = situation
    moves = plan_prefetch(resident, pinned.__contains__, upcoming, numel, limits)
    absent = [u for u in dict.fromkeys(upcoming) if u not in resident]
    if not absent:
        assert moves == PrefetchPlan(is_complete=True)
        return
    wanted = absent[0]
    sooner = {u for u in resident if first_use(u, upcoming) < first_use(wanted, upcoming)}
    must_stay = sum(numel[u] for u in pinned | sooner)
    assert (wanted in moves.fetch) is (must_stay + numel[wanted] <= limits.live_numel_max)


@given(situations())
def test_a_plan_is_complete_if_every_unit_of_the_forecast_is_there_then(situation: Any) -> None:
    resident, pinned, upcoming, numel, limits = situation
    moves = plan_prefetch(resident, pinned.__contains__, upcoming, numel, limits)
    if not moves.evict:
        assert moves.is_complete is (set(upcoming) <= set(after(resident, moves)))


@given(situations())
def test_the_look_ahead_beyond_the_next_unit_is_bounded(situation: Any) -> None:
    resident, pinned, upcoming, numel, limits = situation
    moves = plan_prefetch(resident, pinned.__contains__, upcoming, numel, limits)
    assert sum(numel[u] for u in moves.fetch[1:]) <= limits.prefetch_numel


@given(situations())
def test_a_wider_look_ahead_loads_the_same_and_more(situation: Any) -> None:
    resident, pinned, upcoming, numel, limits = situation
    wide = Limits(live_numel_max=limits.live_numel_max, prefetch_numel=10**9, reuse_numel_max=limits.reuse_numel_max)
    narrow = plan_prefetch(resident, pinned.__contains__, upcoming, numel, limits)
    assert (
        plan_prefetch(resident, pinned.__contains__, upcoming, numel, wide).fetch[: len(narrow.fetch)] == narrow.fetch
    )


@given(situations(), units)
def test_making_room_is_enough_minimal_and_takes_the_furthest_use_first(situation: Any, unit: int) -> None:
    resident, pinned, upcoming, numel, limits = situation
    resident = [u for u in resident if u != unit]
    evict = choose_victims(unit, resident, pinned.__contains__, upcoming, numel, limits.live_numel_max)
    movable = [u for u in resident if u not in pinned]
    live = sum(numel[u] for u in resident) + numel[unit]
    if evict is None:
        assert live - sum(numel[u] for u in movable) > limits.live_numel_max
        return
    assert set(evict) <= set(movable) and len(set(evict)) == len(evict)
    assert live - sum(numel[u] for u in evict) <= limits.live_numel_max
    assert not evict or live - sum(numel[u] for u in evict[:-1]) > limits.live_numel_max, "one too many"
    kept = [u for u in movable if u not in evict]
    for gone in evict:
        assert all(first_use(gone, upcoming) >= first_use(stays, upcoming) for stays in kept)


@given(st.lists(units, min_size=1, max_size=18), st.integers(1, 4))
def test_making_room_misses_as_rarely_as_any_policy_can(uses: list[int], room: int) -> None:
    """With units of one size, evicting the furthest use is optimal: no other choice misses less."""
    numel = dict.fromkeys(UNITS, 1)
    resident: list[int] = []
    misses = 0
    for position, unit in enumerate(uses):
        if unit in resident:
            continue
        misses += 1
        evict = choose_victims(unit, resident, set().__contains__, uses[position:], numel, room)
        assert evict is not None
        resident = [u for u in resident if u not in evict] + [unit]
    assert misses == fewest_misses(uses, room)


def fewest_misses(uses: list[int], room: int) -> int:
    """Every set of residents that some choice could have led to, and its fewest misses."""
    reachable: dict[frozenset[int], int] = {frozenset(): 0}
    for unit in uses:
        following: dict[frozenset[int], int] = {}
        for held, misses in reachable.items():
            if unit in held:
                choices = [(held, misses)]
            elif len(held) < room:
                choices = [(held | {unit}, misses + 1)]
            else:
                choices = [(frozenset(c) | {unit}, misses + 1) for c in combinations(held, room - 1)]
            for state, cost in choices:
                following[state] = min(cost, following.get(state, cost))
        reachable = following
    return min(reachable.values())


@given(units, st.lists(units, max_size=20), numels, st.integers(0, 200), st.integers(40, 200))
def test_a_unit_stays_if_it_is_used_again_soon_and_what_is_used_until_then_fits_too(
    unit: int, upcoming: list[int], numel: dict[int, int], reuse: int, live: int
) -> None:
    limits = Limits(live_numel_max=live, prefetch_numel=0, reuse_numel_max=reuse)
    between = upcoming[: upcoming.index(unit)] if unit in upcoming else []
    near = unit in upcoming and sum(numel[u] for u in between) <= reuse
    fits = sum(numel[u] for u in {unit, *between}) <= live
    assert is_reused_soon(unit, iter(upcoming), numel, limits) is (near and fits)


@given(st.permutations(range(7)), numels, st.integers(0, 40))
def test_as_much_stays_from_forward_to_backward_as_fits(order: list[int], numel: dict[int, int], spare: int) -> None:
    """The units used last need no second load; those used first do."""
    live = max(numel.values()) + spare
    limits = Limits(live_numel_max=live, prefetch_numel=0, reuse_numel_max=2 * live)
    kept = [is_reused_soon(unit, [*order[i + 1 :], *order[::-1]], numel, limits) for i, unit in enumerate(order)]
    assert kept == [sum(numel[unit] for unit in order[i:]) <= live for i in range(len(order))]


class Compared(int):
    """A unit that counts how often units are compared."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return int(self) == other

    __hash__ = int.__hash__


MANY = Limits(live_numel_max=501, prefetch_numel=10, reuse_numel_max=10)


def test_work_grows_with_the_number_of_units_and_not_with_its_square() -> None:
    """There may be thousands of experts, and a decision is made at each use of one."""
    resident, upcoming = ([Compared(unit) for unit in range(500)] for _ in range(2))
    numel = dict.fromkeys(range(600), 1)
    Compared.count = 0
    moves = plan_prefetch(resident, set[int]().__contains__, [*upcoming, Compared(550)], numel, MANY)
    assert moves == PrefetchPlan((), (550,), is_complete=True) and Compared.count < 20 * len(resident)


@given(st.integers(0, 20), st.booleans())
def test_the_forecast_is_read_up_to_the_first_unit_that_finds_no_room(ahead: int, roomy: bool) -> None:
    """What is there is needed sooner, or is in use: no later use could change the decision."""
    resident = [*range(ahead), 90]
    numel = dict.fromkeys(range(100), 1)
    limits = Limits(live_numel_max=len(resident) + 3 * roomy, prefetch_numel=1, reuse_numel_max=10)
    read: list[int] = []
    forecast = (read.append(unit) or unit for unit in range(80))  # type: ignore[func-returns-value]
    moves = plan_prefetch(resident, {90}.__contains__, forecast, numel, limits)
    assert moves == PrefetchPlan((), (ahead, ahead + 1) if roomy else ())
    assert len(read) == ahead + (3 if roomy else 1)
