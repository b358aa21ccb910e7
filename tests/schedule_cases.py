"""Schedules with recorded values of DeepSpeed 0.19.8. To record: `python tests/schedule_cases.py` with it installed.

A trace has, after construction and after each step, the learning rates of both param groups, and their betas if these
have changed. JSON keeps every bit of a float.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

RECORDED = Path(__file__).parent / "data" / "schedules" / "deepspeed.json"
STEPS = 24
GROUP_LRS = (0.01, 0.003)


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (class, arguments)."""
    found: list[tuple[str, dict[str, Any]]] = []
    for steps, kind, least, most in (
        (1, "log", 0.0, 0.001),
        (2, "linear", 0.0, None),
        (3, "log", [1e-4, 2e-4], [0.01, 0.02]),
        (10, "linear", 1e-5, 0.001),
        (10, "log", 0.0, None),
        (40, "log", 1e-5, [0.01, 0.02]),
    ):
        warmup = {"warmup_num_steps": steps, "warmup_type": kind, "warmup_min_lr": least}
        found.append(("WarmupLR", warmup | ({} if most is None else {"warmup_max_lr": most})))
        for total in (1, 12, 20):
            more = {"total_num_steps": total} | ({} if most is None else {"warmup_max_lr": most})
            found.append(("WarmupDecayLR", warmup | more))
    for steps, kind, total, ratios in (
        (1, "log", 1, {}),
        (3, "linear", 12, {"warmup_min_ratio": 0.1}),
        (10, "log", 20, {"cos_min_ratio": 0.2}),
        (10, "linear", 5, {}),
    ):
        arguments = {"warmup_num_steps": steps, "warmup_type": kind, "total_num_steps": total}
        found.append(("WarmupCosineLR", arguments | ratios))
    stair_counts = ({}, {"cycle_first_stair_count": 2}, {"cycle_first_stair_count": 3, "cycle_second_stair_count": 0})
    decays = ({}, {"decay_step_size": 4, "decay_lr_rate": 0.1}, {"decay_step_size": 1, "decay_mom_rate": 0.02})
    for number, (first, second) in enumerate(itertools.product((3, 7.5), (None, 0, 5))):
        stairs, decay = stair_counts[number % 3], decays[(number + number // 3) % 3]
        cycle = {"cycle_min_lr": 0.001, "cycle_max_lr": [0.1, 0.2], "cycle_first_step_size": first}
        found.append(("OneCycle", cycle | {"cycle_second_step_size": second} | stairs | decay))
    found.append(("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 0.1, "cycle_momentum": False}))
    found.append(
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_min_mom": [0.1, 0.2], "cycle_max_mom": 0.95})
    )
    for least, size, rate, stairs in itertools.product((0.001, [0.001, 0.002]), (1, 7), (1.0, 0.3), (True, False)):
        test = {"lr_range_test_min_lr": least, "lr_range_test_step_size": size, "lr_range_test_step_rate": rate}
        found.append(("LRRangeTest", test | {"lr_range_test_staircase": stairs}))
    found += [("WarmupLR", {}), ("LRRangeTest", {}), ("WarmupDecayLR", {"total_num_steps": 10}), ("OneCycle", {
        "cycle_min_lr": 0.1, "cycle_max_lr": 0.2})]  # fmt: skip
    return {f"{kind} {json.dumps(arguments)}": (kind, arguments) for kind, arguments in found}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in GROUP_LRS])


def trace(module: Any, kind: str, arguments: dict[str, Any]) -> list[Any]:
    """The values that a schedule of that module writes into two param groups."""
    adam = optimizer()
    schedule = getattr(module, kind)(adam, **arguments)
    lines: list[Any] = []
    for step in range(STEPS + 1):
        if step:
            schedule.step()
        betas = [group["betas"] for group in adam.param_groups]
        lines.append([group["lr"] for group in adam.param_groups] + betas * (betas != [(0.9, 0.999)] * 2))
    return json.loads(json.dumps(lines))


def traces(module: Any) -> dict[str, list[Any]]:
    return {name: trace(module, kind, arguments) for name, (kind, arguments) in cases().items()}


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED
    logging.disable(logging.WARNING)
    made = traces(importlib.import_module("deepspeed.runtime.lr_schedules"))
    target.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in made.items()) + "\n}\n")
