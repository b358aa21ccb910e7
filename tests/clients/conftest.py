"""The process that has imported transformers and accelerate behind the alias; it forks for each case."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import `client_configs` and its neighbours by name


@pytest.fixture(scope="session")
def clients() -> Iterator[Any]:
    """`clients.run("trainer_cases:train", config)` in a fork of a process with the alias."""
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
