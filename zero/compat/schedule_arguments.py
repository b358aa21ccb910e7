"""`deepspeed.runtime.lr_schedules`: the names of parameters, and schedules that are chosen on a command line."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from zero.lr_schedules import SCHEDULES, VALID_LR_SCHEDULES
from zero.lr_schedules.warmup import LINEAR, LOG

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
EDGE_VALUE, MID_VALUE = "edge_value", "mid_value"
CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT = "cycle_first_step_size", "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT = "cycle_second_step_size", "cycle_second_stair_count"
DECAY_STEP_SIZE, DECAY_LR_RATE, DECAY_MOM_RATE = "decay_step_size", "decay_lr_rate", "decay_mom_rate"
CYCLE_MIN_LR, CYCLE_MAX_LR = "cycle_min_lr", "cycle_max_lr"
CYCLE_MOMENTUM, CYCLE_MIN_MOM, CYCLE_MAX_MOM = "cycle_momentum", "cycle_min_mom", "cycle_max_mom"
WARMUP_MIN_LR, WARMUP_MAX_LR = "warmup_min_lr", "warmup_max_lr"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = LOG, LINEAR
WARMUP_NUM_STEPS, WARMUP_TYPE, TOTAL_NUM_STEPS = "warmup_num_steps", "warmup_type", "total_num_steps"
WARMUP_MIN_RATIO, COS_MIN_RATIO = "warmup_min_ratio", "cos_min_ratio"

ARGUMENTS: dict[str, tuple[type, Any, str]] = {
    LR_SCHEDULE: (str, None, "one of " + ", ".join(VALID_LR_SCHEDULES)),
    LR_RANGE_TEST_MIN_LR: (float, 0.001, "where the range test begins"),
    LR_RANGE_TEST_STEP_RATE: (float, 1.0, "how much the range test grows"),
    LR_RANGE_TEST_STEP_SIZE: (int, 1000, "[steps] in which the range test grows so much"),
    LR_RANGE_TEST_STAIRCASE: (bool, False, "the range test grows in stairs"),
    CYCLE_FIRST_STEP_SIZE: (int, 1000, "[steps] of the cycle's rising half"),
    CYCLE_FIRST_STAIR_COUNT: (int, None, "stairs of the rising half; default: none"),
    CYCLE_SECOND_STEP_SIZE: (int, None, "[steps] of the falling half; default: as many as the first"),
    CYCLE_SECOND_STAIR_COUNT: (int, None, "stairs of the falling half; default: as many as the first"),
    DECAY_STEP_SIZE: (int, 1000, "[steps] between two decays after the cycle"),
    CYCLE_MIN_LR: (float, 0.01, "learning rate at the ends of the cycle"),
    CYCLE_MAX_LR: (float, 0.1, "learning rate at the top of the cycle"),
    DECAY_LR_RATE: (float, 0.0, "how fast the learning rate decays after the cycle"),
    CYCLE_MOMENTUM: (bool, False, "momentum is cycled too"),
    CYCLE_MIN_MOM: (float, 0.8, "momentum at the top of the cycle"),
    CYCLE_MAX_MOM: (float, 0.9, "momentum at the ends of the cycle"),
    DECAY_MOM_RATE: (float, 0.0, "how fast momentum decays after the cycle"),
    WARMUP_MIN_LR: (float, 0.0, "learning rate before warming up"),
    WARMUP_MAX_LR: (float, 0.001, "learning rate after warming up"),
    WARMUP_NUM_STEPS: (int, 1000, "[steps] of warming up"),
    WARMUP_TYPE: (str, WARMUP_LOG_RATE, "log or linear"),
    WARMUP_MIN_RATIO: (float, 0.01, "share of the learning rate that a cosine's warming up begins with"),
    COS_MIN_RATIO: (float, 0.01, "share of the learning rate that a cosine ends with"),
}
"""Name -> type, default (DeepSpeed's; None: the schedule's own) and help."""

NO_RATE = "{} takes shares of the optimizer's learning rates: its params have none"


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and a flag for each parameter of the schedules; the same parser."""
    group = parser.add_argument_group("learning-rate schedules")
    for name, (kind, default, text) in ARGUMENTS.items():
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The flags above from the command line, and the words that are none of them."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(schedule: str) -> Callable[[Any, dict[str, Any]], None]:
    """A function that copies the flags of a schedule into its params; what was not given stays as it is."""
    names = [name for name in inspect.signature(SCHEDULES[schedule]).parameters if name in ARGUMENTS]

    def override(args: Any, params: dict[str, Any]) -> None:
        """From parsed arguments into the params of a `scheduler` block."""
        params.update({name: getattr(args, name) for name in names if getattr(args, name, None) is not None})

    return override


override_lr_range_test_params = _override(LR_RANGE_TEST)
override_1cycle_params = _override(ONE_CYCLE)
override_warmupLR_params = _override(WARMUP_LR)
override_warmupCosineLR_params = _override(WARMUP_COSINE_LR)


def override_params(args: Any, params: dict[str, Any]) -> None:
    """The flags of every schedule into params."""
    for schedule in (LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_COSINE_LR):
        _override(schedule)(args, params)


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """The `scheduler` block that was chosen on the command line, and None; or None, and why there is none."""
    schedule = getattr(args, LR_SCHEDULE, None)
    if schedule is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if schedule not in SCHEDULES:
        return None, f"{schedule} is not supported LR schedule: expected one of {', '.join(SCHEDULES)}"
    params: dict[str, Any] = {}
    _override(schedule)(args, params)
    return {"type": schedule, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """The learning rate a `scheduler` block names, and ""; or None, and why there is none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    schedule, params = config["type"], config["params"]
    if schedule not in SCHEDULES:
        return None, f"{schedule} is not a valid LR schedule: expected one of {', '.join(SCHEDULES)}"
    if schedule == WARMUP_COSINE_LR:
        return None, NO_RATE.format(schedule)
    return params[{LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}.get(schedule, WARMUP_MAX_LR)], ""
