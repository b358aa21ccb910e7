"""Tests of the alias find their helpers, and leave the process as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zero.params import released

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode leaves it out


@pytest.fixture(autouse=True)
def own_rule_for_what_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alias lets what is released be saved empty, for the whole process: not for the tests that come later."""
    monkeypatch.setattr(released, "_saved_as_empty", False)
