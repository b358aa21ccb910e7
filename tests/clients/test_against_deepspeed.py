"""Unmodified clients on DeepSpeed itself and on us: the same losses, norms, rates and weights but for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import oracle
import pytest
from oracle_rows import ROWS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both() -> Iterator[Any]:
    """Processes of both sides."""
    for name in ("transformers", "accelerate", "peft"):
        pytest.importorskip(name)
    reason = oracle.why_not()
    if reason is not None:
        pytest.skip(reason)
    with oracle.Both() as opened:
        yield opened


@pytest.mark.parametrize("name", ROWS)
def test_a_client_runs_as_on_deepspeed_itself(both: oracle.Both, name: str) -> None:
    if name.startswith("TRL"):
        pytest.importorskip("trl", reason="trl is not installed")
    row = ROWS[name]
    apart = both.run(row).apart()
    if row.known is None:
        assert apart == []
    else:
        assert apart, f"no longer: {row.known}"


CHANGES: dict[str, dict[str, Any]] = {
    "decay": {"weight_decay": 0.12},
    "decay of norms": {"weight_decay": 0.0},
    "schedule": {"lr_scheduler_type": "cosine"},
    "order of the data": {"data_seed": 1},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_run_that_is_another_is_told_apart(both: oracle.Both, what: str) -> None:
    """What the comparison allows is less than what a small change of one value does."""
    row = ROWS["Trainer, stage 2: its AdamW, linear"]
    ours, moved = both.one("ours", row), both.one("ours", row, ulps=1)
    other = both.one("ours", replace(row, more={**row.more, **CHANGES[what]}))
    assert oracle.Compared(ours, ours, moved).apart() == []
    assert oracle.Compared(ours, other, moved).apart() != []
