"""Limits limit: live elements, host bytes, buffers, sub-groups and the persistence threshold are promises."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import micro_batch, unequal
from models import LIVE_NUMEL, build, make_config, tokens, trainability
from probe import layout_of
from reference import differences, snapshot

from offload.errors import BudgetError, ConfigError
from zero.plan.traffic import step_traffic

Open = Callable[..., Any]
BLOCK_NUMEL = 12_704
"""Elements of one block of the tiny GPT, its largest module."""


def run(engine: Any, steps: int = 4, first: int = 0) -> Any:
    for step in range(first, first + steps):
        micro_batch(engine, step)
    return engine.statistics()


def host_bytes(plan: Any) -> int:
    return sum(row.nbytes for row in plan.rows if row.tier == "host")


@pytest.mark.parametrize("model", ["gpt", "tied", "lora", "reused"])
@pytest.mark.parametrize("live_numel", [17_000, 24_000, 30_000, LIVE_NUMEL, 1_000_000])
def test_live_elements_never_exceed_the_limit(open_engine: Open, nvme_path: Any, model: str, live_numel: int) -> None:
    zero = {
        "stage3_max_live_parameters": live_numel,
        "stage3_prefetch_bucket_size": 1_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
    }
    engine = open_engine(build(model), make_config(("nvme", "nvme"), nvme_path, zero=zero))
    statistics = run(engine)
    assert 0 < statistics.live_numel_peak <= live_numel


def test_a_larger_limit_is_used(open_engine: Open, nvme_path: Any) -> None:
    """Else "never exceeds" would be kept by never looking ahead."""
    zero = {"stage3_prefetch_bucket_size": 1_000_000, "stage3_max_live_parameters": 1_000_000}
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, zero=zero))
    assert run(engine).live_numel_peak > BLOCK_NUMEL


def test_a_limit_smaller_than_one_unit_holds_that_unit_and_a_warning_names_both(
    open_engine: Open, nvme_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(("nvme", "nvme"), nvme_path, zero={"stage3_max_live_parameters": 1_500})
    engine = open_engine(build("gpt"), config)
    (warning,) = [r.getMessage() for r in caplog.records if "stage3_max_live_parameters" in r.getMessage()]
    assert any(unit.name in warning for unit in engine.units)
    statistics = run(engine, steps=2)
    assert max(unit.numel for unit in engine.units) <= statistics.live_numel_peak <= engine.plan.limits.live_numel_max


MIDDLE_KEYS = {"stage3_max_live_parameters": 4_000_000, "stage3_prefetch_bucket_size": 800_000}


def middle_config(pair: tuple[str, str], nvme_path: Any, **more: Any) -> dict[str, Any]:
    return make_config(pair, nvme_path, zero={**MIDDLE_KEYS, "sub_group_size": 65_536}, **more)


def budgets(open_engine: Open, config: dict[str, Any], shares: tuple[float, ...]) -> list[int]:
    """Host budgets from the bare working set (share 0) to room for everything that is on NVMe without one (share 1)."""
    engine = open_engine(build("middle"), config)
    rows = engine.plan.rows
    engine.close()
    least = sum(row.nbytes for row in rows if row.tier == "host")
    rest = sum(row.nbytes for row in rows if row.tier == "nvme")
    return [least + int(rest * share) for share in shares]


@pytest.mark.parametrize("pair", [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu"), ("cpu", "cpu")], ids="-".join)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_host_bytes_never_exceed_the_budget(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], accumulation: int
) -> None:
    config = middle_config(pair, nvme_path, accumulation=accumulation)
    for budget in budgets(open_engine, config, (0.0, 0.2, 0.6)):
        engine = open_engine(build("middle"), {**config, "memory_budget": {"host": budget}})
        assert host_bytes(engine.plan) <= budget
        statistics = run(engine, steps=2 * accumulation)
        assert statistics.arena_peak_bytes <= budget
        if "nvme" in pair:
            assert statistics.arena_peak_bytes > 0 and statistics.nvme_read_bytes > 0
        engine.close()


def test_a_budget_that_cannot_work_is_refused_with_the_knob_to_turn(open_engine: Open, nvme_path: Any) -> None:
    config = make_config(("nvme", "nvme"), nvme_path, memory_budget={"host": 8192})
    with pytest.raises((ConfigError, BudgetError), match="memory_budget"):
        open_engine(build("gpt"), config)


def test_a_host_tier_larger_than_the_budget_is_refused(open_engine: Open, nvme_path: Any) -> None:
    """offload to cpu is a promise to hold everything; a budget below it is a contradiction, not a hint."""
    config = make_config(("cpu", "cpu"), nvme_path)
    needed = host_bytes(open_engine(build("gpt"), config).plan)
    with pytest.raises((ConfigError, BudgetError), match="memory_budget"):
        open_engine(build("gpt"), {**config, "memory_budget": {"host": needed // 4}})


def moved_bytes(engine: Any) -> int:
    """NVMe bytes so far; called before a step, when the last one has been asked for by a forward."""
    engine.synchronize()
    done = engine.statistics()
    return int(done.nvme_read_bytes + done.nvme_write_bytes)


def traffic_of_steady_steps(engine: Any, accumulation: int) -> int:
    """NVMe bytes of two optimizer steps once the trace is known, from before one step to before another."""
    run(engine, steps=3 * accumulation)
    marks = []
    for index in range(2 * accumulation + 1):
        engine.backward(engine(tokens(index + 3)))
        if index % (2 * accumulation) == 0:
            marks.append(moved_bytes(engine))
        engine.step()
    return marks[1] - marks[0]


@pytest.mark.broad
@pytest.mark.parametrize(
    ("accumulation", "pair"),
    [
        *[(1, ("nvme", "nvme")), (2, ("cpu", "nvme")), (2, ("nvme", "cpu"))],
        pytest.param(2, ("nvme", "nvme"), marks=pytest.mark.slow),
        pytest.param(1, ("cpu", "nvme"), marks=pytest.mark.slow),
        pytest.param(1, ("nvme", "cpu"), marks=pytest.mark.slow),
    ],
)
def test_a_larger_budget_never_means_more_traffic(
    open_engine: Open, nvme_path: Any, pair: tuple[str, str], accumulation: int
) -> None:
    config = middle_config(pair, nvme_path, accumulation=accumulation)
    traffic: list[int] = []
    for budget in budgets(open_engine, config, (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0)):
        engine = open_engine(build("middle"), {**config, "memory_budget": {"host": budget}})
        traffic.append(traffic_of_steady_steps(engine, accumulation))
        engine.close()
    assert traffic[0] > 0
    assert traffic == sorted(traffic, reverse=True), traffic
    assert traffic[-1] < traffic[0] // 2, "memory that is granted must be used"


def test_buffer_count_times_buffer_size_caps_the_parameter_arena(open_engine: Open, nvme_path: Any) -> None:
    """Elements, as DeepSpeed counts them: a cap lower by n elements plans at least 2n bytes less."""
    names = trainability(build("gpt"))
    planned, held = [], []
    for count in (2, 3, 4):
        keys = {"offload_param": {"buffer_count": count, "buffer_size": 1 << 20}}
        engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, zero=keys))
        run(engine)
        planned.append(host_bytes(engine.plan))
        held.append(snapshot(engine, names))
        assert engine.statistics().arena_peak_bytes <= planned[-1]
    assert [b - a >= 2 << 20 for a, b in itertools.pairwise(planned)] == [True, True], planned
    assert differences(held[0], held[1]) == differences(held[0], held[2]) == []


@pytest.mark.parametrize("buffer_numel", [4096, 5000, 10_000])
def test_no_unit_is_too_large_for_its_buffers(open_engine: Open, nvme_path: Any, buffer_numel: int) -> None:
    plain = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    keys = {"offload_param": {"buffer_count": 2, "buffer_size": buffer_numel}}
    small = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, zero=keys))
    assert max(unit.numel for unit in small.units) > buffer_numel
    run(plain)
    run(small)
    assert unequal(plain, small) == []


def test_units_up_to_the_persistence_threshold_are_never_released(open_engine: Open, nvme_path: Any) -> None:
    threshold = 100
    keys = {"stage3_param_persistence_threshold": threshold}
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, zero=keys))
    persistent = [unit for unit in engine.units if unit.persistent]
    assert persistent
    small = {name for name, p in build("gpt").named_parameters() if p.numel() <= threshold}
    assert {slot.names[0] for unit in persistent for slot in unit.slots} == small
    statistics = run(engine)
    for unit in engine.units:
        released = statistics.releases_by_unit.get(unit.name, 0)
        assert (released == 0) if unit.persistent else (released >= 4), unit.name
    without = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    assert not any(unit.persistent for unit in without.units)
    run(without)
    assert unequal(engine, without) == []


@pytest.mark.parametrize("buffer_count", [2, 5])
def test_records_in_flight_change_no_number(open_engine: Open, nvme_path: Any, buffer_count: int) -> None:
    keys = {"offload_optimizer": {"buffer_count": buffer_count}, "sub_group_size": 4096}
    few = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path, zero=keys))
    plain = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    run(few)
    run(plain)
    assert unequal(few, plain) == []


def test_the_plan_has_a_row_for_every_tier_in_use_and_a_table_to_print(open_engine: Open, nvme_path: Any) -> None:
    engine = open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path))
    tiers = {row.tier for row in engine.plan.rows}
    assert tiers <= {"device", "host", "nvme"} and {"host", "nvme"} <= tiers
    trainable = sum(p.numel() for p in build("gpt").parameters())
    on_nvme = sum(row.nbytes for row in engine.plan.rows if row.tier == "nvme")
    assert on_nvme >= 12 * trainable, "weight 2, remainder 2, moments 8 bytes a parameter"
    table = engine.plan.table()
    assert all(row.array in table for row in engine.plan.rows)


PRINTS = """
import os, sys
import zero
from models import build, make_config
from offload.system import linux

