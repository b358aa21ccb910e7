"""Tests of the alias find their helpers, and leave the process as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zero.params import released_parameter

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode leaves it out


@pytest.fixture(autouse=True)
def own_rule_for_what_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alias lets what is released be saved empty, for the whole process: not for the tests that come later."""
    monkeypatch.setattr(released_parameter, "_saves_as_empty", False)


@pytest.fixture(scope="session")
def said_with_torch() -> Iterator[Callable[[str], str]]:
    """`said_with_torch(code)` -> what it prints in a process that has imported torch, and neither the alias nor us."""
    from aliased import Forks

    forks = Forks()
    yield forks.said
    forks.close()
