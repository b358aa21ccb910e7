"""Whole runs of the pure policy: uses come, the policy loads and lets go, nothing else decides.

Held against the promises of a run (never over the limit, never stuck) and against the cheapest run that any policy
could have made, found by trying all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from zero.cache.policy import choose_victims, is_reused_soon, plan_prefetch
from zero.plan.plan import Limits

UNITS = range(5)
traces = st.lists(st.sampled_from(list(UNITS)), min_size=1, max_size=12)
numels = st.fixed_dictionaries({unit: st.integers(1, 9) for unit in UNITS})
FAR = 10**9


@dataclass
class Run:
    """The schedule's loop, without anything that takes time: what is loaded is there at once."""

    numel: dict[int, int]
    limits: Limits
    resident: list[int] = field(default_factory=list)
    loaded_numel: int = 0
    misses: int = 0
    peak_numel: int = 0

    def over(self, uses: list[int]) -> Run:
        for position, unit in enumerate(uses):
            if unit not in self.resident:
                self.misses += 1
                evict = choose_victims(
                    unit, self.resident, set().__contains__, uses[position:], self.numel, self.limits.live_numel_max
                )
                assert evict is not None, "stuck: a unit that fits on its own found no room"
                self._move(evict, [unit])
            ahead = uses[position + 1 :]
            moves = plan_prefetch(self.resident, {unit}.__contains__, ahead, self.numel, self.limits)
            assert unit not in moves.evict
            self._move(moves.evict, moves.fetch)
            if not is_reused_soon(unit, ahead, self.numel, self.limits):
                self._move([unit], [])
        return self

    def _move(self, evict: Iterable[int], load: Iterable[int]) -> None:
        for unit in evict:
            self.resident.remove(unit)
        for unit in load:
            assert unit not in self.resident
            self.resident.append(unit)
            self.loaded_numel += self.numel[unit]
        live = sum(self.numel[unit] for unit in self.resident)
        assert live <= self.limits.live_numel_max
        self.peak_numel = max(self.peak_numel, live)


def least_loaded(uses: list[int], numel: dict[int, int], live_numel_max: int) -> int:
    """The fewest elements that any policy loads: every set of residents that some choice could have led to."""
    reachable: dict[frozenset[int], int] = {frozenset(): 0}
    for unit in uses:
        following: dict[frozenset[int], int] = {}
        for held, cost in reachable.items():
            others = held - {unit}
            cost += 0 if unit in held else numel[unit]
            for count in range(len(others) + 1):
                for kept in combinations(sorted(others), count):
                    state = frozenset(kept) | {unit}
                    if sum(numel[u] for u in state) <= live_numel_max:
                        following[state] = min(cost, following.get(state, cost))
        reachable = following
    return min(reachable.values())


def limits(live: int, prefetch: int, reuse: int = FAR) -> Limits:
    return Limits(live_numel_max=live, prefetch_numel=prefetch, reuse_numel_max=reuse)


@given(traces, numels, st.integers(0, 30), st.integers(0, 30), st.integers(0, 60))
def test_a_run_is_never_over_the_limit_and_never_stuck(
    uses: list[int], numel: dict[int, int], spare: int, prefetch: int, reuse: int
) -> None:
    """Room for the largest unit is enough; each use finds its unit there, or loads it once."""
    live = max(numel.values()) + spare
    run = Run(numel, limits(live, prefetch, reuse)).over(uses)
    assert run.peak_numel <= live
    assert run.misses <= len(uses)


@given(traces, st.integers(2, 5), st.integers(0, 5))
def test_room_for_the_next_unit_leaves_one_miss_in_a_run(uses: list[int], room: int, prefetch: int) -> None:
    """With units of one size and two of them live, only the first use is not foreseen."""
    run = Run(dict.fromkeys(UNITS, 1), limits(room, prefetch)).over(uses)
    assert run.misses == 1


@settings(max_examples=300)
@given(traces, st.integers(2, 5), st.integers(0, 5))
def test_loading_ahead_costs_at_most_twice_what_the_best_policy_loads(
    uses: list[int], room: int, prefetch: int
) -> None:
    """What is on its way takes a place before it is used; that place is all that foresight may cost."""
    numel = dict.fromkeys(UNITS, 1)
    run = Run(numel, limits(room, prefetch)).over(uses)
    assert run.loaded_numel <= 2 * least_loaded(uses, numel, room)


@settings(max_examples=300)
@given(traces, numels, st.integers(0, 30))
def test_units_of_any_size_are_loaded_at_most_twice_as_much_as_by_the_best_policy(
    uses: list[int], numel: dict[int, int], spare: int
) -> None:
    live = max(numel.values()) + spare
    run = DemandRun(numel, limits(live, 0)).over(uses)
    assert run.loaded_numel <= 2 * least_loaded(uses, numel, live)


@given(traces, st.integers(1, 5))
def test_on_demand_units_of_one_size_cost_what_the_best_policy_pays(uses: list[int], room: int) -> None:
    numel = dict.fromkeys(UNITS, 1)
    assert DemandRun(numel, limits(room, 0)).over(uses).loaded_numel == least_loaded(uses, numel, room)


class DemandRun(Run):
    """Nothing is loaded ahead: what to let go is all that is decided."""

    def over(self, uses: list[int]) -> Run:
        for position, unit in enumerate(uses):
            if unit not in self.resident:
                evict = choose_victims(
                    unit, self.resident, set().__contains__, uses[position:], self.numel, self.limits.live_numel_max
                )
                assert evict is not None
                self._move(evict, [unit])
        return self
