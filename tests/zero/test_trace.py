"""What was used after what is learnt in one pass and foretold in the next."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe import history

from zero.cache.access_trace import GENERATE, USES_MAX, AccessTrace

orders = st.permutations(range(8)).flatmap(lambda order: st.integers(1, 8).map(lambda n: list(order)[:n]))
walks = st.lists(st.integers(0, 5), min_size=1, max_size=14)


def forward(trace: AccessTrace, uses: list[int], phase: str = "train", backward_follows: bool = True) -> None:
    trace.begin_forward(phase)
    for unit in uses:
        trace.use_forward(unit, backward_follows=backward_follows)
    trace.end_forward()


def backward(trace: AccessTrace, uses: list[int]) -> None:
    for unit in reversed(uses):
        trace.use_backward(unit)
    trace.end_backward()


def foretold(trace: AccessTrace, *, with_backward: bool = False) -> list[int]:
    return list(trace.upcoming_in_forward(with_backward=with_backward))


@given(orders)
def test_after_one_pass_the_next_is_foretold_from_every_point_on(uses: list[int]) -> None:
    trace = AccessTrace()
    forward(trace, uses)
    backward(trace, uses)
    trace.begin_forward("train")
    for position, unit in enumerate(uses):
        assert foretold(trace) == uses[position:]
        assert foretold(trace, with_backward=True) == uses[position:] + uses[::-1]
        trace.use_forward(unit, backward_follows=True)
    assert foretold(trace) == []


@given(orders)
def test_without_backward_nothing_is_foretold_after_the_forward(uses: list[int]) -> None:
    trace = AccessTrace()
    for _ in range(2):
        forward(trace, uses, "eval", backward_follows=False)
    trace.begin_forward("eval")
    assert foretold(trace) == uses
    for unit in uses:
        trace.use_forward(unit, backward_follows=False)
    trace.end_forward()
    assert list(trace.upcoming_in_backward(forward_follows=False)) == []


@given(walks)
def test_backward_is_the_reverse_of_what_ran_whatever_ran_before(uses: list[int]) -> None:
    trace = AccessTrace()
    forward(trace, uses[::-1])
    backward(trace, uses[::-1])
    forward(trace, uses)
    for position, unit in enumerate(reversed(uses)):
        assert list(trace.upcoming_in_backward(forward_follows=False)) == uses[::-1][position:]
        trace.use_backward(unit)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == []


def test_a_unit_that_others_are_used_inside_of_comes_first_in_backward_and_they_follow() -> None:
    """A model's own parameters: gradients reach the model before its blocks."""
    trace = AccessTrace()
    trace.begin_forward("train")
    for unit in (9, 0, 1, 2):
        trace.use_forward(unit, backward_follows=True)
        if unit != 9:
            trace.end_use(unit)
    trace.end_use(9)
    trace.end_forward()
    assert list(trace.upcoming_in_backward(forward_follows=False)) == [9, 2, 1, 0]
    trace.use_backward(9)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == [2, 1, 0]
    trace.use_backward(1)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == [0], "2 took no part"


@given(walks)
def test_a_retained_graph_is_foretold_for_its_second_backward_too(uses: list[int]) -> None:
    trace = AccessTrace()
    forward(trace, uses)
    for _ in range(2):
        assert list(trace.upcoming_in_backward(forward_follows=False)) == uses[::-1]
        backward(trace, uses)


@given(walks, walks)
def test_several_forwards_before_one_backward_are_reversed_together(first: list[int], second: list[int]) -> None:
    trace = AccessTrace()
    forward(trace, first)
    forward(trace, second)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == (first + second)[::-1]
    backward(trace, first + second)
    forward(trace, first)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == first[::-1], "the last step's are forgotten"


@given(orders)
def test_with_accumulation_the_next_forward_follows_the_backward(uses: list[int]) -> None:
    trace = AccessTrace()
    forward(trace, uses)
    assert list(trace.upcoming_in_backward(forward_follows=True)) == uses[::-1] + uses


@given(walks)
def test_predictions_end_however_often_units_are_repeated(uses: list[int]) -> None:
    trace = AccessTrace()
    for _ in range(3):
        forward(trace, uses)
        backward(trace, uses)
    trace.begin_forward("train")
    for unit in uses:
        assert len(foretold(trace, with_backward=True)) < 1000
        assert len(list(trace.upcoming_in_backward(forward_follows=True))) < 1000
        trace.use_forward(unit, backward_follows=True)


