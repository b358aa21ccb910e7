"""Every optimizer that can be named equals its torch counterpart, bit for bit, wherever its states are.

Clipping, two param groups, weight decay, a branch without gradients every other step, a layer that nobody uses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_config
from pairwise import in_pairs
from probe import layout_of
from tiled_optimizers import Group, Plain, differences, held_by, in_groups, patchy, train

from offload.errors import ConfigError, StateError
from zero.ops.lamb import FusedLamb
from zero.ops.lion import FusedLion
from zero.ops.schedule_free import AdamWScheduleFree
from zero.plan.traffic import step_traffic
from zero.values.fragments import safe_get_full_optimizer_state, safe_set_full_fp32_param, safe_set_full_optimizer_state

STEPS = 8
TIERS = (("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("cpu", "nvme"))

GIVEN = ("in the config", "as an object")

Open = Callable[..., Any]

NAMED: dict[str, tuple[Group, Group]] = {
    "SGD": ({"lr": 0.05}, {"lr": 0.1}),
    "SGD with momentum": (
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
        {"momentum": 0.5, "dampening": 0.0, "nesterov": True},
    ),
    "SGD, momentum in one group": ({"lr": 0.05, "weight_decay": 0.01, "maximize": True}, {"momentum": 0.9}),
    "Adagrad": (
        {"lr": 0.02, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.3},
        {"weight_decay": 0.0},
    ),
    "Lion": ({"lr": 0.002, "betas": [0.9, 0.98], "weight_decay": 0.1}, {"betas": [0.8, 0.9], "weight_decay": 0.0}),
    "Lamb": ({"lr": 0.02, "weight_decay": 0.1, "max_coeff": 0.5}, {"bias_correction": False, "min_coeff": 0.1}),
    "AdamWScheduleFree": (
        {"lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.1, "warmup_steps": 3},
        {"betas": [0.8, 0.95], "weight_decay": 0.0, "r": 1.0, "weight_lr_power": 1.0},
    ),
    "RMSprop": ({"lr": 0.003, "alpha": 0.9, "momentum": 0.8, "centered": True, "weight_decay": 0.01}, {"lr": 0.01}),
    "Adamax": ({"lr": 0.003, "weight_decay": 0.01}, {"lr": 0.01}),
    "NAdam": ({"lr": 0.003, "weight_decay": 0.01, "decoupled_weight_decay": True}, {"betas": [0.7, 0.9]}),
    "RAdam": ({"lr": 0.01, "weight_decay": 0.01}, {"lr": 0.02}),
    "Adadelta": ({"lr": 1.0, "rho": 0.8, "weight_decay": 0.01}, {"lr": 0.5}),
    "Rprop": ({"lr": 0.002, "etas": [0.4, 1.3]}, {"lr": 0.001}),
    "ASGD": ({"lr": 0.02, "lambd": 0.01, "t0": 4, "weight_decay": 0.01}, {"alpha": 0.5}),
    "Adam": ({"lr": 0.003, "amsgrad": True, "adam_w_mode": False, "weight_decay": 0.01}, {"lr": 0.01}),
    "AdamW": ({"lr": 0.003, "amsgrad": True, "maximize": True, "weight_decay": 0.01}, {"weight_decay": 0.0}),
}
"""Name -> (options, options of the second group)."""
OURS = {"Lion": FusedLion, "Lamb": FusedLamb, "AdamWScheduleFree": AdamWScheduleFree}


def kind_of(name: str) -> Any:
    word = name.split(",")[0].split(" ")[0]
    return OURS.get(word) or getattr(torch.optim, word)


def counterpart(name: str) -> Callable[[list[Group]], torch.optim.Optimizer]:
    options = {key: value for key, value in NAMED[name][0].items() if key != "adam_w_mode"}
    return lambda groups: kind_of(name)(groups, **options, **({} if name in OURS else {"foreach": False}))


def opened(
    open_engine: Open, folder: Path, name: str, pair: tuple[str, str], given: str, **more: Any
) -> tuple[Any, torch.nn.Module]:
    """An engine with this optimizer, named in the config or handed over, and its model."""
    model = patchy()
    options, second = NAMED[name]
    zero = {"sub_group_size": 8192, **more.pop("zero", {})}
    if given == "in the config":
        block = {"type": name.split(",")[0].split(" ")[0], "params": options}
        groups = in_groups(list(model.named_parameters()), second)
        config = make_config(pair, folder, optimizer=block, zero=zero, **more)
        return open_engine(model, config, model_parameters=groups), model
    optimizer = counterpart(name)(in_groups(list(model.named_parameters()), second))
    config = make_config(pair, folder, optimizer={}, zero=zero, **more)
    return open_engine(model, config, optimizer=optimizer), model


@in_pairs(
    name=tuple(NAMED), pair=TIERS, bf16=(False, True), clipping=(0.0, 0.05), given=("in the config", "as an object")
)
def test_it_equals_torch_bit_for_bit(
    open_engine: Open, nvme_path: Path, name: str, pair: tuple[str, str], bf16: bool, clipping: float, given: str
) -> None:
    engine, model = opened(open_engine, nvme_path, name, pair, given, bf16=bf16, clipping=clipping)
    plain = Plain(counterpart(name), NAMED[name][1], bf16=bf16, clipping=clipping)
    train(engine, 0, STEPS, bf16=bf16)
    train(plain, 0, STEPS, bf16=bf16)
    assert differences(held_by(engine, model), plain.held()) == []
    counts = {name: engine.full_state(name)["step"] for name in ("inside.weight", "branches.1.weight", "idle.weight")}
    assert counts == {"inside.weight": STEPS, "branches.1.weight": STEPS // 2, "idle.weight": 0}


class Odd(torch.nn.Module):
    """A scalar, nothing at all, and a cube."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes: tuple[tuple[int, ...], ...] = ((), (0,), (3, 4, 5))
        self.odd = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scalar, nothing, cube = self.odd
        return (cube * x * scalar).square().sum() + nothing.sum()


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_lamb_of_the_configuration_takes_deepspeeds_steps(open_engine: Open, nvme_path: Path, decay: float) -> None:
    """By hand, after fused_lamb_cuda_kernel.cu: what the moments lack shortens the whole step, behind the ratio."""
    params = {"lr": 0.1, "weight_decay": decay, "max_coeff": 10.0, "min_coeff": 0.01}
    layer = torch.nn.Linear(4, 1, bias=False)
    weight = torch.full((1, 4), 0.75)
    layer.weight.data.copy_(weight)
    config = make_config(("cpu", "cpu"), nvme_path, bf16=False, optimizer={"type": "Lamb", "params": params})
    engine, mean, square = open_engine(layer, config), torch.zeros(1, 4), torch.zeros(1, 4)
    for step in range(1, 4):
        x = torch.arange(1.0, 5.0)[None] * step
        engine.backward(engine(x).sum())
        engine.step()
        mean, square = 0.9 * mean + 0.1 * x, 0.999 * square + 0.001 * x * x
        change = mean / (square.sqrt() + 1e-8) + decay * weight
        ratio = (weight.norm() / change.norm()).clamp(0.01, 10.0)
        weight = weight - 0.1 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step) * ratio * change
        torch.testing.assert_close(engine.full_master("weight"), weight, rtol=1e-5, atol=1e-6)


