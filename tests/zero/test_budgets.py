"""More host memory never costs anything: no refusal, and no byte more on NVMe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import make_config

from offload.errors import BudgetError
from zero.config import load_config
from zero.params.layout import Layout, Placement, UnitContent, build_layout
from zero.params.units import LiveNumels
from zero.plan.machine import Machine
from zero.plan.plan import NVME as ON_NVME
from zero.plan.plan import Plan
from zero.plan.planner import Planner

NVME = ("nvme", "nvme")
MACHINE = Machine(
    available_bytes=1 << 40, available_source="MemAvailable", memlock_bytes=None, device_bytes=1 << 40, rss_bytes=123
)


def units_of(*numels: int, frozen: tuple[int, ...] = ()) -> Layout:
    contents = [
        UnitContent(f"u{i}", ((i, (f"p{i}",), torch.Size((n,))),), torch.bfloat16, i not in frozen, False)
        for i, n in enumerate(numels)
    ]
    return build_layout(contents, Placement())


def on_nvme(plan: Plan, layout: Layout) -> dict[str, int]:
    """Bytes that every step has to move to and from NVMe, by kind."""
    weights = sum(u.nbytes * (4 if u.trainable else 2) for u in layout.units if plan.weight_tiers[u.index] == ON_NVME)
    width = 4 if plan.gradient_wide else 2
    gradients = 2 * sum(u.numel * width for u in layout.units if plan.gradient_tiers.get(u.index) == ON_NVME)
    groups = zip(plan.sub_groups, plan.state_tiers, strict=True)
    records = 2 * sum(
        plan.state_format(layout.spaces[g.space]).nbytes(g.end - g.begin) for g, t in groups if t == ON_NVME
    )
    return {"weights": weights, "gradients": gradients, "states": records}


LADDERS: dict[str, tuple[Layout, tuple[str, str], int, dict[str, Any]]] = {
    "plain": (units_of(40_000, 120_000, 90_000, 8_000, frozen=(2,)), NVME, 1, {}),
    "accumulating": (units_of(40_000, 120_000, 90_000, 8_000), NVME, 4, {}),
    "seven buffers": (units_of(300_000, 20_000), NVME, 1, {"offload_optimizer": {"buffer_count": 7}}),
    "small sub-groups": (units_of(300_000, 20_000), NVME, 1, {"sub_group_size": 20_000}),
    "huge sub-groups": (units_of(300_000, 20_000), NVME, 2, {"sub_group_size": 10**9}),
    "weights on the host": (units_of(40_000, 120_000, 90_000), ("cpu", "nvme"), 1, {}),
    "states on the host": (units_of(40_000, 120_000, 90_000), ("nvme", "cpu"), 2, {}),
    "many small": (units_of(*[5_000] * 40), NVME, 1, {}),
}


@pytest.mark.parametrize("name", LADDERS)
def test_a_little_more_host_memory_is_never_refused_and_never_costs_traffic(name: str) -> None:
    layout, pair, accumulation, keys = LADDERS[name]
    base = make_config(
        pair, "/anywhere", accumulation=accumulation, zero={"stage3_max_live_parameters": 10_000_000, **keys}
    )
    step = sum(unit.shard_numel for unit in layout.units) // 6
    accepted = 0
    before: dict[str, int] = {}
    for host in range(4096, 100_000_000, step):
        config = load_config({**base, "memory_budget": {"host": host}})
        try:
            plan = Planner(
                layout, config, MACHINE, torch.device("cpu"), True, LiveNumels.for_sequential_use(layout)
            ).make_plan()
        except BudgetError as refusal:
            assert not accepted, f"{accepted:,} bytes were accepted, {host:,} are refused: {refusal}"
            continue
        now = on_nvme(plan, layout)
        if accepted:
            assert sum(now.values()) <= sum(before.values()), f"{accepted:,}: {before}, {host:,}: {now}"
        accepted, before = host, now
        if not sum(now.values()):
            return
    raise AssertionError(f"with {accepted:,} bytes of host memory there is still something on NVMe: {before}")
