"""What other settings would give: the same model planned again with one key changed, and the least that fits."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import BudgetError, ConfigError
from offload.sizes import format_bytes
from zero.params.layout import Layout
from zero.plan.plan import DEVICE, HOST, NVME, Plan

TIERS = (DEVICE, HOST, NVME)
OPTIMIZER, PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
CHANGES: Mapping[str, tuple[tuple[str, Any], ...]] = {
    'memory_budget.host "auto"': (("memory_budget.host", "auto"),),
    'offload_optimizer.state_dtype "8bit"': ((f"{OPTIMIZER}.state_dtype", "8bit"),),
    'offload_param.device "cpu"': ((f"{PARAM}.device", "cpu"),),
    'offload_optimizer.device "cpu"': ((f"{OPTIMIZER}.device", "cpu"),),
    'both devices "cpu"': ((f"{PARAM}.device", "cpu"), (f"{OPTIMIZER}.device", "cpu")),
}
"""Name of a change -> the keys that it sets."""
SHORT = re.compile(r"[^;\n]*")  # The first clause of a refusal.


@dataclass(frozen=True, slots=True)
class Choice:
    """One row: a plan, or the reason why there is none."""

    name: str
    tier_bytes: Mapping[str, int]
    moved_bytes: int | None = None
    expected_seconds: float | None = None
    is_assumed: bool = False  # Whether the seconds are at rates that were not measured.
    refusal: str = ""

    def cells(self) -> list[str]:
        if self.refusal:
            return [self.name, self.refusal]
        mark = "~" if self.is_assumed else ""
        seconds = "not known" if self.expected_seconds is None else f"{mark}{self.expected_seconds:.3g} s"
        moved = "" if self.moved_bytes is None else format_bytes(self.moved_bytes)
        return [self.name, *(format_bytes(self.tier_bytes[tier]) for tier in TIERS), moved, seconds]


def tier_sizes(plan: Plan) -> dict[str, int]:
    return {tier: plan.tier_bytes(tier) for tier in TIERS}


def find_choices(
    content: Mapping[str, Any],
    make: Callable[[dict[str, Any]], tuple[Layout, Plan]],
    cost: Callable[[Layout, Plan], tuple[int, float | None, bool]],
) -> list[Choice]:
    """A row for each change that `content` does not have yet and that has an effect on it.

    Args:
        content: the configuration as a JSON object.
        make: a configuration -> its plan; raises ConfigError or BudgetError.
        cost: a plan -> (bytes that a step transfers to and from NVMe, seconds of a step if known, whether these are at
            assumed rates).
    """
    choices = []
    for name, change in CHANGES.items():
        changed = copy.deepcopy(dict(content))
        if not all([_set(changed, path, value) for path, value in change]):  # same as another row, or CONFIG
            continue
        try:
            layout, plan = make(changed)
        except ConfigError:  # it contradicts another key, so it is not a choice here
            continue
        except BudgetError as error:
            first = SHORT.match(str(error))
            choices.append(Choice(name, {}, refusal=first.group().strip() if first else str(error)))
            continue
        choices.append(Choice(name, tier_sizes(plan), *cost(layout, plan)))
    return choices


def _set(content: dict[str, Any], path: str, value: Any) -> bool:
    """Set a key. Returns False if nothing changed; a tier is only changed if something is offloaded already."""
    *blocks, key = path.split(".")
    block = content
    for name in blocks:
        block = block.setdefault(name, {})
        if not isinstance(block, dict):
            return False
    if block.get(key) == value or (blocks[0] == "zero_optimization" and block.get("device") in (None, "none")):
        return False
    block[key] = value
    return True


def choice_lines(now: Choice, others: list[Choice]) -> list[str]:
    head = ["with", *TIERS, "moved a step", "data movement"]
    rows = [head, *(choice.cells() for choice in (now, *others))]
    widths = [max(len(row[column]) for row in rows if len(row) == len(head)) for column in range(1, len(head))]
    first = max(len(row[0]) for row in rows)
    lines = []
    for name, *cells in rows:
        padded = cells if len(cells) < len(widths) else [c.rjust(w) for c, w in zip(cells, widths, strict=True)]
        lines.append(f"  {name.ljust(first)}  {'  '.join(padded)}".rstrip())
    return lines
