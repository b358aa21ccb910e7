"""The optimizer that `initialize` returns, as an object: live groups, states that are read when they are asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import masters, train
from models import build, make_config, tokens
from torch import nn

import zero
from offload.errors import BudgetError, ConfigError, StateError
from zero import utils
from zero.assembly import model_changes
from zero.engine import values as kept_states
from zero.plan.machine import Machine, read_machine

Open = Callable[..., Any]
TIERS = {"device": ("none", "none"), "cpu": ("cpu", "cpu"), "nvme": ("nvme", "nvme")}
on_every_tier = pytest.mark.parametrize("tier", TIERS)


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@on_every_tier
def test_states_are_the_engines_and_appear_with_the_first_step(open_engine: Open, nvme_path: Path, tier: str) -> None:
    engine = open_engine(build("gpt"), make_config(TIERS[tier], nvme_path))
    optimizer, weight = engine.optimizer, engine.module.head.weight
    assert optimizer.overflow is False and len(optimizer.state) == 0 and weight not in optimizer.state
    assert optimizer.state_dict()["state"] == {}
    train(engine, 0, 1)
    assert set(map(id, optimizer.state)) == set(map(id, engine.module.parameters()))
    state, kept = optimizer.state[weight], engine.full_state("head.weight")
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"} and float(state["step"]) == 2.0
    assert torch.equal(state["exp_avg"], kept["exp_avg"]) and torch.equal(state["exp_avg_sq"], kept["exp_avg_sq"])
    assert optimizer.optimizer.state is optimizer.state  # what DeepSpeed wraps


RULES = {
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "NAdam": {},  # keeps a number besides its planes and its steps
}


@on_every_tier
@pytest.mark.parametrize("rule", RULES)
def test_a_state_dict_goes_on_where_it_was_taken(open_engine: Open, nvme_path: Path, tier: str, rule: str) -> None:
    """Into another engine with the same weights: the next steps are the same, bit for bit; groups stay live."""
    optimizer = {"type": rule, "params": {"lr": 1e-3, **RULES[rule]}}
    config = make_config(TIERS[tier], nvme_path, bf16=False, optimizer=optimizer)
    engine = train(open_engine(build("gpt"), config), 0, 1)
    engine.optimizer.param_groups[0]["lr"] = 0.002
    saved = copy.deepcopy(engine.optimizer.state_dict())
    model = build("gpt")
    model.load_state_dict({name: value for name, value in engine.named_full_parameters()})
    other = open_engine(model, config)
    group = other.optimizer.param_groups[0]
    other.optimizer.load_state_dict(saved)
    assert other.optimizer.param_groups[0] is group and group["lr"] == 0.002
    assert equal(masters(train(engine, 2, 3)), masters(train(other, 2, 3)))


@on_every_tier
@pytest.mark.parametrize("rule", RULES)
def test_a_parameter_whose_states_are_deleted_begins_anew(
    open_engine: Open, nvme_path: Path, tier: str, rule: str
) -> None:
    """As in torch: by `del`, `pop` and `clear`; the next step is the first step of an engine with these weights."""
    optimizer = {"type": rule, "params": {"lr": 1e-3, **RULES[rule]}}
    config = make_config(TIERS[tier], nvme_path, bf16=False, optimizer=optimizer)
    engine = train(open_engine(build("gpt"), config), 0, 1)
    states, weight, bias = engine.optimizer.state, engine.module.head.weight, next(engine.module.parameters())
    del states[weight]
    assert weight not in states and bias in states
    with pytest.raises(KeyError):
        del states[weight]
    assert states.pop(bias).keys() == engine.optimizer.state[next(iter(states))].keys()
    states.clear()
    assert len(states) == 0
    model = build("gpt")
    model.load_state_dict({name: value for name, value in engine.named_full_parameters()})
    other = open_engine(model, config)
    assert equal(masters(train(engine, 2, 3)), masters(train(other, 2, 3)))


@on_every_tier
def test_states_that_are_given_back_are_those_of_the_next_step(open_engine: Open, nvme_path: Path, tier: str) -> None:
    """As Lightning does at its end, which moves each state to a device."""
    config = make_config(TIERS[tier], nvme_path)
    engine, other = (train(open_engine(build("gpt"), config), 0, 1) for _ in range(2))
    for parameter, state in engine.optimizer.state.items():
        engine.optimizer.state[parameter] = {name: value.cpu() for name, value in state.items()}
    assert equal(masters(train(engine, 2)), masters(train(other, 2)))
    weight = engine.module.head.weight
    engine.optimizer.state[weight] = {**engine.optimizer.state[weight], "exp_avg": torch.ones(weight.shape)}
    assert (engine.full_state("head.weight")["exp_avg"] == 1).all()
    with pytest.raises(ConfigError, match="keeps"):
        engine.optimizer.state[weight] = {"momentum_buffer": torch.ones(weight.shape)}


def test_the_model_is_looked_through_only_for_a_parameter_that_has_no_states_yet(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("gpt")
    model.head.requires_grad_(False)
    engine = train(open_engine(model, make_config(TIERS["cpu"], nvme_path)), 0)
    looked, census = [], model_changes.ParameterInventory

    def counted(*given: Any) -> Any:
        looked.append(given)
        return census(*given)

    monkeypatch.setattr(model_changes, "ParameterInventory", counted)
    for parameter, state in engine.optimizer.state.items():
        engine.optimizer.state[parameter] = state
    assert looked == []
    late = model.head.requires_grad_(True).weight
    engine.optimizer.add_param_group({"params": [late]})
    ones = torch.ones(late.shape)
    engine.optimizer.state[late] = {"step": torch.tensor(1.0), "exp_avg": ones, "exp_avg_sq": ones}
    assert looked
    assert (engine.full_state("head.weight")["exp_avg"] == 1).all()


@on_every_tier
def test_states_of_no_step_begin_anew(open_engine: Open, nvme_path: Path, tier: str) -> None:
    """Also where moments of earlier steps are stored: the next step is the first of a fresh optimizer."""
    config = make_config(TIERS[tier], nvme_path, bf16=False)
    engine, fresh = open_engine(build("gpt"), config), open_engine(build("gpt"), config)
    empty = fresh.optimizer.state_dict()
    train(engine, 0, 1)
    with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for mine, first in zip(engine.module.parameters(), build("gpt").parameters(), strict=True):
            mine.data.copy_(first)
    engine.optimizer.load_state_dict(empty)
    train(engine, 5, 6)
    train(fresh, 5, 6)
    assert equal(masters(engine), masters(fresh))


def test_a_closed_engine_has_no_states(open_engine: Open, nvme_path: Path) -> None:
    engine = train(open_engine(build("gpt"), make_config(TIERS["nvme"], nvme_path)), 0)
    before = engine.optimizer.state_dict()
    engine.close()
    after = engine.optimizer.state_dict()
    assert len(engine.optimizer.state) == 0 and after["state"] == {}
    assert after["param_groups"] == before["param_groups"]
    with pytest.raises(StateError, match="closed"):
        engine.optimizer.load_state_dict(before)


def test_it_is_what_torch_reads(open_engine: Open, nvme_path: Path) -> None:
    """torch's AdamW takes the state dict and makes the same step, to a rounding."""
    engine = train(open_engine(build("gpt"), make_config(TIERS["cpu"], nvme_path, bf16=False)), 0, 1)
    plain = build("gpt")
    plain.load_state_dict(dict(engine.named_full_parameters()))
    optimizer = torch.optim.AdamW(plain.parameters())
    optimizer.load_state_dict(engine.optimizer.state_dict())
    plain(tokens(2)).backward()
    optimizer.step()
    train(engine, 2)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(engine.full_master(name), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_state_that_the_rule_does_not_keep_is_left_out(open_engine: Open, nvme_path: Path) -> None:
    """As with torch: what AMSGrad has saved goes on as Adam."""
    model = build("gpt")
    saved_by = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(tokens(0)).backward()
    saved_by.step()
    saved = saved_by.state_dict()
    saved["param_groups"][0]["amsgrad"] = False
    engine = open_engine(build("gpt"), make_config(TIERS["cpu"], nvme_path, bf16=False))
    engine.optimizer.load_state_dict(saved)
    state = engine.full_state("head.weight")
    assert state.keys() == {"exp_avg", "exp_avg_sq", "step"} and state["step"] == 1
    place = [name for name, _ in model.named_parameters()].index("head.weight")
    assert torch.equal(state["exp_avg"], saved["state"][place]["exp_avg"])


def test_what_does_not_fit_is_refused_and_changes_nothing(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = train(open_engine(build("gpt"), make_config(TIERS["cpu"], nvme_path)), 0)
    saved, before = engine.optimizer.state_dict(), engine.full_state("head.weight")
    saved["param_groups"][0]["params"].pop()
    with pytest.raises(ConfigError, match="expected groups of"):
        engine.optimizer.load_state_dict(saved)
    assert torch.equal(engine.full_state("head.weight")["exp_avg"], before["exp_avg"])

    def small(device: torch.device) -> Machine:
        machine = read_machine(device)
        return type(machine)(**{**vars_of(machine), "available_bytes": 100})

    monkeypatch.setattr(kept_states, "read_machine", small)
    with pytest.raises(BudgetError, match="save_checkpoint"):
        engine.optimizer.state_dict()


def vars_of(machine: Machine) -> dict[str, Any]:
    return {name: getattr(machine, name) for name in machine.__dataclass_fields__}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parts_of_fp32_values_are_shown_under_the_stages_name(open_engine: Open, nvme_path: Path, stage: int) -> None:
    model = build("gpt")
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
    config = make_config(TIERS["device"], nvme_path, optimizer={}, zero={"stage": stage})
    engine = train(open_engine(model, config, optimizer=optimizer), 0)
    names = {
        1: "single_partition_of_fp32_groups",
        2: "single_partition_of_fp32_groups",
        3: "fp32_partitioned_groups_flat",
    }
    for name in set(names.values()):
        assert hasattr(engine.optimizer, name) == (names.get(stage) == name)
    if stage:
        shown = getattr(engine.optimizer, names[stage])
        assert [part.dtype for part in shown] == [torch.float32] * 2
        name_of = {id(p): name for name, p in engine.module.named_parameters()}
        for part, group in zip(shown, (decayed, others), strict=True):
            assert torch.equal(part, torch.cat([engine.full_master(name_of[id(p)]).flatten() for p in group]))


def test_it_is_an_optimizer_of_torch_with_live_groups(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), make_config(TIERS["cpu"], nvme_path))
    assert isinstance(engine.optimizer, torch.optim.Optimizer) and "lr" in engine.optimizer.defaults
    assert all(isinstance(p, nn.Parameter) for group in engine.optimizer.param_groups for p in group["params"])
    before = masters(engine)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    train(engine, 0)
    assert equal(masters(engine), before)


@pytest.mark.parametrize("handed_over", [True, False])
def test_a_group_that_is_added_has_the_options_of_the_optimizer(
    open_engine: Open, nvme_path: Path, handed_over: bool
) -> None:
    model = build("gpt")
    late, *others = model.parameters()
    late.requires_grad_(False)
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    optimizer = torch.optim.AdamW(others, **options) if handed_over else None
    block = {} if handed_over else {"type": "AdamW", "params": options}
    engine = open_engine(model, make_config(TIERS["device"], nvme_path, optimizer=block), optimizer=optimizer)
    late.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [late]})
    assert {key: engine.optimizer.param_groups[1][key] for key in options} == options


