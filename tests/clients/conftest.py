"""Clients' modules are found by name; the processes that run them are shared by all tests of a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)


@pytest.fixture(scope="session")
def tuned() -> Iterator[Any]:
    """See `tuning_checks.Tuned`."""
    from tuning_checks import Tuned

    with Tuned() as runs:
        yield runs
