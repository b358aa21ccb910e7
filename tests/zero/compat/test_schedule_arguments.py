"""Schedules that are chosen on a command line, with DeepSpeed's flags, are blocks that build."""

from __future__ import annotations

import argparse

import pytest
import torch

from zero.compat import schedule_arguments as flags
from zero.lr_schedules import SCHEDULES


def parsed(*words: str) -> argparse.Namespace:
    return flags.add_tuning_arguments(argparse.ArgumentParser()).parse_args(words)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_block_of_a_schedule_builds_it_and_names_its_rate(name: str) -> None:
    block, why = flags.get_config_from_args(parsed("--lr_schedule", name))
    assert why is None and block is not None and block["type"] == name
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    total = {"total_num_steps": 5000} if name in (flags.WARMUP_DECAY_LR, flags.WARMUP_COSINE_LR) else {}
    schedule = SCHEDULES[name](adam, **total, **block["params"])
    for _ in range(2000):
        schedule.step()
    rate, why = flags.get_lr_from_config(block)
    if name == flags.WARMUP_COSINE_LR:
        assert rate is None and name in why
    else:
        top = {flags.LR_RANGE_TEST: 0.001 * 3.0, flags.ONE_CYCLE: 0.01}.get(name)
        assert adam.param_groups[0]["lr"] == pytest.approx(top or rate, rel=0.3) and why == ""


def test_flags_reach_the_params_and_what_is_not_said_stays_the_schedules() -> None:
    params = {"decay_lr_rate": 7.0}
    flags.override_1cycle_params(parsed("--cycle_min_lr", "0.5", "--cycle_momentum", "--decay_lr_rate", "0.25"), params)
    assert params["cycle_min_lr"] == 0.5 and params["cycle_momentum"] is True and params["decay_lr_rate"] == 0.25
    assert "cycle_second_step_size" not in params and "cycle_first_stair_count" not in params
    flags.override_params(argparse.Namespace(warmup_min_lr=3.0), params)
    assert params["warmup_min_lr"] == 3.0 and params["cycle_min_lr"] == 0.5


@pytest.mark.parametrize(
    ("words", "why"), [((), "not specified"), (("--lr_schedule", "WarmUpLR"), "WarmUpLR is not supported")]
)
def test_without_a_known_schedule_it_is_said_why(words: tuple[str, ...], why: str) -> None:
    block, said = flags.get_config_from_args(parsed(*words))
    assert block is None and said is not None and why in said
    assert flags.get_lr_from_config({"type": "WarmUpLR", "params": {}})[0] is None
    assert flags.get_lr_from_config({"params": {}}) == (None, "LR schedule type not defined in config")
