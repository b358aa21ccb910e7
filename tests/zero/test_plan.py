"""The plan: rows that add up, caches that grow with the budget, refusals that name the knob."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import make_config

from offload.errors import BudgetError, ZeroInfinityError
from offload.memory.device_poison import GRANULE_BYTES
from zero.config import load_config
from zero.params.layout import Layout, Placement, UnitContent, build_layout
from zero.params.units import LiveNumels
from zero.plan.machine import Machine
from zero.plan.plan import DEVICE, HOST, NVME, Plan
from zero.plan.planner import AUTO_SHARE, Planner

TIERS = ("none", "cpu", "nvme")
BLOCK = 4096
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MACHINE = Machine(
    available_bytes=1 << 40, available_source="MemAvailable", memlock_bytes=None, device_bytes=1 << 40, rss_bytes=123
)


def layout_of(*numels: int, dtype: torch.dtype = torch.bfloat16, frozen: tuple[int, ...] = ()) -> Layout:
    return build_layout(
        [
            UnitContent(f"u{i}", ((i, (f"p{i}",), torch.Size((n,))),), dtype, i not in frozen, False)
            for i, n in enumerate(numels)
        ],
        Placement(),
    )


LARGE = layout_of(*[200 * 4096] * 40)
LAYOUT = layout_of(40_000, 120_000, 90_000, 90_000, 90_000, 8_000, frozen=(2,))


@dataclass(frozen=True)
class Wish:
    """One planning problem, told as a config would."""

    pair: tuple[str, str] = ("nvme", "nvme")
    host: int | str | None = None
    device_budget: int | None = None
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    layout: Layout = LAYOUT
    machine: Machine = MACHINE
    device: torch.device = CPU
    in_place: bool = True
    around_max: int = 0

    def plan(self) -> Plan:
        budget = {"host": self.host, "device": self.device_budget}
        config = make_config(
            self.pair,
            "/anywhere",
            accumulation=self.accumulation,
            zero={"stage3_max_live_parameters": 1_000_000, "stage3_max_reuse_distance": 0, **self.zero},
            memory_budget={key: value for key, value in budget.items() if value is not None},
        )
        if self.zero.get("stage3_max_live_parameters", 0) is None:
            del config["zero_optimization"]["stage3_max_live_parameters"]
        uses = LiveNumels.for_sequential_use(self.layout, self.around_max)
        planner = Planner(self.layout, load_config(config), self.machine, self.device, self.in_place, uses)
        return planner.make_plan()


def named_bytes(message: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d{1,3}(?:,\d{3})+|\d+", message)]


def least_host_bytes(wish: Wish) -> int:
    """The minimum that the refusal of a hopeless budget names."""
    with pytest.raises(BudgetError, match=r"memory_budget\.host") as refusal:
        replace(wish, host=1).plan()
    return named_bytes(str(refusal.value).partition("at least")[2])[0]


def traffic_bytes(plan: Plan, layout: Layout) -> int:
    """NVMe bytes of one step with one micro-batch: weights read twice and updated, states and gradients in and out."""
    widths = [unit.dtype.itemsize for unit in layout.units]
    total = 0
    for unit in layout.units:
        nbytes = unit.shard_numel * widths[unit.index]
        if plan.weight_tiers[unit.index] == NVME:
            total += (2 + (2 if unit.trainable else 0)) * nbytes
        if plan.gradient_tiers.get(unit.index) == NVME:
            total += 2 * unit.shard_numel * (4 if plan.gradient_wide else unit.dtype.itemsize)
    for group, tier in zip(plan.sub_groups, plan.state_tiers, strict=True):
        if tier == NVME:
            total += 2 * plan.state_format(layout.spaces[group.space]).nbytes(group.end - group.begin)
    return total


def ladder(wish: Wish, rungs: int = 120) -> list[int]:
    least = least_host_bytes(wish)
    top = 2 * layout_bytes(wish.layout) + least
    return [least + (top - least) * rung // rungs for rung in range(rungs + 1)]


def layout_bytes(layout: Layout) -> int:
    return sum(unit.shard_numel * 16 for unit in layout.units)


# ---- what the plan says -----------------------------------------------------------------------


@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("param", TIERS)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_rows_add_up_to_what_each_tier_holds(param: str, states: str, accumulation: int) -> None:
    plan = Wish(pair=(param, states), accumulation=accumulation).plan()
    rows = {(row.tier, row.array): row.nbytes for row in plan.rows}
    assert len(rows) == len(plan.rows) and all(nbytes > 0 for nbytes in rows.values())
    home = {"none": DEVICE, "cpu": HOST, "nvme": NVME}
    numel = sum(unit.shard_numel for unit in LAYOUT.units)
    trained = sum(unit.shard_numel for unit in LAYOUT.units if unit.trainable)
    gradient_home = DEVICE if states == "none" else HOST
    assert rows[home[param], "weights"] == 2 * numel
    assert rows[home[states], "optimizer states"] == 10 * trained
    assert rows[gradient_home, "gradients"] == trained * (4 if accumulation > 1 else 2)
    for tier in (DEVICE, HOST, NVME):
        assert plan.tier_bytes(tier) == sum(nbytes for (where, _), nbytes in rows.items() if where == tier)
    assert plan.swap_bytes == plan.tier_bytes(NVME)


def test_fp32_states_have_no_remainder() -> None:
    layout = layout_of(40_000, 120_000, dtype=torch.float32)
    plan = Wish(layout=layout).plan()
    rows = {(row.tier, row.array): row.nbytes for row in plan.rows}
    assert rows[NVME, "optimizer states"] == 8 * layout.numel and rows[NVME, "weights"] == 4 * layout.numel


@pytest.mark.parametrize("pair", [("nvme", "nvme"), ("cpu", "nvme"), ("none", "none")], ids="-".join)
def test_the_table_prints_every_row_and_every_total(pair: tuple[str, str]) -> None:
    plan = Wish(pair=pair).plan()
    lines = plan.table().splitlines()
    for row in plan.rows:
        assert any(row.tier in line and row.array in line and f"{row.nbytes:,}" in line for line in lines), row
    for tier in (DEVICE, HOST, NVME):
        assert any(tier in line and "total" in line and f"{plan.tier_bytes(tier):,}" in line for line in lines)


@pytest.mark.parametrize("states", ["none", "cpu", "nvme"])
def test_without_a_budget_nvme_has_no_cache(states: str) -> None:
    plan = Wish(pair=("nvme", states)).plan()
    assert set(plan.weight_tiers.values()) == {NVME}
    if states == "nvme":
        assert set(plan.state_tiers) == {NVME}
    host = {row.array for row in plan.rows if row.tier == HOST}
    assert "weights" not in host


@given(st.integers(0, 500_000))
def test_max_in_cpu_caps_the_cache_in_elements(cap_numel: int) -> None:
    for host in (None, 10**9):
        plan = Wish(host=host, zero={"offload_param": {"max_in_cpu": cap_numel}}).plan()
        cached = [unit.numel for unit in LAYOUT.units if plan.weight_tiers[unit.index] == HOST]
        assert sum(cached) <= cap_numel
        in_order = [unit.numel for unit in LAYOUT.units]
        if len(cached) < len(in_order):
            assert sum(cached) + in_order[len(cached)] > cap_numel, "the next one would have fitted too"


def test_persistent_units_stay_on_the_device_whatever_the_tier() -> None:
    contents = [
        UnitContent("small", ((0, ("a",), torch.Size((10,))),), torch.bfloat16, True, True),
        UnitContent("large", ((1, ("b",), torch.Size((9_000,))),), torch.bfloat16, True, False),
    ]
    plan = Wish(layout=build_layout(contents, Placement())).plan()
    assert plan.weight_tiers == {0: DEVICE, 1: NVME}


# ---- budgets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "nvme"), ("none", "nvme")], ids="-".join)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("zero", [{}, {"sub_group_size": 8192}, {"offload_optimizer": {"buffer_count": 2}}], ids=str)
def test_a_larger_host_budget_never_means_more_on_nvme_nor_more_traffic(
    pair: tuple[str, str], accumulation: int, zero: dict[str, Any]
) -> None:
    wish = Wish(pair=pair, accumulation=accumulation, zero=zero)
    plans = [replace(wish, host=budget).plan() for budget in ladder(wish)]
    swaps = [plan.swap_bytes for plan in plans]
    traffic = [traffic_bytes(plan, LAYOUT) for plan in plans]
    assert swaps == sorted(swaps, reverse=True)
    assert traffic == sorted(traffic, reverse=True)
    assert swaps[0] > swaps[-1] == 0, "the ladder must lead from the working set to everything cached"


@pytest.mark.parametrize("pair", [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "nvme")], ids="-".join)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_plan_keeps_every_budget_it_accepts_and_the_named_minimum_is_enough(
    pair: tuple[str, str], accumulation: int
) -> None:
    wish = Wish(pair=pair, accumulation=accumulation)
    for budget in ladder(wish, 40):
        assert replace(wish, host=budget).plan().tier_bytes(HOST) <= budget
    with pytest.raises(BudgetError):
        replace(wish, host=least_host_bytes(wish) - 1).plan()


layouts = st.lists(st.integers(0, 60_000), min_size=1, max_size=6).flatmap(
    lambda numels: st.tuples(
        st.sampled_from([torch.bfloat16, torch.float32]),
        st.lists(st.sampled_from(range(len(numels))), unique=True, max_size=len(numels) - 1),
    ).map(lambda more: layout_of(*numels, dtype=more[0], frozen=tuple(more[1])))
)


@settings(max_examples=60, deadline=None)
@given(layouts, st.sampled_from(TIERS), st.sampled_from(TIERS), st.sampled_from([1, 2]), st.integers(1, 20_000_000))
def test_any_budget_is_either_kept_or_refused_with_a_minimum_that_works(
    layout: Layout, param: str, states: str, accumulation: int, budget: int
) -> None:
    wish = Wish(pair=(param, states), layout=layout, accumulation=accumulation)
    try:
        plan = replace(wish, host=budget).plan()
    except BudgetError as error:
        assert "memory_budget.host" in str(error)
        least = least_host_bytes(wish)
        assert least > budget
        assert replace(wish, host=least).plan().tier_bytes(HOST) <= least
    else:
        assert plan.tier_bytes(HOST) <= budget


@settings(max_examples=40, deadline=None)
@given(layouts, st.sampled_from(TIERS), st.sampled_from(TIERS), st.integers(0, 4_000_000))
def test_any_device_budget_is_either_kept_or_refused_with_a_minimum_that_works(
    layout: Layout, param: str, states: str, budget: int
) -> None:
    wish = Wish(pair=(param, states), layout=layout, zero={"stage3_max_live_parameters": None})
    for in_place in (True, False):
        asked = replace(wish, in_place=in_place, device_budget=budget)
        try:
            plan = asked.plan()
        except BudgetError as error:
            assert "memory_budget.device" in str(error)
            if "at least" not in str(error):
                continue
            least = named_bytes(str(error).partition("at least")[2])[0]
            assert least > budget
            assert replace(asked, device_budget=least).plan().tier_bytes(DEVICE) <= least
        else:
            assert plan.tier_bytes(DEVICE) <= budget


def test_an_auto_budget_takes_a_part_of_what_is_free() -> None:
    machine = replace(MACHINE, available_bytes=200_000_000)
    plan = Wish(host="auto", machine=machine).plan()
    assert 0 < plan.tier_bytes(HOST) < 200_000_000
    assert plan.tier_bytes(NVME) == 0


# ---- sub-groups and limits --------------------------------------------------------------------


@given(st.integers(1, 10**9), st.integers(2, 6))
def test_sub_group_size_and_buffer_count_bound_what_is_in_flight(numel: int, count: int) -> None:
    plan = Wish(zero={"sub_group_size": numel, "offload_optimizer": {"buffer_count": count}}).plan()
    assert plan.sub_groups_in_flight == count
    assert all(group.end - group.begin <= max(numel, BLOCK) for group in plan.sub_groups)


def test_explicit_limits_are_taken_as_they_are_and_never_more_than_the_model() -> None:
    keys = {"stage3_max_live_parameters": 200_000, "stage3_prefetch_bucket_size": 77, "stage3_max_reuse_distance": 5}
    limits = Wish(zero=keys).plan().limits
    assert (limits.live_numel_max, limits.prefetch_numel, limits.reuse_numel_max) == (200_000, 77, 5)
    assert Wish(zero={"stage3_max_live_parameters": 1e9}).plan().limits.live_numel_max == LAYOUT.numel


def test_derived_limits_hold_the_largest_unit_and_neighbours() -> None:
    limits = Wish(zero={"stage3_max_live_parameters": None}, around_max=4096).plan().limits
    numels = [unit.numel for unit in LAYOUT.units]
    assert max(numels) < limits.live_numel_max <= sum(numels)


# ---- refusals ---------------------------------------------------------------------------------


def test_a_unit_larger_than_the_live_limit_is_gathered_all_the_same_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    largest = max(unit.numel for unit in LAYOUT.units)
    assert Wish(zero={"stage3_max_live_parameters": 100_000}).plan().limits.live_numel_max == largest
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "stage3_max_live_parameters" in said and "u1" in said and f"{largest:,}" in said
    caplog.clear()
    assert Wish(zero={"stage3_max_live_parameters": largest}).plan().limits.live_numel_max == largest
    assert not caplog.records


@settings(max_examples=120, deadline=None)
@given(
    layouts,
    st.tuples(st.sampled_from(TIERS), st.sampled_from(TIERS)),
    st.sampled_from([1, 2]),
    st.sampled_from([CPU, CUDA]),
    st.sampled_from([None, 1, 50_000]),
    st.tuples(st.integers(0, 6_000_000), st.integers(0, 3_000_000)),
)
def test_any_machine_is_planned_for_or_refused_with_the_least_memory_that_would_do(
    layout: Layout,
    pair: tuple[str, str],
    accumulation: int,
    device: torch.device,
    live: int | None,
    free: tuple[int, int],
) -> None:
    """The least that is named is accepted, and one byte less is not."""
    have = {"host": free[0], "device": free[1] if device == CUDA else free[0]}

    def plan(have: dict[str, int]) -> Plan:
        machine = replace(MACHINE, available_bytes=have["host"], device_bytes=have["device"])
        keys = {"stage3_max_live_parameters": live}
        return Wish(pair, accumulation=accumulation, zero=keys, layout=layout, machine=machine, device=device).plan()

    for _ in ("host", "device", "then all is there"):
        try:
            found = plan(have)
            break
        except BudgetError as refusal:
            message = str(refusal)
            what = "device" if "device memory" in message else "host"
            least = named_bytes(message.partition("at least")[2])[0]
            assert least > have[what]
            assert "offload_" in message or "stage3_max_live_parameters" in message or "nodes" in message
            with pytest.raises(BudgetError):
                plan({**have, what: least - 1})
            have = {**have, what: least}
    else:
        pytest.fail(f"what was named is not enough: {have}")
    on_cpu = found.tier_bytes(DEVICE) if device == CPU else 0
    assert found.tier_bytes(HOST) + on_cpu <= have["host"]
    assert device == CPU or found.tier_bytes(DEVICE) <= have["device"]


@pytest.mark.parametrize("pair", [("none", "none"), ("cpu", "cpu"), ("cpu", "none")], ids="-".join)
def test_a_refusal_names_the_planes_that_could_move(pair: tuple[str, str]) -> None:
    with pytest.raises(BudgetError, match="cgroup") as refusal:
        Wish(pair, machine=replace(MACHINE, available_bytes=100, available_source="the memory cgroup's limit")).plan()
    for block, tier in zip(("offload_param", "offload_optimizer"), pair, strict=True):
        assert (f'{block}.device "nvme"' in str(refusal.value)) is (tier != "nvme")


def test_what_is_on_nvme_already_is_not_advised_to_go_there() -> None:
    for device in (CPU, CUDA):
        with pytest.raises(BudgetError) as refusal:
            Wish(machine=replace(MACHINE, available_bytes=100), device=device).plan()
        assert "offload_param.device" not in str(refusal.value)


# ---- gradients go to NVMe by themselves ------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("pair", [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu")], ids="-".join)
def test_gradients_go_to_nvme_as_far_as_the_host_is_short(pair: tuple[str, str], device: torch.device) -> None:
    wish = Wish(pair, layout=LARGE, device=device, zero={"sub_group_size": 8192})
    roomy = wish.plan()
    assert set(roomy.gradient_tiers.values()) == {HOST} and not roomy.is_host_bounded
    need = roomy.tier_bytes(HOST) + (roomy.tier_bytes(DEVICE) if device == CPU else 0)
    gradients = sum(row.nbytes for row in roomy.rows if (row.tier, row.array) == (HOST, "gradients"))
    spilled = []
    for lacking in range(1, gradients // 10 * 9, gradients // 10):
        machine = replace(MACHINE, available_bytes=int((need - lacking) / AUTO_SHARE))
        plan = replace(wish, machine=machine).plan()
        assert plan.is_host_bounded or device == CPU, (
            "what passes through the device is host memory there, and goes first"
        )
        spilled.append(sum(row.nbytes for row in plan.rows if (row.tier, row.array) == (NVME, "gradients")))
        kept = {plan.weight_tiers[unit.index] for unit in LARGE.units}
        assert kept == set(roomy.weight_tiers.values()), "weights are cached by a budget, not by a shortage"
    assert spilled == sorted(spilled) and 0 < spilled[-1] <= gradients and (device == CPU or spilled[0])


def test_without_a_disk_gradients_stay_and_the_shortage_is_told() -> None:
    need = Wish(("cpu", "cpu"), layout=LARGE).plan()
    short = replace(MACHINE, available_bytes=need.tier_bytes(HOST) // 2)
    with pytest.raises(BudgetError, match="offload_optimizer"):
        Wish(("cpu", "cpu"), layout=LARGE, machine=short).plan()


# ---- what the device is asked for -------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_device_with_less_is_asked_for_less_until_one_call_does_not_fit(device: torch.device) -> None:
    wish = Wish(layout=LARGE, zero={"stage3_max_live_parameters": None}, device=device)
    asked = []
    for free in (*range(120_000_000, 24_000_000, -4_000_000), *range(24_000_000, 0, -250_000)):
        have = replace(MACHINE, device_bytes=free, available_bytes=free if device == CPU else 1 << 40)
        try:
            asked.append(replace(wish, machine=have).plan().tier_bytes(DEVICE))
        except BudgetError:
            break
    assert asked == sorted(asked, reverse=True) and len(set(asked)) > 3
    largest, stand_in = max(unit.nbytes for unit in LARGE.units), GRANULE_BYTES if device == CUDA else 0
    assert 2 * largest <= asked[-1] - stand_in < 2.2 * largest, "one unit and its gradient"


def test_a_fifth_of_what_a_gpu_has_free_is_used_and_no_more_unless_it_is_needed() -> None:
    wish = Wish(layout=LARGE, zero={"stage3_max_live_parameters": None}, device=CUDA)
    lean = replace(wish, machine=replace(MACHINE, device_bytes=30_000_000)).plan()
    for free in (60_000_000, 80_000_000, 100_000_000, 200_000_000, 500_000_000):
        plan = replace(wish, machine=replace(MACHINE, device_bytes=free)).plan()
        used = plan.tier_bytes(DEVICE)
        assert lean.tier_bytes(DEVICE) <= used <= max(free // 5, lean.tier_bytes(DEVICE))
        if plan.limits.live_numel_max < LARGE.numel and used > lean.tier_bytes(DEVICE):
            assert used > 0.95 * free / 5
    assert plan.limits.live_numel_max == LARGE.numel, "all of it fits into a fifth of the largest"
    unknown = replace(wish, machine=replace(MACHINE, device_bytes=None)).plan()
    assert unknown.tier_bytes(DEVICE) < plan.tier_bytes(DEVICE), "nothing is spent that nobody knows of"


def test_memory_that_may_not_be_lockable_is_noted_where_it_must_be_locked() -> None:
    host = Wish(device=CUDA).plan().tier_bytes(HOST)
    tight = replace(MACHINE, memlock_bytes=host - 1)
    plan = Wish(device=CUDA, machine=tight).plan()
    assert any("RLIMIT_MEMLOCK" in note and "ulimit" in note for note in plan.notes)
    assert all(note in plan.table() for note in plan.notes)
    for calm in (Wish(device=CUDA, machine=replace(MACHINE, memlock_bytes=host)), Wish(device=CPU, machine=tight)):
        assert not any("RLIMIT_MEMLOCK" in note for note in calm.plan().notes)
    on_host = Wish(("cpu", "cpu"), device=CUDA)
    states = sum(row.nbytes for row in on_host.plan().rows if (row.tier, row.array) == (HOST, "optimizer states"))
    pinned = on_host.plan().tier_bytes(HOST) - states  # the host updates states where they are
    assert states > 0 and pinned > 0
    for limit, noted in ((pinned - 1, True), (pinned, False)):
        notes = replace(on_host, machine=replace(MACHINE, memlock_bytes=limit)).plan().notes
        assert any("RLIMIT_MEMLOCK" in note for note in notes) is noted


def test_an_explicit_live_limit_is_the_most_and_gives_way_to_the_device_budget() -> None:
    wish = Wish(zero={"stage3_max_live_parameters": 400_000}, device_budget=800_000)
    plan = wish.plan()
    assert plan.limits.live_numel_max < 400_000 and plan.tier_bytes(DEVICE) <= 800_000
    with pytest.raises(BudgetError, match=r"memory_budget\.device.*stage3_max_live_parameters"):
        replace(wish, device_budget=200_000).plan()


@settings(max_examples=60, deadline=None)
@given(layouts, st.sampled_from(TIERS), st.sampled_from(TIERS), st.integers(0, 10_000_000))
def test_planning_fails_only_with_an_error_made_for_the_user(
    layout: Layout, param: str, states: str, available: int
) -> None:
    machine = replace(MACHINE, available_bytes=available, device_bytes=available)
    for host in (None, "auto"):
        for device in (CPU, CUDA):
            wish = Wish(pair=(param, states), layout=layout, machine=machine, host=host, device=device)
            try:
                plan = wish.plan()
            except ZeroInfinityError as error:
                assert len(str(error)) > 20
            else:
                on_host = plan.tier_bytes(HOST) + (plan.tier_bytes(DEVICE) if device == CPU else 0)
                assert on_host <= available
                assume(plan.rows)
