"""Ranks start the same reductions in the same order, whatever order their own gradients come in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero.optim.reduce import ReductionOrder

UNITS = 5
arrivals = st.lists(st.integers(0, UNITS - 1), unique=True)
"""Units in the order in which a rank has their gradients; the others have none."""
backwards = st.lists(st.lists(arrivals, min_size=2, max_size=3), min_size=1, max_size=4)
"""Of each backward of a step, what each rank has; ranks beyond the first backward's are left out."""


def reduced(order: ReductionOrder, arriving: list[int], earlier: set[int]) -> list[int]:
    """What one rank reduces in a backward; `earlier`: units that an earlier one has left waiting, emptied here."""
    order.begin_backward()
    waiting, started = set(earlier), list[int]()
    for unit in arriving:
        waiting.add(unit)
        for due in order.add_ready(unit, waiting):
            waiting.discard(due)
            started.append(due)
    started += order.take_remaining()
    earlier.clear()
    return started


@given(steps=st.lists(backwards, min_size=1, max_size=3))
def test_all_ranks_reduce_the_same_units_in_the_same_order(steps: list[list[list[list[int]]]]) -> None:
    ranks = min(len(backward) for step in steps for backward in step)
    orders = [ReductionOrder(list(reversed(range(UNITS)))) for _ in range(ranks)]
    for step in steps:
        for order in orders:
            order.begin_step()
        for backward in step:
            told = [reduced(order, backward[rank], set()) for rank, order in enumerate(orders)]
            assert told == [told[0]] * ranks
            seen = [order.arrived_units for order in orders]
            assert seen == [backward[rank] for rank in range(ranks)]
            for order in orders:
                order.set_next_order(seen)


@given(arriving=arrivals, earlier=st.sets(st.integers(0, UNITS - 1)))
def test_what_an_earlier_backward_left_waits_for_the_gradient_of_this_one(
    arriving: list[int], earlier: set[int]
) -> None:
    order = ReductionOrder(list(range(UNITS)))
    order.begin_backward()
    waiting, had = set(earlier), set[int]()
    for unit in arriving:
        waiting.add(unit)
        had.add(unit)
        for due in order.add_ready(unit, waiting):
            assert due in had
            waiting.discard(due)


def test_a_second_backward_of_the_same_number_follows_what_all_ranks_had_in_the_first_rank_s_order() -> None:
    order = ReductionOrder([0, 1, 2, 3])
    order.begin_backward()
    order.set_next_order([[3, 1, 0], [0, 1, 3, 2]])
    order.begin_step()
    assert reduced(order, [1, 3, 0, 2], set()) == [3, 1, 0]


def test_for_a_unit_that_a_backward_had_not_nobody_waits_any_more() -> None:
    order = ReductionOrder([2, 1, 0])
    for had in ([2, 0], [2, 1, 0]):
        order.begin_step()
        order.begin_backward()
        order.set_next_order([had, had])
    order.begin_step()
    assert reduced(order, [2, 1, 0], set()) == [2, 0]
