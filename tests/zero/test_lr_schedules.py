"""The schedules by themselves: DeepSpeed's values bit for bit, the documented formulas, and what cannot be."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import schedule_cases
import torch
from deepspeed_run import WANTED_VERSION
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from zero import lr_schedules
from zero.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

RECORDED = json.loads(schedule_cases.RECORDED.read_text(encoding="utf-8"))


def adamw(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.01,)])


def rates(schedule: Schedule, steps: int) -> list[float]:
    """Learning rate of the first group: what each optimizer step uses."""
    seen = []
    for _ in range(steps):
        seen.append(float(schedule.optimizer.param_groups[0]["lr"]))
        schedule.step()
    return seen


# ---- DeepSpeed's values ------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_every_step_has_the_values_recorded_from_deepspeed(name: str) -> None:
    kind, arguments = schedule_cases.cases()[name]
    assert schedule_cases.trace(lr_schedules, kind, arguments) == RECORDED[name]


def test_the_records_hold_every_case_and_every_schedule() -> None:
    cases = schedule_cases.cases()
    assert RECORDED.keys() == cases.keys()
    assert {kind for kind, _ in cases.values()} == set(VALID_LR_SCHEDULES)
    assert all(len({json.dumps(line) for line in lines}) > 1 for lines in RECORDED.values())


def real_deepspeed_is_here() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("deepspeed") == WANTED_VERSION
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not real_deepspeed_is_here(), reason=f"deepspeed {WANTED_VERSION} is not installed")
def test_the_deepspeed_that_is_installed_says_what_was_recorded(tmp_path: Path) -> None:
    target = tmp_path / "made.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, schedule_cases.__file__, str(target)], check=True, timeout=240, env=environment)
    assert json.loads(target.read_text(encoding="utf-8")) == RECORDED


# ---- the documented formulas -------------------------------------------------------------------


@given(warmup=st.integers(1, 30), least=st.floats(0, 1e-3), most=st.floats(1e-3, 1), linear=st.booleans())
def test_warming_up_rises_from_least_to_most_and_stays(warmup: int, least: float, most: float, linear: bool) -> None:
    schedule = WarmupLR(adamw(), least, most, warmup, "linear" if linear else "log")
    seen = rates(schedule, 40)
    rises = max(2, warmup)

    def share(iteration: int) -> float:
        if iteration >= rises:
            return 1.0
        return iteration / rises if linear else math.log(iteration + 1) / math.log(rises)

    assert seen[0] == least
    assert seen[1:] == pytest.approx([least + (most - least) * share(i) for i in range(39)], rel=1e-12)
    # The last iteration of log(n) / log(n) may be an ulp off 1.
    assert all(after >= before * (1 - 1e-15) for before, after in itertools.pairwise(seen))
    assert seen[-1] == pytest.approx(most, rel=1e-15)


@given(warmup=st.integers(1, 12), total=st.integers(1, 25))
def test_decay_reaches_nothing_at_the_last_step_and_never_goes_below(warmup: int, total: int) -> None:
    seen = rates(WarmupDecayLR(adamw(), total, 0.0, 1.0, warmup, "linear"), 40)
    rises = max(2, warmup)
    assert min(seen) == 0.0 and seen[max(total, rises) + 1 :] == [0.0] * (39 - max(total, rises))
    for iteration in range(rises, max(total, rises)):
        assert seen[iteration + 1] == pytest.approx((total - iteration) / (total - rises), rel=1e-12)


@given(warmup=st.integers(1, 12), total=st.integers(1, 25), floor=st.floats(0, 1), lr=st.floats(1e-6, 1))
def test_the_cosine_falls_from_the_groups_own_rate_to_its_floor_and_stays(
    warmup: int, total: int, floor: float, lr: float
) -> None:
    seen = rates(WarmupCosineLR(adamw(lr), total, 0.0, warmup, floor), 40)
    falling = seen[max(2, warmup) + 1 :]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(lr * floor, abs=lr * 1e-15)
    assert max(seen) <= lr * (1 + 1e-15)


@given(first=st.integers(1, 12), second=st.integers(1, 12))
def test_a_cycle_is_at_its_top_after_the_first_half_and_at_its_least_at_both_ends(first: int, second: int) -> None:
    optimizer = adamw()
    schedule = OneCycle(optimizer, 0.1, 0.9, cycle_first_step_size=first, cycle_second_step_size=second)
    lrs, momenta = [], []
    for _ in range(first + second + 3):
        lrs.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["betas"][0])
        schedule.step()
    assert lrs[0] == pytest.approx(0.1) and lrs[first] == pytest.approx(0.9) == max(lrs)
    assert lrs[first + second :] == pytest.approx([0.1] * 3)
    # Momentum is the mirror image, but for the very first step, which has the least of it.
    assert momenta[0] == 0.8 and momenta[first] == pytest.approx(0.8) and momenta[first + second] == pytest.approx(0.9)


@given(size=st.integers(1, 9), rate=st.floats(0.1, 3))
def test_a_range_test_grows_by_its_rate_every_interval(size: int, rate: float) -> None:
    smooth = rates(LRRangeTest(adamw(), 0.5, size, rate), 3 * size + 1)
    stairs = rates(LRRangeTest(adamw(), 0.5, size, rate, True), 3 * size + 1)
    assert smooth[::size] == pytest.approx([0.5 * (1 + rate * k) for k in range(4)])
    assert stairs[:: max(size, 1)] == pytest.approx(smooth[::size])
    assert len(set(stairs)) == 4


# ---- beginning, going on -----------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_a_schedule_that_is_loaded_goes_on_as_if_it_had_not_stopped(name: str) -> None:
    kind, arguments = schedule_cases.cases()[name]
    whole, adam = getattr(lr_schedules, kind)(schedule_cases.optimizer(), **arguments), schedule_cases.optimizer()
    for _ in range(9):
        whole.step()
    part = getattr(lr_schedules, kind)(adam, **arguments)
    part.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert part.get_last_lr() == whole.get_last_lr() and part.state_dict() == whole.state_dict()
    for _ in range(5):
        whole.step()
        part.step()
        now = [(group["lr"], group["betas"]) for group in adam.param_groups]
        assert now == [(group["lr"], group["betas"]) for group in whole.optimizer.param_groups]
        assert part.get_last_lr() == whole.get_last_lr() == part.get_lr()


@pytest.mark.parametrize("name", RECORDED)
def test_the_last_rate_is_that_of_the_groups_also_before_the_first_step(name: str) -> None:
    kind, arguments = schedule_cases.cases()[name]
    adam = schedule_cases.optimizer()
    schedule = getattr(lr_schedules, kind)(adam, **arguments)
    assert schedule.get_last_lr() == [group["lr"] for group in adam.param_groups]
    assert len(schedule.get_lr()) == 2


def test_a_schedule_that_goes_on_leaves_the_groups_alone_until_it_steps() -> None:
    adam = adamw(0.3)
    schedule = WarmupLR(adam, 0.0, 1.0, 10, "linear", last_batch_iteration=4)
    assert adam.param_groups[0]["lr"] == 0.3 and schedule.get_last_lr() == [0.3]
    schedule.step()
    assert adam.param_groups[0]["lr"] == 0.5
    schedule.step(9)
    assert adam.param_groups[0]["lr"] == 0.9 and schedule.state_dict() == {"last_batch_iteration": 9}


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_rate_that_is_a_tensor_is_written_in_place(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 0.5, dtype=torch.float64)
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=tensor)
    schedule = WarmupLR(adam, 0.0, None, 10, "linear")
    before = schedule.get_last_lr()
    for _ in range(6):
        schedule.step()
    assert adam.param_groups[0]["lr"] is tensor and tensor.item() == 0.25
    assert float(before[0]) == 0.0


def test_a_wrapped_optimizer_is_found_and_anything_else_refused() -> None:
    class Wrapper:
        optimizer = adamw()

    assert WarmupLR(Wrapper()).optimizer is Wrapper.optimizer
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got list"):
        WarmupLR([])


# ---- momentum ----------------------------------------------------------------------------------


def test_an_optimizer_without_betas_keeps_its_momentum_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.7)
    schedule = OneCycle(sgd, 0.1, 0.2, cycle_first_step_size=3)
    assert "SGD has no betas" in caplog.text and schedule.get_mom() is None
    schedule.step()
    assert sgd.param_groups[0]["momentum"] == 0.7 and "betas" not in sgd.param_groups[0]


def test_get_mom_says_the_betas_of_this_iteration() -> None:
    schedule = OneCycle(adamw(0.1, 0.1), 0.1, 0.2, cycle_first_step_size=4, cycle_min_mom=[0.1, 0.2])
    schedule.step()
    assert schedule.get_mom() == [group["betas"] for group in schedule.optimizer.param_groups]
    assert [beta2 for _, beta2 in schedule.get_mom() or ()] == [0.99, 0.99]


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_no_steps_of_warming_up_count_as_two_and_are_told_once(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """DeepSpeed: max(2, warmup_num_steps). Clients write 0 where warming up was not asked for."""
    total = {} if kind is WarmupLR else {"total_num_steps": 9}
    with caplog.at_level(logging.WARNING, "zero"):
        schedule = kind(adamw(0.1, 0.1), warmup_num_steps=0, **total)
    (message,) = caplog.messages
    assert message.startswith(f"{kind.__name__}: warmup_num_steps is 0 and counts as 2")
    two = kind(adamw(0.1, 0.1), warmup_num_steps=2, **total)
    assert len(caplog.messages) == 1
    for _ in range(10):
        assert schedule.get_lr() == two.get_lr()
        schedule.step()
        two.step()


# ---- what cannot be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        (WarmupLR, {"warmup_num_steps": -1}, "warmup_num_steps: expected an integer of at least 0, got -1"),
        (WarmupLR, {"warmup_num_steps": 2.5}, "warmup_num_steps"),
        (WarmupLR, {"warmup_num_steps": True}, "warmup_num_steps"),
        (WarmupLR, {"warmup_type": "cosine"}, '"log" or "linear", got \'cosine\''),
        (WarmupLR, {"warmup_min_lr": [1.0]}, "warmup_min_lr: expected 2 values"),
        (WarmupDecayLR, {"total_num_steps": 9, "warmup_max_lr": (1, 2, 3)}, "warmup_max_lr: expected 2 values"),
        (WarmupCosineLR, {"total_num_steps": 9, "warmup_num_steps": -1}, "warmup_num_steps"),
        (LRRangeTest, {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
        (LRRangeTest, {"lr_range_test_min_lr": []}, "lr_range_test_min_lr"),
        (OneCycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "cycle_first_step_size above 0"),
        (OneCycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": -1}, "of at least 0"),
        (OneCycle, {"cycle_min_lr": 0, "cycle_max_lr": [1]}, "cycle_max_lr: expected 2 values"),
        (OneCycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_min_mom": [1]}, "cycle_min_mom: expected 2 values"),
    ],
)
def test_a_value_that_cannot_be_is_named_and_the_groups_stay_as_they_were(
    kind: Any, arguments: dict[str, Any], named: str
) -> None:
    adam = adamw(0.01, 0.02)
    with pytest.raises(ConfigError) as caught:
        kind(adam, **arguments)
    assert named in str(caught.value) and kind.__name__ in str(caught.value)
    assert [(group["lr"], group["betas"]) for group in adam.param_groups] == [
        (0.01, (0.9, 0.999)),
        (0.02, (0.9, 0.999)),
    ]


@pytest.mark.parametrize("kind", [WarmupDecayLR, WarmupCosineLR])
def test_a_training_shorter_than_its_warming_up_is_a_warning(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    kind(adamw(), 10, warmup_num_steps=11)
    assert "total_num_steps 10 is less than warmup_num_steps 11" in caplog.text
    caplog.clear()
    kind(adamw(), 10, warmup_num_steps=10)
    assert not caplog.text
