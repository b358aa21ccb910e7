"""`deepspeed.runtime.lr_schedules`: schedules that are chosen on a command line."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from zero.lr_schedules import SCHEDULES, VALID_LR_SCHEDULES
from zero.lr_schedules.warmup import LOG

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES

# Name -> (type, default, help). Defaults are DeepSpeed's; None: the schedule's own default.
ARGUMENTS: dict[str, tuple[type, Any, str]] = {
    LR_SCHEDULE: (str, None, "one of " + ", ".join(VALID_LR_SCHEDULES)),
    "lr_range_test_min_lr": (float, 0.001, "learning rate at the start of the range test"),
    "lr_range_test_step_rate": (float, 1.0, "how much the learning rate grows in the range test"),
    "lr_range_test_step_size": (int, 1000, "[steps] in which it grows by that much"),
    "lr_range_test_staircase": (bool, False, "grow the learning rate in steps, not continuously"),
    "cycle_first_step_size": (int, 1000, "[steps] of the cycle's rising half"),
    "cycle_first_stair_count": (int, None, "stairs of the rising half (none)"),
    "cycle_second_step_size": (int, None, "[steps] of the falling half (as in the rising half)"),
    "cycle_second_stair_count": (int, None, "stairs of the falling half (as in the rising half)"),
    "decay_step_size": (int, 1000, "[steps] between two decays after the cycle"),
    "cycle_min_lr": (float, 0.01, "learning rate at the ends of the cycle"),
    "cycle_max_lr": (float, 0.1, "learning rate at the top of the cycle"),
    "decay_lr_rate": (float, 0.0, "how fast the learning rate decays after the cycle"),
    "cycle_momentum": (bool, False, "cycle the momentum too"),
    "cycle_min_mom": (float, 0.8, "momentum at the top of the cycle"),
    "cycle_max_mom": (float, 0.9, "momentum at the ends of the cycle"),
    "decay_mom_rate": (float, 0.0, "how fast momentum decays after the cycle"),
    "warmup_min_lr": (float, 0.0, "learning rate before the warmup"),
    "warmup_max_lr": (float, 0.001, "learning rate after the warmup"),
    "warmup_num_steps": (int, 1000, "[steps] of the warmup"),
    "warmup_type": (str, LOG, "shape of the warmup: log or linear"),
    "warmup_min_ratio": (float, 0.01, "share of the learning rate at which the warmup of a cosine schedule starts"),
    "cos_min_ratio": (float, 0.01, "share of the learning rate at which a cosine schedule ends"),
}

NO_RATE = "{} uses shares of the optimizer's learning rates, so its params have no learning rate"


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and a flag for each parameter of the schedules. Returns the parser."""
    group = parser.add_argument_group("learning-rate schedules")
    for name, (kind, default, text) in ARGUMENTS.items():
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The flags above from the command line, and all other words."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(schedule: str) -> Callable[[Any, dict[str, Any]], None]:
    """A function that copies the flags of a schedule into its params; flags that were not given change nothing."""
    names = [name for name in inspect.signature(SCHEDULES[schedule]).parameters if name in ARGUMENTS]

    def override(args: Any, params: dict[str, Any]) -> None:
        params.update({name: getattr(args, name) for name in names if getattr(args, name, None) is not None})

    return override


override_lr_range_test_params = _override(LR_RANGE_TEST)
override_1cycle_params = _override(ONE_CYCLE)
override_warmupLR_params = _override(WARMUP_LR)
override_warmupCosineLR_params = _override(WARMUP_COSINE_LR)


def override_params(args: Any, params: dict[str, Any]) -> None:
    for schedule in (LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_COSINE_LR):
        _override(schedule)(args, params)


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """The `scheduler` block chosen on the command line, and None; or None, and the reason why there is none."""
    schedule = getattr(args, LR_SCHEDULE, None)
    if schedule is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if schedule not in SCHEDULES:
        return None, f"{schedule} is not supported LR schedule: expected one of {', '.join(SCHEDULES)}"
    params: dict[str, Any] = {}
    _override(schedule)(args, params)
    return {"type": schedule, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """The learning rate that a `scheduler` block names, and ""; or None, and the reason why there is none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    schedule, params = config["type"], config["params"]
    if schedule not in SCHEDULES:
        return None, f"{schedule} is not a valid LR schedule: expected one of {', '.join(SCHEDULES)}"
    if schedule == WARMUP_COSINE_LR:
        return None, NO_RATE.format(schedule)
    return params[{LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}.get(schedule, "warmup_max_lr")], ""
