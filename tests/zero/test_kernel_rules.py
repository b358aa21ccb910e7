"""Rules whose arithmetic is a kernel's give the bits of the tiled ones where torch rounds as IEEE says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_roots import as_torch_fuses, rooted, with_exact_roots
from models import make_config
from tiled_optimizers import Plain, differences, held_by, in_groups, patchy, train
from torch import Tensor

import native
from offload.kernels import kernels, masters
from zero.ops.adagrad import DeepSpeedCPUAdagrad
from zero.ops.lion import DeepSpeedCPULion, Lion
from zero.optim.kernel_rules import ROWS, KernelRule
from zero.optim.make_rule import rule_for
from zero.optim.rules import Progress, TiledRule, UpdateRun
from zero.plan.sub_group_state import States

NUMEL = 3 * 32768 + 77
STEPS = 5
Options = dict[str, Any]
SGD, RMSprop, Adagrad = torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad
CASES: dict[str, tuple[type[torch.optim.Optimizer], Options, Options]] = {
    "SGD": (SGD, {"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.03}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, {"momentum": 0.5}),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}, {"lr": 0.01, "momentum": 0.7}),
    "Adagrad": (
        Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.3, "weight_decay": 0.1},
        {"lr": 0.02},
    ),
    "RMSprop": (RMSprop, {"lr": 0.01, "alpha": 0.9}, {"lr": 0.02, "alpha": 0.99}),
    "RMSprop with all": (RMSprop, {"momentum": 0.9, "centered": True, "alpha": 0.4}, {"momentum": 0.5, "eps": 1e-3}),
    "Lion": (Lion, {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}, {"betas": [0.8, 0.9]}),
    "DeepSpeed's Lion": (DeepSpeedCPULion, {"lr": 0.01}, {"weight_decay": 0.2}),
    "DeepSpeed's Adagrad": (DeepSpeedCPUAdagrad, {"lr": 0.01}, {"weight_decay": 0.2}),
}
"""Name -> class, options, and what a schedule changes of them at the second step and takes back at the fourth."""


@pytest.fixture(autouse=True)
def library() -> None:
    try:
        native.load()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The formula of each call of the kernel."""
    made, update = [], kernels.update

    def spied(formula: Any, *rest: Any, **more: Any) -> None:
        made.append(formula)
        update(formula, *rest, **more)

    monkeypatch.setattr(kernels, "update", spied)
    yield made


def rule_of(kind: type[torch.optim.Optimizer], options: Options) -> tuple[TiledRule, dict[str, Any]]:
    optimizer = kind([torch.nn.Parameter(torch.zeros(3))], **options)
    return rule_for(optimizer, optimizer.param_groups), optimizer.param_groups[0]


def trained(
    update: Any, rule: TiledRule, group: dict[str, Any], scheduled: Options, dtype: torch.dtype
) -> tuple[list[Tensor], list[Any]]:
    """Weights, remainders and planes after some steps, and what is left of the parameter after each."""
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(NUMEL, generator=generator)
    kept = masters.remainder_dtype(dtype)
    weight, remainder = torch.empty(NUMEL, dtype=dtype), None if kept is None else torch.empty(NUMEL, dtype=kept)
    masters.split(weight, remainder, master)
    planes = tuple(torch.full((NUMEL,), 7.0) for _ in rule.states)  # whoever begins with them makes them
    progress: Progress | None = None
    lefts, before = [], dict(group)
    for step in range(STEPS):
        group.update(scheduled if step in (1, 2) else {key: before[key] for key in scheduled})
        gradient = torch.randn(NUMEL, generator=generator).bfloat16()
        rule.on_step_begin()
        values = rule.values(group, step + 1, progress)
        # The last elements have no gradient.
        run = UpdateRun(weight, remainder, States(planes), gradient, [(5, 40000, values), (40000, NUMEL - 9, values)])
        update(rule, run, 0.37, 2)
        progress, changed = rule.after_update(values)
        lefts.append((progress, changed))
    return [each for each in (weight, remainder, *planes) if each is not None], lefts


@as_torch_fuses
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_rule_has_the_bits_of_the_tiled_one(calls: list[Any], name: str, dtype: torch.dtype) -> None:
    kind, options, scheduled = CASES[name]
    with with_exact_roots():
        results = []
        for update in (KernelRule.update_run, TiledRule.update_run):
            rule, group = rule_of(kind, options)
            assert type(rule) is KernelRule
            results.append(trained(update, rule, group, scheduled, dtype))
            assert calls == [ROWS[kind].formula] * STEPS
    (ours, left), (theirs, expected) = results
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and left == expected


@as_torch_fuses
def test_momentum_that_a_schedule_starts_begins_as_torch_begins_it(calls: list[Any]) -> None:
    results = []
    for update in (KernelRule.update_run, TiledRule.update_run):
        rule, group = rule_of(SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3})
        group["momentum"] = 0.0
        results.append(trained(update, rule, group, {"momentum": 0.8}, torch.float32))
    assert len(calls) == STEPS
    (ours, left), (theirs, expected) = results
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and left == expected


@pytest.mark.parametrize("kind", [SGD, RMSprop, Adagrad])
def test_options_that_the_row_lacks_are_tiled(calls: list[Any], kind: Any) -> None:
    options = {"maximize": True, "weight_decay": 0.1}
    results = []
    for update in (KernelRule.update_run, TiledRule.update_run):
        rule, group = rule_of(kind, options)
        results.append(trained(update, rule, group, {"lr": 0.3}, torch.bfloat16)[0])
    assert calls == []
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_where_torchs_roots_are_not_ieees_the_kernel_keeps_to_ieees(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for roots in (rooted, lambda tensor: rooted(tensor).nextafter(torch.tensor(9e9))):
        monkeypatch.setattr(Tensor, "sqrt", roots)
        rule, group = rule_of(Adagrad, {"lr": 0.1})
        results.append(trained(KernelRule.update_run, rule, group, {"lr": 0.3}, torch.bfloat16)[0])
    assert len(calls) == 2 * STEPS
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_class_of_the_users_own_has_no_row() -> None:
    class Mine(torch.optim.SGD):
        is_element_wise = True

    assert type(rule_of(Mine, {"lr": 0.1})[0]) is TiledRule
    assert type(rule_of(torch.optim.RAdam, {"lr": 0.1})[0]) is TiledRule


@as_torch_fuses
@pytest.mark.parametrize("pair", [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])
@pytest.mark.parametrize("name", ["SGD", "nesterov", "Adagrad", "RMSprop with all", "Lion"])
def test_an_engine_trains_with_the_kernel_to_the_bits_of_torch(
    open_engine: Any, nvme_path: Path, calls: list[Any], name: str, pair: tuple[str, str]
) -> None:
    kind, options, second = CASES[name]
    more = {} if kind is Lion else {"foreach": False}
    if kind is RMSprop:
        second = {"centered": False, "momentum": 0.0}  # the groups use other states

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return kind(groups, **options, **more)

    with with_exact_roots():
        model = patchy()
        config = make_config(pair, nvme_path, optimizer={}, zero={"sub_group_size": 8192}, clipping=0.05)
        optimizer = make(in_groups(list(model.named_parameters()), second))
        engine = open_engine(model, config, optimizer=optimizer)
        plain = Plain(make, second, bf16=True, clipping=0.05)
        for trainer in (engine, plain):
            train(trainer, 0, 4, bf16=True)
    assert differences(held_by(engine, model), plain.held()) == []
    assert set(calls) == {ROWS[kind].formula}