real = linux.reserve
def marked(*arguments):
    sys.stderr.write("ALLOCATES\\n")
    return real(*arguments)
linux.reserve = marked
config = make_config(("nvme", "nvme"), sys.argv[1], log_level="info")
zero.initialize(model=build("gpt"), config=config)[0].close()
"""


@pytest.mark.broad
def test_the_plan_is_printed_before_anything_is_allocated(nvme_path: Any) -> None:
    tests = Path(__file__).parent.parent
    path = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PRINTS, str(nvme_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=120,
    )
    plan, marker, _ = done.stdout.partition("ALLOCATES")
    assert marker, "the swap file was never reserved"
    assert all(word in plan for word in ("plan", "device", "host", "nvme", "weights", "optimizer states"))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("live_numel", [20_000, 80_000, 400_000, 1_000_000, 10**9, None])
def test_units_stay_for_their_next_use_as_far_as_the_plan_foretells(
    live_numel: int | None, accumulation: int, open_engine: Open, nvme_path: Any
) -> None:
    """With the default reuse distance. A model that fits whole is fetched once in a step, accumulated or not."""
    config = make_config(("cpu", "cpu"), nvme_path, accumulation=accumulation)
    section = config["zero_optimization"]
    del section["stage3_max_reuse_distance"], section["stage3_max_live_parameters"]
    if live_numel is not None:
        section["stage3_max_live_parameters"] = live_numel
    engine = open_engine(build("middle"), config)
    marks: list[int] = []
    for index in range(5 * accumulation):
        engine.backward(engine(tokens(index)))
        marks.append(engine.statistics().gathered_bytes)
        engine.step()
    gathered = marks[-1] - marks[-1 - accumulation]
    foretold = step_traffic(engine.plan, layout_of(engine), on_gpu=True).copied_in_bytes
    smallest_bytes = min(unit.nbytes for unit in engine.units)
    assert foretold - 2 * accumulation * smallest_bytes <= gathered <= foretold
    if live_numel == 10**9:
        assert gathered == sum(unit.nbytes for unit in engine.units)
