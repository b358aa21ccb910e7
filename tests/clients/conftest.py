"""Clients' modules are found by name; the processes that run them are shared by all tests of a session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)


@pytest.fixture(scope="session")
def clients() -> Iterator[Any]:
    """`clients.run("trainer_cases:train", config)` in a fork of a process that has imported them behind the alias."""
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name)
    from client_process import Clients

    from zero.compat.deepspeed import ALIAS

    with Clients(ALIAS) as opened:
        yield opened


@pytest.fixture(scope="session")
def plain(clients: Any) -> Callable[..., Any]:
    """`plain(case, ...)`: the same script without DeepSpeed, run once for all tests that compare with it."""
    known: dict[str, Any] = {}

    def run(case: str, **more: Any) -> Any:
        key = f"{case} {sorted(more.items())}"
        if key not in known:
            known[key] = clients.run(case, None, **more)
        return known[key]

    return run


@pytest.fixture(scope="session")
def tuned() -> Iterator[Any]:
    """See `tuning_checks.Tuned`."""
    from tuning_checks import Tuned

    with Tuned() as runs:
        yield runs