@on_every_tier
@pytest.mark.parametrize("new", [False, True])
def test_states_load_into_parameters_that_join_before_the_next_forward(
    open_engine: Open, nvme_path: Path, tier: str, new: bool
) -> None:
    """The order of a resume: unfreeze the head, or add one, give it to the optimizer, load what both had."""

    def joined() -> tuple[Any, nn.Linear]:
        model = build("gpt")
        model.head.requires_grad_(False)
        engine = open_engine(model, make_config(TIERS[tier], nvme_path))
        late = model.head.requires_grad_(True)
        if new:
            width = model.norm.weight.numel()
            with torch.random.fork_rng():
                torch.manual_seed(3)
                late = nn.Linear(width, width)
            model.norm = nn.Sequential(model.norm, late)
        engine.optimizer.add_param_group({"params": list(late.parameters())})
        return engine, late

    engine, late = joined()
    train(engine, 0, 1)
    saved, values = copy.deepcopy(engine.optimizer.state_dict()), masters(engine)
    expected = masters(train(engine, 2, 3))
    other, late = joined()
    other.optimizer.load_state_dict(saved)
    state = other.optimizer.state[late.weight]
    assert float(state["step"]) == 2.0 and state["exp_avg"].any()
    for name, parameter in other.module.named_parameters():
        utils.safe_set_full_fp32_param(parameter, values[name])
    assert equal(masters(train(other, 2, 3)), expected)


