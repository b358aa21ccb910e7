"""Covers with fewer cases than the whole product, in which every two choices still meet: most faults need only two.

    @in_pairs(stage=STAGES, when=("before", "after"), retry=RETRIES)
    def test_it(stage, when, retry): ...

The cases of the cover run by default, the rest of the product with the long forms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Case = dict[str, Any]


def always(case: Mapping[str, Any]) -> bool:
    return True


def cover(choices: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool] = always) -> list[Case]:
    """Cases in which every two compatible choices meet. Each case takes the choices with most pairs not met yet.

    Args:
        choices: key -> its choices; they are hashable.
        possible: True if a case can have all of the given choices.
    """
    keys = tuple(choices)
    missing = [
        ((a, x), (b, y))
        for a, b in itertools.combinations(keys, 2)
        for x, y in itertools.product(choices[a], choices[b])
        if possible({a: x, b: y})
    ]
    cases: list[Case] = []
    while missing:
        chosen: Case = dict(missing[0])
        for key in keys:
            if key not in chosen:
                fitting = [value for value in choices[key] if possible({**chosen, key: value})]
                chosen[key] = max(fitting, key=lambda value: _met(missing, {**chosen, key: value}))
        missing = [pair for pair in missing if any(chosen[key] != value for key, value in pair)]
        cases.append({key: chosen[key] for key in keys})
    return cases


def _met(missing: Iterable[tuple[tuple[str, Any], tuple[str, Any]]], chosen: Case) -> int:
    items = chosen.items()
    return sum(first in items and second in items for first, second in missing)


def in_pairs(**choices: Iterable[Any]) -> Any:
    """A parametrization over the product of `choices`; cases outside the cover are long forms."""
    values = {key: tuple(given) for key, given in choices.items()}
    return _parametrized(values, [tuple(case.values()) for case in cover(values)])


def each_once(**choices: Iterable[Any]) -> Any:
    """A parametrization over the product of `choices`: by default each choice occurs once, the rest are long forms."""
    values = {key: tuple(given) for key, given in choices.items()}
    rows = range(max(len(given) for given in values.values()))
    return _parametrized(values, [tuple(given[row % len(given)] for given in values.values()) for row in rows])


def _parametrized(values: dict[str, tuple[Any, ...]], kept: list[tuple[Any, ...]]) -> Any:
    cases = [
        pytest.param(*case, marks=() if case in kept else pytest.mark.slow, id="-".join(_word(value) for value in case))
        for case in itertools.product(*values.values())
    ]
    return pytest.mark.parametrize(tuple(values), cases)


def _word(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(getattr(value, "name", value))