def test_a_unit_used_again_and_again_is_foretold_once_more_each_time() -> None:
    trace = AccessTrace()
    uses = [0, *[1] * 20, 2]
    forward(trace, uses)
    backward(trace, uses)
    trace.begin_forward("train")
    for unit in uses:
        assert unit in foretold(trace)
        trace.use_forward(unit, backward_follows=True)


def accuracy(passes: list[list[int]], known: int) -> float:
    """Share of uses, after the first `known` passes, that were among the foretold next ones."""
    trace = AccessTrace()
    hits = total = 0
    for number, uses in enumerate(passes):
        trace.begin_forward("train")
        for unit in uses:
            if number >= known:
                # At a fork every known successor comes before anything later on the likely path.
                hits += unit in foretold(trace)[:known]
                total += 1
            trace.use_forward(unit, backward_follows=True)
        trace.end_forward()
        backward(trace, uses)
    return hits / total


BRANCHES: dict[str, list[list[int]]] = {
    "alternating": [[0, 1, 2, 3, 9], [0, 4, 5, 6, 9]],
    "skipped layer": [[0, 1, 2, 3, 4, 9], [0, 1, 3, 4, 9]],
    "three experts": [[0, 1, 7, 9], [0, 2, 7, 9], [0, 3, 7, 9]],
    "two orders": [[0, 1, 2, 9], [0, 2, 1, 9]],
}


def test_once_all_branches_are_known_at_least_95_percent_of_uses_are_foretold() -> None:
    generator = random.Random(7)
    choices: list[Callable[[int, int], int]] = [
        lambda step, count: step % count,
        lambda step, count: generator.randrange(count),
    ]
    for name, branches in BRANCHES.items():
        for choose in choices:
            passes = branches + [branches[choose(step, len(branches))] for step in range(40)]
            assert accuracy(passes, len(branches)) >= 0.95, name


@given(st.integers(2, 4), st.integers(1, 3))
def test_branches_taken_in_turn_are_foretold_each_with_the_first_guess(count: int, known: int) -> None:
    trace = AccessTrace()
    passes = [[0, 1, 2 + number, 9] for number in range(count)]
    for number in range(count * (known + 1)):
        uses = passes[number % count]
        trace.begin_forward("train")
        for position, unit in enumerate(uses):
            if number > count:
                assert foretold(trace)[0] == unit, "the likely one comes before the other known ones"
            if number == count and position != 2:
                assert unit in foretold(trace)
            trace.use_forward(unit, backward_follows=True)
        trace.end_forward()
        backward(trace, uses)


@given(orders)
def test_a_use_that_encloses_others_comes_first_in_backward(uses: list[int]) -> None:
    """A root with parameters of its own: its use begins first and ends last, so backward meets it first."""
    trace = AccessTrace()
    trace.begin_forward("train")
    for unit in (100, *uses):
        trace.use_forward(unit, backward_follows=True)
        if unit != 100:
            trace.end_use(unit)
    trace.end_use(100)
    trace.end_forward()
    assert list(trace.upcoming_in_backward(forward_follows=False)) == [100, *uses[::-1]]
    trace.use_backward(100)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == uses[::-1]


@given(orders)
def test_what_runs_without_gradients_and_is_recomputed_is_foretold_from_the_second_step_on(uses: list[int]) -> None:
    """Reentrant checkpointing: forward shows a unit under no_grad, backward uses it all the same."""
    trace = AccessTrace()
    for step in range(2):
        forward(trace, uses, backward_follows=False)
        assert list(trace.upcoming_in_backward(forward_follows=False)) == (uses[::-1] if step else [])
        backward(trace, uses)
    trace.begin_forward("train", backward_follows=False)
    for unit in uses:
        trace.use_forward(unit, backward_follows=False)
    trace.end_forward()
    assert list(trace.upcoming_in_backward(forward_follows=False)) == [], "a whole forward without gradients"


@given(orders, walks)
def test_evaluation_and_training_do_not_disturb_each_other(trained: list[int], evaluated: list[int]) -> None:
    trace = AccessTrace()
    forward(trace, trained)
    backward(trace, trained)
    forward(trace, evaluated, "eval", backward_follows=False)
    trace.begin_forward("train")
    assert foretold(trace) == trained


@given(orders, orders)
def test_an_evaluation_between_forward_and_backward_leaves_the_backward_foretold(
    trained: list[int], evaluated: list[int]
) -> None:
    trace = AccessTrace()
    forward(trace, trained)
    forward(trace, evaluated, "eval", backward_follows=False)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == trained[::-1]


@given(walks, walks)
def test_forgotten_forwards_are_expected_in_no_backward(first: list[int], second: list[int]) -> None:
    trace = AccessTrace()
    forward(trace, first)
    trace.forget_forwards()
    assert list(trace.upcoming_in_backward(forward_follows=False)) == []
    forward(trace, second)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == second[::-1]