def group_of(open_engine: Open, nvme_path: Path, kind: str, **params: Any) -> dict[str, Any]:
    """The first param group of a configured optimizer."""
    optimizer = {"type": kind, "params": params}
    engine = open_engine(torch.nn.Linear(4, 4), make_config(("cpu", "cpu"), nvme_path, bf16=False, optimizer=optimizer))
    found: dict[str, Any] = engine.optimizer.param_groups[0]
    return found


def test_defaults_of_the_configuration_are_deepspeeds(open_engine: Open, nvme_path: Path) -> None:
    lion = group_of(open_engine, nvme_path, "Lion")
    assert (lion["lr"], lion["betas"]) == (1e-3, (0.9, 0.999))
    decays = [
        group_of(open_engine, nvme_path, kind, torch_adam=torchs, **more)["weight_decay"]
        for kind, torchs, more in (
            ("AdamW", True, {}), ("Adam", True, {}), ("AdamW", False, {}), ("AdamW", True, {"weight_decay": 0.0}),
            ("Adam", True, {"adam_w_mode": False}), ("AdamW", True, {"amsgrad": True}),
        )
    ]  # fmt: skip
    assert decays == [0.01, 0.01, 0.0, 0.0, 0.0, 0.01]


@pytest.mark.parametrize("mode", [True, False, None])
def test_what_muon_leaves_to_adam_decays_as_adam_w_mode_says(
    open_engine: Open, nvme_path: Path, mode: bool | None
) -> None:
    said = {} if mode is None else {"adam_w_mode": mode}
    optimizer = {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.1, **said}}
    engine = open_engine(torch.nn.Linear(4, 4), make_config(("cpu", "cpu"), nvme_path, bf16=False, optimizer=optimizer))
    (decoupled,) = (group["decoupled"] for group in engine.optimizer.param_groups if not group["use_muon"])
    assert decoupled is (mode is not False)


