"""Units and steps go from state to state as their tables say, and in no other way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from probe import move_step

from offload.errors import StateError
from zero.cache.residency import TRANSITIONS, Residency, UnitState
from zero.optim.stepper import STEP_MOVES, Stepper, StepState


def units(*persistent: bool) -> Residency:
    return Residency([SimpleNamespace(index=i, name=f"u{i}", persistent=p, numel=1) for i, p in enumerate(persistent)])


def ways(moves: dict[Any, set[Any]], begin: Any) -> dict[Any, list[Any]]:
    """State -> a legal way to it."""
    found: dict[Any, list[Any]] = {begin: []}
    for state in (queue := [begin]):
        for after in moves[state] - found.keys():
            found[after] = [*found[state], after]
            queue.append(after)
    return found


def unit_in(state: UnitState) -> Residency:
    table = units(state == UnitState.PERSISTENT)
    for each in ways(TRANSITIONS, table[0].state)[state]:
        table.move(table[0], each)
    return table


@pytest.mark.parametrize(("state", "after"), list(product(UnitState, UnitState)), ids=lambda s: s.name)
def test_a_unit_makes_the_moves_of_the_table_and_no_other(state: UnitState, after: UnitState) -> None:
    table = unit_in(state)
    if after in TRANSITIONS[state]:
        table.move(table[0], after)
        assert table[0].state == after
    else:
        with pytest.raises(StateError, match=f"unit u0: cannot go from {state.name} to {after.name}"):
            table.move(table[0], after)
        assert table[0].state == state


def test_every_state_of_a_unit_that_comes_and_goes_is_reached_and_left() -> None:
    reached = ways(TRANSITIONS, UnitState.EVICTED).keys()
    assert reached == set(UnitState) - {UnitState.PERSISTENT}
    assert all(UnitState.EVICTED in ways(TRANSITIONS, state) for state in reached)


def test_units_are_listed_in_the_order_in_which_they_came() -> None:
    table = units(False, False, False, True)
    for index in (2, 0, 1):
        table.move(table[index], UnitState.IN_FLIGHT)
    for index in (1, 2):
        table.move(table[index], UnitState.BOUND)
    assert table.resident_units() == [1, 2, 0]
    assert [one.index for one in table.in_state(UnitState.PERSISTENT)] == [3]
    table[2].forward_uses += 1
    table[1].is_read_for_backward = True
    table[0].backward_uses += 1  # it is on its way, so it can be let go
    assert table.pinned_units() == {1, 2}


@pytest.fixture
def stepper() -> Iterator[Stepper]:
    nothing: Any = SimpleNamespace(layout=SimpleNamespace(units=[]))
    yield Stepper(nothing, nothing, nothing, nothing, nothing, nothing, needs_all=False)


@pytest.mark.parametrize(("state", "after"), list(product(StepState, StepState)), ids=lambda s: s.name)
def test_a_step_makes_the_moves_of_the_table_and_no_other(stepper: Stepper, state: StepState, after: StepState) -> None:
    for each in ways(STEP_MOVES, StepState.NONE)[state]:
        move_step(stepper, each)
    if after in STEP_MOVES[state]:
        move_step(stepper, after)
        assert stepper.state == after
    else:
        with pytest.raises(StateError, match=f"step: cannot go from {state.name} to {after.name}"):
            move_step(stepper, after)
        assert stepper.state == state