def test_the_optimizer_of_an_engine_is_refused_by_name_and_takes_no_step(open_engine: Open, nvme_path: Path) -> None:
    """A cell of a notebook that runs again."""
    config = make_config(("cpu", "cpu"), nvme_path)
    engine = train(open_engine(build("gpt"), config), 0)
    before = masters(engine)
    with pytest.raises(ConfigError, match=r"expected a fresh .*Optimizer, got the ZeroOptimizer that an engine"):
        zero.initialize(model=build("gpt"), optimizer=engine.optimizer, config=config)
    assert engine.global_steps == 1 and equal(masters(engine), before)


def test_a_step_that_the_groups_forbid_is_not_taken_and_the_run_can_be_saved_and_go_on(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    optimizer = {"type": "SGD", "params": {"lr": 0.05}}
    config = make_config(("cpu", "cpu"), nvme_path, optimizer=optimizer)
    plain = masters(train(open_engine(build("gpt"), config), 0, 1))
    engine = train(open_engine(build("gpt"), config), 0)
    before = masters(engine)
    engine.backward(engine(tokens(1)))
    group = engine.optimizer.param_groups[0]
    group["momentum"] = 0.9
    with pytest.raises(ConfigError, match="momentum"):
        engine.step()
    engine.save_checkpoint(tmp_path)
    assert engine.global_steps == 1 and equal(masters(engine), before)
    group["momentum"] = 0.0
    engine.step()
    assert engine.global_steps == 2 and equal(masters(engine), plain)


def test_reading_one_parameter_reads_its_own_sub_groups_and_not_the_unit(open_engine: Open, nvme_path: Path) -> None:
    """A loop over the parameters of a block must not read the block once for each of them."""
    group = 4096
    config = make_config(TIERS["nvme"], nvme_path, zero={"sub_group_size": group})
    del config["zero_optimization"]["stage3_max_live_parameters"]  # else the matrix would be in tiles
    engine = open_engine(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 256, dtype=torch.bfloat16)).square().mean())
        engine.step()
    engine.synchronize()
    for read in (engine.full_parameter, engine.full_master, engine.full_state):
        before = engine.statistics().nvme_read_bytes
        read("0.bias")
        # A bias is in two sub-groups at most, and an element has a weight, a remainder and two moments.
        assert engine.statistics().nvme_read_bytes - before <= 2 * group * (2 + 2 + 8)
