"""The cover really has every two choices, and no more cases than it needs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pairwise import cover, each_once

CHOICES: list[dict[str, tuple[Any, ...]]] = [
    {"a": (1, 2), "b": ("x", "y")},
    {"a": (1, 2, 3), "b": (1, 2, 3), "c": (True, False), "d": (1,)},
    {"stage": tuple(range(14)), "when": (0, 1), "retry": (0, 1), "pair": (0, 1)},
]


@pytest.mark.parametrize("choices", CHOICES)
def test_every_two_choices_meet(choices: dict[str, tuple[Any, ...]]) -> None:
    cases = cover(choices)
    for a, b in itertools.combinations(choices, 2):
        assert {(case[a], case[b]) for case in cases} == set(itertools.product(choices[a], choices[b]))
    sizes = sorted(len(values) for values in choices.values())
    assert sizes[-1] * sizes[-2] <= len(cases) <= len(list(itertools.product(*choices.values())))


def test_what_cannot_be_is_left_out() -> None:
    cases = cover({"a": (0, 1, 2), "b": (0, 1, 2)}, lambda chosen: sum(chosen.values()) < 3)
    assert sorted(tuple(case.values()) for case in cases) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]


def test_of_each_choice_one_case_runs_by_default_and_none_is_lost() -> None:
    cases = each_once(place=("a", "b", "c"), way=(1, 2)).args[1]
    default = [case.values for case in cases if not case.marks]
    assert default == [("a", 1), ("b", 2), ("c", 1)]
    assert sorted(case.values for case in cases) == sorted(itertools.product(("a", "b", "c"), (1, 2)))
