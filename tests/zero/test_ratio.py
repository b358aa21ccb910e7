"""`offload_optimizer.ratio`: a share of the states stays on the device and is updated there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import micro_batch, reference_of, unequal
from models import build, make_config
from probe import layout_of

from offload.errors import BudgetError

Open = Callable[..., Any]


def opened(open_engine: Open, nvme_path: Path, pair: tuple[str, str], ratio: float, **more: Any) -> Any:
    keys = {"sub_group_size": 4096, "offload_optimizer": {"ratio": ratio}}
    return open_engine(build("gpt"), {**make_config(pair, nvme_path, zero=keys), **more})


def state_bytes(engine: Any) -> dict[str, int]:
    found = dict.fromkeys(("device", "host", "nvme"), 0)
    for row in engine.plan.rows:
        if row.array == "optimizer states":
            found[row.tier] += row.nbytes
    return found


def share_on_device(engine: Any) -> float:
    found = state_bytes(engine)
    return found["device"] / sum(found.values())


@pytest.mark.parametrize("pair", [("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme"), ("none", "nvme")], ids="-".join)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.8])
def test_a_share_of_the_states_on_the_device_changes_no_number(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str], ratio: float
) -> None:
    engine = opened(open_engine, nvme_path, pair, ratio)
    reference = reference_of()
    for index in range(4):
        for trainer in (engine, reference):
            micro_batch(trainer, index)
    assert unequal(engine, reference) == []
    one_sub_group = 4096 / layout_of(engine).numel
    assert 1 - ratio - one_sub_group < share_on_device(engine) <= 1 - ratio


@pytest.mark.parametrize("pair", [("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_more_on_the_device_is_less_elsewhere(open_engine: Open, nvme_path: Path, pair: tuple[str, str]) -> None:
    rows = [state_bytes(opened(open_engine, nvme_path, pair, ratio)) for ratio in (1.0, 0.6, 0.2, 0.0)]
    assert [sum(row.values()) for row in rows] == [sum(rows[0].values())] * 4
    on_device = [row["device"] for row in rows]
    assert on_device == sorted(set(on_device)) and on_device[0] == 0 and on_device[-1] == sum(rows[0].values())


def test_nvme_traffic_of_states_falls_with_the_ratio(open_engine: Open, nvme_path: Path) -> None:
    written = []
    for ratio in (1.0, 0.5, 0.0):
        engine = opened(open_engine, nvme_path, ("none", "nvme"), ratio)
        before = engine.statistics().nvme_write_bytes
        micro_batch(engine, 0)
        engine.synchronize()
        written.append(engine.statistics().nvme_write_bytes - before)
        assert written[-1] == state_bytes(engine)["nvme"]
    assert written[0] > written[1] > written[2] == 0


def test_a_share_that_does_not_fit_the_device_budget_is_refused(open_engine: Open, nvme_path: Path) -> None:
    whole = state_bytes(opened(open_engine, nvme_path, ("cpu", "cpu"), 0.0))["device"]
    with pytest.raises(BudgetError, match=r"memory_budget\.device"):
        opened(open_engine, nvme_path, ("cpu", "cpu"), 0.0, memory_budget={"device": whole // 2})