@given(orders, st.integers(0, 7))
def test_a_forward_that_broke_off_is_followed_by_one_foretold_as_far_as_known(uses: list[int], done: int) -> None:
    trace = AccessTrace()
    forward(trace, uses)
    backward(trace, uses)
    trace.begin_forward("train")
    for unit in uses[: min(done, len(uses))]:
        trace.use_forward(unit, backward_follows=True)
    trace.end_forward()
    trace.forget_forwards()
    forward(trace, uses)
    trace.begin_forward("train")
    assert foretold(trace) == uses


def test_a_use_in_backward_that_no_forward_announced_moves_nothing() -> None:
    trace = AccessTrace()
    forward(trace, [0, 1, 2])
    trace.use_backward(7)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == [2, 1, 0]


def test_calls_of_parts_alone_leave_no_more_behind_than_a_bound() -> None:
    trace = AccessTrace()
    for index in range(3 * USES_MAX):
        trace.use_forward(index % 7, backward_follows=True)
        assert max(map(len, history(trace))) <= USES_MAX
    backward(trace, [index % 7 for index in range(14)])
    forward(trace, [1, 2, 3])
    trace.begin_forward("train")
    assert foretold(trace)[:1] == [1]


PARTS = [[0], [1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
"""A model of five parts; all but the first and the last are recomputed."""


def with_checkpoints(reentrant: bool) -> list[tuple[str, int]]:
    """What happens in a backward. Gradients reach the first and the last unit, and pass every unit.

    With `use_reentrant=False` gradients reach the last unit of a part before it is recomputed.
    """
    events = [("gradient", 10), ("passed", 10)]
    for part in PARTS[3:0:-1]:
        events += [] if reentrant else [("gradient", part[-1])]
        events += [("recompute", unit) for unit in (part if reentrant else part[:-1])]
        events += [("passed", unit) for unit in reversed(part)]
    return [*events, ("gradient", 0), ("passed", 0)]


def go_back(trace: AccessTrace, event: str, unit: int) -> None:
    if event == "passed":
        trace.end_backward_use(unit)
    else:
        trace.use_backward(unit, recomputes=event == "recompute")


def needed(events: list[tuple[str, int]]) -> list[int]:
    """Units in the order in which they are needed, each once."""
    return [*dict.fromkeys(unit for _, unit in events)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_parts_are_foretold_in_the_order_of_the_last_backward(reentrant: bool) -> None:
    trace, events = AccessTrace(), with_checkpoints(reentrant)
    for step in range(4):
        forward(trace, [unit for part in PARTS for unit in part])
        for position, event in enumerate(events):
            coming = [*dict.fromkeys(trace.upcoming_in_backward(forward_follows=False))]
            waiting = {unit for _, unit in events[:position]}  # for gradients that have reached them
            expected = needed(events[position:])
            assert waiting.union(coming) >= set(expected), "nothing is lost by a jump"
            if step:
                assert [u for u in coming if u not in waiting] == [u for u in expected if u not in waiting]
            go_back(trace, *event)
        trace.end_backward()
    forward(trace, [unit for part in PARTS for unit in part])
    assert [*dict.fromkeys(foretold(trace, with_backward=True))] == needed(events)


def test_what_was_recomputed_is_needed_until_gradients_have_passed_it() -> None:
    """A part may be larger than the room: units that wait for gradients leave, and come back in this order."""
    trace = AccessTrace()
    forward(trace, [unit for part in PARTS for unit in part])
    go_back(trace, "gradient", 10)
    for unit in PARTS[3]:
        go_back(trace, "recompute", unit)
    for passed in (9, 8, 7, 6):
        coming = list(trace.upcoming_in_backward(forward_follows=False))
        assert coming[: passed - 5] == list(range(passed, 5, -1))
        go_back(trace, "passed", passed)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == [5, 4, 3, 2, 1, 0]


def test_a_recomputation_out_of_turn_changes_the_order_of_nothing_else() -> None:
    """A module that later layers share, for example; and the next backward does not expect it."""
    trace = AccessTrace()
    for _ in range(2):
        forward(trace, list(range(10)))
        assert list(trace.upcoming_in_backward(forward_follows=False)) == list(range(9, -1, -1))
        go_back(trace, "gradient", 9)
        go_back(trace, "recompute", 2)
        go_back(trace, "gradient", 8)
        assert list(trace.upcoming_in_backward(forward_follows=False)) == list(range(7, -1, -1))
        for unit in range(7, -1, -1):
            go_back(trace, "gradient", unit)
        trace.end_backward()


def test_a_part_that_is_no_longer_recomputed_is_foretold_in_reverse_again() -> None:
    trace, uses = AccessTrace(), [unit for part in PARTS for unit in part]
    forward(trace, uses)
    for event in with_checkpoints(reentrant=True):
        go_back(trace, *event)
    trace.end_backward()
    for _ in range(2):
        forward(trace, uses)
        backward(trace, uses)
    forward(trace, uses)
    assert list(trace.upcoming_in_backward(forward_follows=False)) == uses[::-1]


@st.composite
def stories(draw: Any) -> list[tuple[str, Any]]:
    """Events of some forwards and backwards: most repeat what the one before used, some units are siblings."""
    events: list[tuple[str, Any]] = []
    uses = draw(walks)
    for _ in range(draw(st.integers(1, 4))):
        uses = draw(st.one_of(st.just(uses), walks))
        left_out = draw(st.sets(st.integers(0, len(uses) - 1), max_size=2))
        phase = draw(st.sampled_from(["train", "train", "eval", GENERATE]))
        events.append(("begin", phase))
        events += [("use", unit) for position, unit in enumerate(uses) if position not in left_out]
        if draw(st.booleans()):
            events.append(("enclosed", uses[0]))
        events.append(("end", None))
        if phase == "train":
            events.append(("backward", uses))
    return events


def tell(trace: AccessTrace, event: str, what: Any) -> None:
    if event == "begin":
        trace.begin_forward(what, backward_follows=what == "train")
    elif event == "use":
        trace.use_forward(what, backward_follows=True)
    elif event == "enclosed":
        trace.end_use(what)
    elif event == "end":
        trace.end_forward()
    else:
        backward(trace, what)


def answers(trace: AccessTrace) -> list[list[int]]:
    return [
        list(trace.upcoming_in_forward(with_backward=False)),
        list(trace.upcoming_in_forward(with_backward=True)),
        list(trace.upcoming_in_forward(with_backward=True, to_fetch=True)),
        list(trace.upcoming_in_backward(forward_follows=True)),
    ]


@given(stories(), st.sampled_from([{}, {0: 0, 1: 0, 2: 0}, {0: 0, 1: 0, 3: 1, 4: 1}]))
def test_what_was_asked_before_changes_no_answer(story: list[tuple[str, Any]], groups: dict[int, int]) -> None:
    asked = AccessTrace(groups)
    for position, event in enumerate(story):
        tell(asked, *event)
        silent = AccessTrace(groups)
        for earlier in story[: position + 1]:
            tell(silent, *earlier)
        assert answers(asked) == answers(silent)


@given(stories(), st.sampled_from([{}, {0: 0, 1: 0, 2: 0}, {0: 0, 1: 0, 3: 1, 4: 1}]))
def test_without_a_surprise_nothing_new_is_foreseen(story: list[tuple[str, Any]], groups: dict[int, int]) -> None:
    """So a forecast whose units are all there need not be read again."""
    trace, before, surprises = AccessTrace(groups), answers(AccessTrace(groups)), -1
    for event, what in story:
        for part in [(event, what)] if event != "backward" else [("gradient", unit) for unit in what[::-1]]:
            if part[0] == "gradient":
                trace.use_backward(part[1])
            else:
                tell(trace, *part)
            after = answers(trace)
            if trace.prediction_changes == surprises:
                used = {part[1]} if part[0] in ("use", "gradient") else set()
                assert [set(new) - set(old) - used for new, old in zip(after, before, strict=True)] == [set()] * 4
            before, surprises = after, trace.prediction_changes
        if event == "backward":
            trace.end_backward()


def test_a_fork_that_is_foreseen_is_no_surprise() -> None:
    trace, branches = AccessTrace(), ([0, 1, 2, 5], [0, 3, 4, 5])
    for step in range(10):
        uses = branches[step % 2]
        trace.begin_forward("train")
        foretold(trace)
        surprises = trace.prediction_changes
        for unit in uses:
            trace.use_forward(unit, backward_follows=True)
        assert step < 5 or trace.prediction_changes == surprises
        trace.end_forward()
        backward(trace, uses)


def test_a_unit_that_is_recomputed_twice_is_still_expected_by_gradients() -> None:
    """A checkpoint inside a checkpoint, whose outer part is larger than the room."""
    trace = AccessTrace()
    forward(trace, [unit for part in PARTS for unit in part])
    go_back(trace, "gradient", 10)
    for unit in (*PARTS[3], 8):
        go_back(trace, "recompute", unit)
    assert list(trace.upcoming_in_backward(forward_follows=False))[:4] == [9, 8, 7, 6]
