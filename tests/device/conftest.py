"""Tests here import what lies beside them by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def found() -> dict[str, str]:
    """The verdicts on all that one rank does by default, from one process."""
    from pretend_groups import AROUND_TRAINING, TRAINING, by_default
    from pretend_process import needed, verdicts

    needed()
    return verdicts([cell for group in (*TRAINING, *AROUND_TRAINING) for cell in by_default(group)])
