"""The table of all optimizers that a configuration can name: what each looks at, keeps, stores and moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offload.kernels.masters import remainder_dtype
from zero.config import load_config
from zero.config.optimizer_block import TYPE_KEYS
from zero.optim.averages import inner_rule
from zero.optim.kernel_rules import KernelRule
from zero.optim.make_rule import make_trained_parameters
from zero.optim.rules import AdamRule, Rule
from zero.plan.planner import STATE_DTYPES
from zero.plan.sub_group_state import StateFormat

HEAD = """# Optimizers in one table

Written by `zero config optimizers > docs/optimizers-table.md` from the rules themselves; a test says whether it is
current. [What the words mean](optimizers.md).

Every row trains on every tier, at every stage and number of ranks. Bytes are of one parameter in bf16 with its fp32
master: *stored* counts weight, what the weight lacks of its master, and states; *moved* is what a step with one
micro-batch reads and writes when all of it is on NVMe: what is stored both ways, and the weight once more for backward.
*small* states have not the parameter's shape; they stay in memory and are in neither number.
*kernel* is ours; *tiles* are torch's own step, piece by piece.

| `optimizer.type` | looks at | states | stored | moved | updated by |
|---|---|---|---|---|---|
"""
NUMEL = 1 << 20
"""Number of elements for which bytes are averaged, so that whole pages and scales hardly count."""


def _state_dtype_config(dtype: str) -> dict[str, Any]:
    return {"zero_optimization": {"offload_optimizer": {"state_dtype": dtype}}}


BF16 = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}


VARIANTS: dict[str, tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]] = {
    "AdamW": (
        ("state_dtype bf16", {}, _state_dtype_config("bf16")),
        ("state_dtype 8bit", {}, _state_dtype_config("8bit")),
        ("state_dtype bf16, bf16 masters", {}, _state_dtype_config("bf16") | BF16),
        ("state_dtype 8bit, bf16 masters", {}, _state_dtype_config("8bit") | BF16),
        ("amsgrad", {"amsgrad": True}, {}),
        ("ema_decay", {}, {"ema_decay": 0.999}),
    ),
    "SGD": (("momentum", {"momentum": 0.9}, {}),),
    "RMSprop": (("momentum, centered", {"momentum": 0.9, "centered": True}, {}),),
}
"""Type -> further rows, as (words, options, other keys of the configuration)."""


def optimizer_table() -> str:
    return HEAD + "\n".join(row for kind in sorted(TYPE_KEYS) for row in _rows(kind)) + "\n"


def _rows(kind: str) -> Iterator[str]:
    for words, options, other_keys in (("", {}, {}), *VARIANTS.get(kind, ())):
        config = load_config(
            {"optimizer": {"type": kind, "params": {"lr": 1e-3, **options}}, **other_keys}, world_size=1
        )
        state_dtype = config.zero_optimization.offload_optimizer.state_dtype
        trained = make_trained_parameters(None, None, nn.Linear(8, 8), config)
        if trained is None:
            raise ValueError(f"{kind}: a configuration with an optimizer does not train anything")
        for rule in trained.rules.each:
            part_name = [f"{rule.name}'s part"] if len(trained.rules.each) > 1 else []
            name = ", ".join([f"`{kind}`", *filter(None, (words, *part_name))])
            remainder = None if config.bf16_masters else remainder_dtype(torch.bfloat16)
            yield _row(name, rule, StateFormat(remainder, STATE_DTYPES[state_dtype], rule.states))


def _row(name: str, rule: Rule, state_format: StateFormat) -> str:
    weight_bytes = torch.bfloat16.itemsize
    stored_bytes = weight_bytes + state_format.nbytes(NUMEL) / NUMEL
    names = [", ".join(f"`{state}`" for state in states) for states in (rule.states, rule.small)]
    states = names[0] or ("" if rule.small else "none")
    if rule.small:
        states += f"{' and ' if rule.states else ''}small: {names[1]}"
    updated_by = (
        "kernel"
        if isinstance(inner_rule(rule), (AdamRule, KernelRule))
        else "torch, whole parameters"
        if rule.needs_whole_parameters
        else "torch, tiles"
    )
    looks_at = "whole parameters" if rule.needs_whole_parameters else "elements"
    moved_bytes = 2 * stored_bytes + weight_bytes
    return f"| {name} | {looks_at} | {states} | {stored_bytes:.4g} | {moved_bytes:.4g} | {updated_by} |"
