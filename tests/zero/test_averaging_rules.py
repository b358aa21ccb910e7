"""A rule with an average beside it: the inner rule's bits and torch's average, however a run is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from offload.kernels import masters, tile_threads
from offload.kernels.moments import Moments
from zero.optim.averages import EmaRule
from zero.optim.make_rule import rule_for
from zero.optim.rules import AdamRule, Rule, UpdateRun
from zero.plan.sub_group_state import States

NUMEL = 2 * tile_threads.WORTH_THREADS_NUMEL + 12_345
CUT = tile_threads.WORTH_THREADS_NUMEL + 77
BETWEEN = (NUMEL - 100, NUMEL - 50)
"""Belongs to no parameter."""
DECAY = 0.9


def inner_rule(kind: str) -> tuple[Rule, dict[str, Any]]:
    if kind == "AdamW":
        rule = AdamRule()
        return rule, {**rule.defaults, "weight_decay": 0.1}
    optimizer = torch.optim.RAdam([torch.nn.Parameter(torch.zeros(3))], weight_decay=0.1)
    return rule_for(optimizer, optimizer.param_groups), optimizer.param_groups[0]


def run_of(rule: Rule, planes: list[Tensor], gradient: Tensor, segments: list[Any]) -> UpdateRun:
    weight, remainder, *states = planes
    moments = Moments(states[0], states[1]) if isinstance(rule, AdamRule) else None
    stored = remainder if remainder.numel() else None
    return UpdateRun(weight, stored, States(tuple(states), moments), gradient, segments)


def master_of(planes: list[Tensor]) -> Tensor:
    master = torch.empty(NUMEL)
    masters.join(master, planes[0], planes[1] if planes[1].numel() else None)
    return master


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["AdamW", "RAdam"])
def test_pieces_and_threads_leave_the_bits_as_they_are(kind: str, dtype: torch.dtype, threads: int) -> None:
    inner, group = inner_rule(kind)
    rule = EmaRule(inner, DECAY)
    generator = torch.Generator().manual_seed(3)
    remainder = masters.remainder_dtype(dtype)
    beside = torch.zeros(NUMEL if remainder else 0, dtype=remainder or torch.int16)
    plain = [torch.empty(NUMEL, dtype=dtype), beside, *(torch.zeros(NUMEL) for _ in inner.states)]
    masters.split(plain[0], beside if remainder else None, torch.randn(NUMEL, generator=generator))
    ours = [plane.clone() for plane in (*plain, torch.full((NUMEL,), 7.0))]
    expected = master_of(plain)
    move = get_ema_multi_avg_fn(DECAY)
    progress = before = None
    for step in range(3):
        gradient = torch.randn(NUMEL, generator=generator)
        ranges = [(3, CUT), (CUT, BETWEEN[0]), (BETWEEN[1], NUMEL)]
        for each in (inner, rule):
            each.on_step_begin()
        values = inner.values(group, step + 1, before)
        inner.update_run(run_of(inner, plain, gradient, [(*at, values) for at in ranges]), 0.7, threads)
        before = inner.after_update(values)[0]
        with_average = rule.values(group, step + 1, progress)
        rule.update_run(run_of(rule, ours, gradient, [(*at, with_average) for at in ranges]), 0.7, threads)
        progress = rule.after_update(with_average)[0]
        move([expected], [master_of(plain)], step)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=False))
    for begin, end in ranges:
        assert torch.equal(ours[-1][begin:end], expected[begin:end])
    assert bool((ours[-1][slice(*BETWEEN)] == 7.0).all()), "what is no parameter's has no average"
