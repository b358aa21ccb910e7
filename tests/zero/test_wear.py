"""What a step writes to NVMe is what the plan says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens
from pairwise import in_pairs
from probe import layout_of

from offload.errors import BudgetError
from zero.plan.traffic import step_traffic

Open = Callable[..., Any]
STEPS = 3


def measured(engine: Any, accumulation: int) -> float:
    """Bytes written to NVMe by a step, of STEPS steps, from a point where nothing is due to another."""
    marks = []
    for step in range(STEPS + 1):
        for micro in range(accumulation):
            engine.backward(engine(tokens(step * accumulation + micro)))
            engine.step()
        engine.synchronize()
        if step in (0, STEPS):
            marks.append(engine.statistics())
    return float(marks[1].nvme_write_bytes - marks[0].nvme_write_bytes) / STEPS


@in_pairs(
    pair=(("nvme", "nvme"), ("none", "nvme"), ("nvme", "cpu"), ("cpu", "cpu")),
    spare_bytes=(None, 0, 100_000, 400_000),
    accumulation=(1, 2),
)
def test_a_step_writes_what_the_plan_says(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str], spare_bytes: int | None, accumulation: int
) -> None:
    """Also where a host budget lets weights, gradients and records stay in memory in part."""
    config = make_config(pair, nvme_path, zero={"sub_group_size": 4096})
    config["gradient_accumulation_steps"] = accumulation
    if spare_bytes is not None:
        with pytest.raises(BudgetError) as too_few:
            open_engine(build("gpt"), {**config, "memory_budget": {"host": 8192}})
        least = int(re.findall(r"at least ([\d,]+)", str(too_few.value))[0].replace(",", ""))
        config["memory_budget"] = {"host": least + spare_bytes}
    engine = open_engine(build("gpt"), config)
    predicted = step_traffic(engine.plan, layout_of(engine), on_gpu=False).nvme_write_bytes
    assert measured(engine, accumulation) == predicted
    if spare_bytes is None:
        assert (predicted == 0) == ("nvme" not in pair)
    if spare_bytes == 0 and pair == ("nvme", "nvme"):
        assert "nvme" in engine.plan.gradient_tiers.values()  # they are written as well, once a backward
    assert any(f"{predicted:,} bytes" in note for note in engine.plan.notes) == (predicted > 0)


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_the_start_writes_no_zeros(open_engine: Open, nvme_path: Path, given: torch.dtype, states: str) -> None:
    """Swap space reads as zeros where nothing was written. Of fp32 values what bf16 weights lack of them is written."""
    zero = {"offload_optimizer": {"state_dtype": states}}
    engine = open_engine(build("gpt").to(given), make_config(("nvme", "nvme"), nvme_path, zero=zero))
    engine.synchronize()
    numel = sum(unit.numel for unit in layout_of(engine).units)
    lacking = 2 * numel if given == torch.float32 else 0
    assert engine.statistics().nvme_write_bytes == 2 * numel + lacking < engine.plan.tier_bytes("nvme")
    exact = {name: p.detach().float() for name, p in build("gpt").to(given).named_parameters()}
    assert all(torch.equal(engine.full_master(name), value) for name, value in exact.items())
    assert not any(engine.full_state(name)["exp_avg_sq"].any() for name in exact)