def test_a_warm_up_ends_at_each_groups_own_rate(open_engine: Open, nvme_path: Path) -> None:
    optimizer = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4}}
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2}}
    config = make_config(("cpu", "cpu"), nvme_path, bf16=False, optimizer=optimizer, scheduler=schedule)
    engine = open_engine(torch.nn.Linear(4, 4), config)
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    assert engine.get_lr() == [0.02, 3e-4]


@pytest.mark.parametrize("pair", [("none", "none"), ("nvme", "nvme")])
def test_whole_parameters_may_have_any_shape(open_engine: Open, nvme_path: Path, pair: tuple[str, str]) -> None:
    model, plain = Odd(), Odd()
    options = {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.1}
    optimizer = FusedLamb(plain.parameters(), **options)
    block = {"type": "Lamb", "params": options}
    engine = open_engine(model, make_config(pair, nvme_path, bf16=False, optimizer=block))
    for step in range(3):
        x = torch.tensor(step + 0.5)
        engine.backward(engine(x))
        engine.step()
        plain(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        assert torch.equal(engine.full_parameter(name), parameter), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(engine.full_state(name)[kind], optimizer.state[parameter][kind]), (name, kind)


@pytest.mark.parametrize("name", ["SGD with momentum", "NAdam", "Adagrad", "Lion", "Adam", "AdamWScheduleFree"])
@pytest.mark.parametrize(("first", "then"), [(("nvme", "nvme"), ("cpu", "cpu")), (("none", "none"), ("nvme", "nvme"))])
def test_a_checkpoint_goes_on_bit_for_bit_on_another_tier(
    open_engine: Open, nvme_path: Path, tmp_path: Path, name: str, first: tuple[str, str], then: tuple[str, str]
) -> None:
    engine, model = opened(open_engine, nvme_path, name, first, "in the config", clipping=0.05)
    train(engine, 0, 5, bf16=True)
    engine.save_checkpoint(tmp_path)
    train(engine, 5, 9, bf16=True)
    resumed, other = opened(open_engine, nvme_path, name, then, "as an object", clipping=0.05)
    train(resumed, 0, 2, bf16=True)
    resumed.load_checkpoint(tmp_path)
    train(resumed, 5, 9, bf16=True)
    assert differences(held_by(resumed, other), held_by(engine, model)) == []


def test_a_checkpoint_of_another_optimizer_is_refused_and_its_weights_load(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    engine, model = opened(open_engine, nvme_path, "Lion", ("cpu", "cpu"), "in the config")
    train(engine, 0, 2, bf16=True)
    engine.save_checkpoint(tmp_path)
    other, _ = opened(open_engine, nvme_path, "RMSprop", ("cpu", "cpu"), "in the config")
    with pytest.raises(ConfigError, match=r"square_avg.*the checkpoint has exp_avg.*load_optimizer_states=False"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert all(torch.equal(other.full_master(n), engine.full_master(n)) for n, _ in model.named_parameters())


@pytest.mark.parametrize("pair", [("cpu", "cpu"), ("nvme", "nvme")])
def test_a_schedule_of_lr_and_momentum_acts_from_the_next_step_on(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    def cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.05], total_steps=STEPS + 1)

    name = "SGD with momentum"
    engine, model = opened(open_engine, nvme_path, name, pair, "in the config", bf16=False)
    plain = Plain(counterpart(name), NAMED[name][1], bf16=False, clipping=0.0)
    schedules = cycle(engine.optimizer), cycle(plain.optimizer)
    seen = set()
    for trainer, schedule in zip((engine, plain), schedules, strict=True):
        train(trainer, 0, STEPS, bf16=False, after=lambda step, schedule=schedule: schedule.step())
        seen.add(tuple(group["momentum"] for group in trainer.optimizer.param_groups))
    assert differences(held_by(engine, model), plain.held()) == []
    assert len(seen) == 1 and NAMED[name][0]["momentum"] not in seen.pop()


@pytest.mark.parametrize(("name", "planes"), [("SGD", 0), ("Lion", 1), ("NAdam", 2), ("RMSprop", 3)])
def test_the_plan_has_room_for_as_many_states_as_there_are(
    open_engine: Open, nvme_path: Path, name: str, planes: int
) -> None:
    for bf16 in (False, True):
        engine, _ = opened(open_engine, nvme_path, name, ("cpu", "nvme"), "in the config", bf16=bf16)
        told = sum(row.nbytes for row in engine.plan.rows if row.array == "optimizer states")
        numel = sum(unit.numel for unit in engine.units)
        assert told == numel * (4 * planes + 2 * bf16)
        assert step_traffic(engine.plan, layout_of(engine), on_gpu=False).nvme_write_bytes == told


def test_momentum_that_begins_later_needs_room_from_the_start(open_engine: Open, nvme_path: Path) -> None:
    engine, model = opened(open_engine, nvme_path, "SGD", ("cpu", "cpu"), "in the config")
    train(engine, 0, 1, bf16=True)
    before = held_by(engine, model)
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigError, match=r"SGD keeps momentum_buffer.*a momentum above 0"):
        train(engine, 1, 2, bf16=True)
    engine.optimizer.param_groups[0]["momentum"] = 0.0
    engine.step()
    assert differences(held_by(engine, model), before) != []


@pytest.mark.parametrize("pair", [("cpu", "cpu"), ("nvme", "nvme")])
def test_states_are_read_and_replaced_by_torchs_names(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    name = "SGD with momentum"
    engine, model = opened(open_engine, nvme_path, name, pair, "in the config", bf16=False)
    plain = Plain(counterpart(name), NAMED[name][1], bf16=False, clipping=0.0)
    train(engine, 0, 3, bf16=False)
    train(plain, 0, 3, bf16=False)
    weight, master = model.inside.weight, plain.masters["inside.weight"]
    found = safe_get_full_optimizer_state(weight, "momentum_buffer")
    assert found is not None and torch.equal(found, plain.optimizer.state[master]["momentum_buffer"])
    with pytest.raises(StateError, match="available: momentum_buffer"):
        safe_get_full_optimizer_state(weight, "exp_avg")
    safe_set_full_optimizer_state(weight, 2 * found, "momentum_buffer")
    plain.optimizer.state[master]["momentum_buffer"].mul_(2)
    train(engine, 3, 5, bf16=False)
    train(plain, 3, 5, bf16=False)
    assert differences(held_by(engine, model), plain.held()) == []


@pytest.mark.broad
@in_pairs(name=tuple(NAMED), pair=TIERS)
def test_the_state_dict_of_torchs_optimizer_goes_on_in_the_engine(
    open_engine: Open, nvme_path: Path, name: str, pair: tuple[str, str]
) -> None:
    plain = Plain(counterpart(name), NAMED[name][1], bf16=False, clipping=0.0)
    train(plain, 0, 5, bf16=False)
    engine, model = opened(open_engine, nvme_path, name, pair, "as an object", bf16=False)
    for parameter, (_, weight) in zip(model.parameters(), plain.model.named_parameters(), strict=True):
        safe_set_full_fp32_param(parameter, weight.detach())
    engine.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    for trainer in (engine, plain):
        train(trainer, 5, 9, bf16=False)
    assert differences(held_by(engine, model), plain.held()) == []


def test_the_states_of_another_optimizer_are_refused_and_nothing_changes(open_engine: Open, nvme_path: Path) -> None:
    engine, model = opened(open_engine, nvme_path, "SGD with momentum", ("cpu", "cpu"), "in the config", bf16=False)
    train(engine, 0, 2, bf16=False)
    before = held_by(engine, model)
    other = torch.optim.RMSprop(in_groups(list(patchy().named_parameters()), {}))
    for group in other.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    other.step()
    with pytest.raises(ConfigError, match=r"SGD keeps momentum_buffer for each parameter, got .*square_avg"):
        engine.optimizer.load_state_dict(other.state_dict())
    assert differences(held_by(engine, model), before) == [] and engine.get_lr() == [0.05, 0.05]
