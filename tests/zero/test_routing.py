"""Siblings of which a forward uses some: what is worth fetching, and what comes after them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from zero.cache.access_trace import AccessTrace

GATE, NEXT, LAST = 100, 101, 102
EXPERTS = 64


def forward(trace: AccessTrace, uses: list[int], phase: str = "train") -> tuple[int, int]:
    """(uses foretold just before they came, units foretold that this forward never used)."""
    trace.begin_forward(phase)
    hits, wasted = 0, set()
    for position, unit in enumerate(uses):
        coming = list(trace.upcoming_in_forward(with_backward=False))
        hits += unit in coming[:4]
        wasted.update(other for other in coming if other not in uses[position:])
        trace.use_forward(unit, backward_follows=True)
    trace.end_forward()
    for unit in reversed(uses):
        trace.use_backward(unit)
    trace.end_backward()
    return hits, len(wasted)


def mixture(routed: list[int]) -> list[int]:
    return [GATE, *sorted(routed), NEXT, LAST]


def experts(count: int = EXPERTS) -> dict[int, int]:
    return dict.fromkeys(range(count), 0)


@given(st.integers(1, 20), st.integers(0, 1000))
def test_routed_experts_are_never_fetched_ahead_while_routing_is_random(top_k: int, seed: int) -> None:
    trace, generator = AccessTrace(experts()), random.Random(seed)
    wasted = [forward(trace, mixture(generator.sample(range(EXPERTS), top_k)))[1] for _ in range(60)]
    # An expert that chance has favoured may be guessed for a while.
    assert sum(wasted) <= 0.1 * 60 * top_k


@given(st.integers(0, 1000))
def test_what_follows_the_experts_is_foretold_from_the_second_forward_on(seed: int) -> None:
    trace, generator = AccessTrace(experts()), random.Random(seed)
    forward(trace, mixture(generator.sample(range(EXPERTS), 2)))
    for _ in range(10):
        hits, _ = forward(trace, mixture(generator.sample(range(EXPERTS), 2)))
        assert hits >= 3, "gate, next and last"


def test_experts_that_are_always_used_are_foretold_after_a_while() -> None:
    trace, generator = AccessTrace(experts()), random.Random(3)
    for _ in range(40):
        hits, wasted = forward(trace, mixture([5, 9, generator.randrange(10, EXPERTS)]))
    assert hits == 5 and wasted == 0


def test_two_branches_in_one_list_are_both_foretold() -> None:
    trace = AccessTrace({0: 0, 1: 0, 2: 0})
    passes = [[0, 1, NEXT, LAST], [0, 2, NEXT, LAST]]
    for step in range(10):
        forward(trace, passes[step % 2])
    for step in range(40):
        assert forward(trace, passes[step % 2])[0] == 4


def test_siblings_that_are_all_used_are_a_sequence_like_any_other() -> None:
    trace = AccessTrace(experts(8))
    uses = [GATE, *range(8), NEXT]
    forward(trace, uses)
    for _ in range(3):
        assert forward(trace, uses) == (len(uses), 0)


def test_a_sequence_that_broke_off_once_is_foretold_again_soon() -> None:
    trace = AccessTrace(experts(8))
    uses = [GATE, *range(8), NEXT]
    forward(trace, uses)
    forward(trace, uses[:4])
    for _ in range(16):
        forward(trace, uses)
    trace.begin_forward("train")
    assert list(trace.upcoming_in_forward(with_backward=False)) == uses


def test_backward_is_the_reverse_of_the_experts_that_ran() -> None:
    trace, generator = AccessTrace(experts()), random.Random(1)
    for _ in range(5):
        uses = mixture(generator.sample(range(EXPERTS), 3))
        trace.begin_forward("train")
        for unit in uses:
            trace.use_forward(unit, backward_follows=True)
        trace.end_forward()
        assert list(trace.upcoming_in_backward(forward_follows=False)) == uses[::-1]
        trace.end_backward()


def test_phases_have_experts_of_their_own() -> None:
    trace = AccessTrace(experts(8))
    for _ in range(20):
        forward(trace, mixture([0, 1]))
        forward(trace, mixture([6, 7]), "eval")
    trace.begin_forward("train")
    assert list(trace.upcoming_in_forward(with_backward=False)) == mixture([0, 1])
    trace.begin_forward("eval")
    assert list(trace.upcoming_in_forward(with_backward=False)) == mixture([6, 7])
