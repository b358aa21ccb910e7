"""Optimizers that users hand over run over tiles, or over whole parameters; what cannot is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import masters
from models import make_config
from tiled_optimizers import Group, Plain, differences, held_by, in_groups, patchy, train
from torch import Tensor

from offload.errors import ConfigError
from zero.config import load_config
from zero.ops.adagrad import DeepSpeedCPUAdagrad
from zero.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero.ops.lion import DeepSpeedCPULion, FusedLion

Open = Callable[..., Any]
CPU, NVME = ("cpu", "cpu"), ("nvme", "nvme")


class Drifting(torch.optim.Optimizer):
    """Element-wise, and awkward: a bf16 state, a Python number, a counter in the group, `.data`, None at first."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(narrow=torch.zeros_like(parameter.data, dtype=torch.bfloat16), pace=1.0, late=None)
                elif state["late"] is None:
                    state["late"] = parameter.data.clone()
                state["pace"] *= 0.9
                state["narrow"] = (state["narrow"] + parameter.grad.to(torch.bfloat16)) / 2
                parameter.data = parameter.data - group["lr"] * state["pace"] / group["calls"] * state["narrow"]


class Ahead(torch.optim.SGD):
    """Every sixth step weights go half way back to slow ones, which the first such step makes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["fast"] = state.get("fast", 0) + 1
                if state["fast"] % 6 == 0 and "slow" in state:
                    p.copy_(state["slow"].lerp_(p, 0.5))
                elif state["fast"] % 6 == 0:
                    state["slow"] = p.detach().clone()


class Lamb(torch.optim.Optimizer):
    """A step as long as the parameter's norm says."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * p.norm() / p.grad.norm(), alpha=group["lr"])


class FlaggedLamb(Lamb):
    is_element_wise = True


class Remembering(torch.optim.Optimizer):
    """Keeps the last gradient in a dict of its own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.last: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + self.last.get(p, 0.0), alpha=group["lr"])
                    self.last[p] = p.grad.clone()


class Global(torch.optim.SGD):
    """Counts its steps in the object."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()


class Handing(torch.optim.Optimizer):
    """Leaves the work to others, which have the parameters too."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.others = [torch.optim.SGD(group["params"], lr) for group in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for other in self.others:
            other.step()


class Slower(torch.optim.AdamW):
    """A subclass of a known one that steps in its own way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.999)


class FlaggedDrifting(Drifting):
    is_element_wise = True


class FlaggedSlower(Slower):
    is_element_wise = True


class FlaggedAhead(Ahead):
    is_element_wise = True


def opened(
    open_engine: Open, folder: Path, optimizer: Any, pair: tuple[str, str] = CPU, **more: Any
) -> tuple[Any, Any]:
    model = patchy()
    made = optimizer(in_groups(list(model.named_parameters()), {"lr": 0.02}))
    config = make_config(pair, folder, optimizer={}, zero={"sub_group_size": 8192}, **more)
    return open_engine(model, config, optimizer=made), model


@pytest.mark.parametrize("pair", [("none", "none"), NVME])
@pytest.mark.parametrize("kind", [Drifting, Slower, Ahead, Lamb, FlaggedDrifting, FlaggedSlower, FlaggedAhead])
def test_a_class_of_the_users_gives_the_bits_that_it_gives_alone(
    open_engine: Open, nvme_path: Path, kind: Any, pair: tuple[str, str]
) -> None:
    engine, model = opened(open_engine, nvme_path, kind, pair, bf16=False)
    plain = Plain(kind, {"lr": 0.02}, bf16=False, clipping=0.0)
    train(engine, 0, 14, bf16=False)
    train(plain, 0, 14, bf16=False)
    found, wanted = held_by(engine, model), plain.held()
    # A bf16 state is kept in fp32, with the same values.
    found = {k: v.to(wanted[k].dtype) if isinstance(v, Tensor) and k in wanted else v for k, v in found.items()}
    assert differences(found, wanted) == []
    assert any(unit.needs_whole_parameters for unit in engine.units) == ("is_element_wise" not in vars(kind))
    if issubclass(kind, Drifting):
        assert [group["calls"] for group in engine.optimizer.param_groups] == [14, 14]


@pytest.mark.parametrize(("kind", "steps"), [(Drifting, 1), (Ahead, 4)])
def test_what_is_not_made_yet_when_a_checkpoint_is_saved_is_made_after_it_is_loaded(
    open_engine: Open, nvme_path: Path, tmp_path: Path, kind: Any, steps: int
) -> None:
    engine, model = opened(open_engine, nvme_path, kind)
    train(engine, 0, steps, bf16=True)
    engine.save_checkpoint(tmp_path)
    resumed, other = opened(open_engine, nvme_path, kind, NVME)
    train(resumed, 0, 7, bf16=True)
    resumed.load_checkpoint(tmp_path)
    for trainer in (engine, resumed):
        train(trainer, steps, 14, bf16=True)
    assert differences(held_by(resumed, other), held_by(engine, model)) == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "dense gradients"),
        (Global, "steps in common for all parameters"),
        (Handing, "does not change the parameter"),
        (Remembering, "a step depends on more than the parameter's weight, gradient and state"),
        (FlaggedLamb, "two halves of a parameter are not updated like the whole parameter"),
    ],
)
def test_what_cannot_run_parameter_by_parameter_is_refused_by_name(
    open_engine: Open, nvme_path: Path, kind: Any, why: str
) -> None:
    def make(groups: list[Group]) -> Any:
        return kind([p for group in groups for p in group["params"]])

    with pytest.raises(ConfigError, match=rf"{kind.__name__} is not available: .*{why}.*AdamW.*Lion"):
        opened(open_engine, nvme_path, make)


def test_an_unknown_class_that_says_nothing_is_named_with_the_flag(
    open_engine: Open, nvme_path: Path, caplog: Any
) -> None:
    for kind in (Slower, FlaggedSlower):
        opened(open_engine, nvme_path, kind)
    (record,) = (record for record in caplog.messages if "is_element_wise" in record)
    assert "Slower is an unknown class" in record and "set Slower.is_element_wise = True" in record


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RAdam])
def test_a_choice_of_implementation_changes_nothing(open_engine: Open, nvme_path: Path, kind: Any) -> None:
    """torch itself takes `capturable` on some devices only; a step of the engine is in no graph."""

    def held(**choice: bool) -> dict[str, Any]:
        engine, model = opened(open_engine, nvme_path, lambda groups: kind(groups, **choice), bf16=False)
        train(engine, 0, 3, bf16=False)
        return held_by(engine, model)

    assert differences(held(capturable=True), held(foreach=False)) == []


def test_a_learning_rate_of_0_at_the_beginning_is_no_reason_to_refuse(open_engine: Open, nvme_path: Path) -> None:
    def make(groups: list[Group]) -> Any:
        return Drifting([p for group in groups for p in group["params"]], lr=0.0)

    engine, model = opened(open_engine, nvme_path, make, bf16=False)
    before = held_by(engine, model)
    train(engine, 0, 1, bf16=False)
    still = held_by(engine, model)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.02
    train(engine, 1, 2, bf16=False)
    weights = [name for name in before if name.endswith("/weight")]
    assert weights and differences({n: still[n] for n in weights}, {n: before[n] for n in weights}) == []
    after = held_by(engine, model)
    assert differences({n: after[n] for n in weights}, {n: before[n] for n in weights}) != []


def test_muon_as_an_object_trains_the_matrices_that_it_was_given(open_engine: Open, nvme_path: Path) -> None:
    def matrices(groups: list[Group]) -> Any:
        return torch.optim.Muon([p for group in groups for p in group["params"] if p.dim() == 2], lr=0.02)

    engine, model = opened(open_engine, nvme_path, matrices, NVME, bf16=False)
    plain = Plain(matrices, {}, bf16=False, clipping=0.0)
    train(engine, 0, 6, bf16=False)
    train(plain, 0, 6, bf16=False)
    wanted = plain.held()
    for name, parameter in model.named_parameters():
        assert torch.equal(engine.full_parameter(name), wanted[f"{name}/weight"])
        if parameter.dim() == 2 and f"{name}/momentum_buffer" in wanted:
            assert torch.equal(engine.full_state(name)["momentum_buffer"], wanted[f"{name}/momentum_buffer"])


@pytest.mark.parametrize(
    ("kind", "alike"),
    [
        (DeepSpeedCPUAdam, lambda groups: torch.optim.AdamW(groups, weight_decay=0.1)),
        (FusedAdam, lambda groups: torch.optim.AdamW(groups, weight_decay=0.1)),
        (DeepSpeedCPUAdagrad, lambda groups: torch.optim.Adagrad(groups, weight_decay=0.1)),
        (DeepSpeedCPULion, lambda groups: FusedLion(groups, weight_decay=0.1)),
    ],
)
def test_deepspeeds_classes_do_what_their_counterparts_do(
    open_engine: Open, nvme_path: Path, kind: Any, alike: Any
) -> None:
    ends = []
    for make in (lambda groups: kind(groups, weight_decay=0.1), alike):
        engine, _ = opened(open_engine, nvme_path, make)
        train(engine, 0, 6, bf16=True)
        ends.append(masters(engine))
    assert differences(*ends) == []


def test_adam_that_decays_gradients_and_adam_without_bias_correction_are_what_they_say(
    open_engine: Open, nvme_path: Path
) -> None:
    def make(groups: list[Group]) -> Any:
        return DeepSpeedCPUAdam(groups, weight_decay=0.1, adamw_mode=False, bias_correction=False)

    engine, model = opened(open_engine, nvme_path, make, bf16=False)
    alone = Plain(make, {"lr": 0.02}, bf16=False, clipping=0.0)
    train(engine, 0, 6, bf16=False)
    train(alone, 0, 6, bf16=False)
    assert differences(held_by(engine, model), alone.held()) == []


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("DeepSpeedCPUAdam", "Adam"), ("cpuadam", "Adam"), ("FusedAdam", "Adam"), ("adamw", "AdamW"), ("sgd", "SGD"),
        ("torch.optim.RMSprop", "RMSprop"), ("NADAM", "NAdam"), ("DeepSpeedCPULion", "Lion"), ("adagrad", "Adagrad"),
    ],
)  # fmt: skip
def test_a_name_is_known_in_any_spelling(word: str, kind: str) -> None:
    block = load_config({"optimizer": {"type": word}}).optimizer
    assert block is not None and block.type == kind


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"type": "OneBitAdam"}, "1-bit optimizers are not available; use AdamW"),
        ({"type": "LBFGS"}, "its step runs the model several times; use AdamW"),
        ({"type": "MuAdam", "params": {"momentum": 0.9}}, r"1 problem\n.*muP"),  # its keys are no problem
        ({"type": "Muon", "params": {"per_head_muon": True}}, "Muon orthogonalizes whole matrices"),
        ({"type": "RMSpropp"}, "the nearest is RMSprop"),
        ({"type": "SGD", "params": {"momentun": 0.9}}, "optimizer.params.momentun.*'momentum'"),
        ({"type": "SGD", "params": {"betas": [0.9, 0.99]}}, "optimizer.params.betas.*it belongs to Adam, AdamW"),
        ({"type": "Lion", "params": {"momentum": 0.9}}, "optimizer.params.momentum: expected a key of Lion"),
        ({"type": "Adagrad", "params": {"amsgrad": True}}, "optimizer.params.amsgrad.*it belongs to Adam, AdamW"),
        ({"type": "RMSprop", "params": {"momentum": -1}}, "optimizer.params.momentum"),
        ({"type": "Adam", "params": {"bias_correction": False, "amsgrad": True}}, "optimizer.params.bias_correction"),
    ],
)
def test_a_name_or_key_that_does_not_fit_is_an_error_with_the_nearest(block: Group, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({"optimizer": block})


def test_options_that_torch_refuses_are_refused_in_its_words(open_engine: Open, nvme_path: Path) -> None:
    block = {"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}
    with pytest.raises(ConfigError, match=r"optimizer.params: Nesterov momentum requires a momentum"):
        open_engine(patchy(), make_config(CPU, nvme_path, optimizer=block))


def test_narrow_states_are_adams_alone(open_engine: Open, nvme_path: Path) -> None:
    zero = {"offload_optimizer": {"state_dtype": "bf16"}}
    for kind in ("NAdam", "Muon"):
        with pytest.raises(ConfigError, match=rf"state_dtype: bf16 is only available with Adam and AdamW, got {kind}"):
            open_engine(patchy(), make_config(CPU, nvme_path, optimizer={"type": kind}, zero=zero))


# ---- which parameters, and in which groups -----------------------------------------------------


def two_layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))


def test_a_callable_gets_the_parameters_that_were_passed(open_engine: Open, nvme_path: Path, caplog: Any) -> None:
    model = two_layers()
    before = [p.detach().clone() for p in model[0].parameters()]
    groups = [{"params": [model[1].weight], "lr": 0.5}, {"params": [model[1].bias], "lr": 0.25}]
    config = make_config(CPU, nvme_path, optimizer={}, bf16=False)
    engine = open_engine(model, config, optimizer=lambda given: torch.optim.SGD(given, lr=1.0), model_parameters=groups)
    assert engine.get_lr() == [0.5, 0.25]
    groups[0]["lr"] = 0.125
    assert engine.get_lr() == [0.125, 0.25]
    assert "2 parameters (0.weight, 0.bias) require a gradient and are in no param group" in caplog.text
    engine.backward(engine(torch.ones(2, 16)).sum())
    engine.step()
    assert all(torch.equal(engine.full_parameter(f"0.{n}"), v) for n, v in zip(("weight", "bias"), before, strict=True))


@pytest.mark.parametrize("way", ["named", "an object"])
def test_a_parameter_that_is_passed_twice_is_refused_by_name(open_engine: Open, nvme_path: Path, way: str) -> None:
    model = two_layers()
    twice = [*model.parameters(), model[0].weight]
    config = make_config(CPU, nvme_path, bf16=False, **({} if way == "named" else {"optimizer": {}}))
    with pytest.warns(UserWarning, match="duplicate") if way == "an object" else nullcontext():
        more = {"model_parameters": twice} if way == "named" else {"optimizer": torch.optim.AdamW(twice)}
    with pytest.raises(ConfigError, match=r"0\.weight: expected each parameter once"):
        open_engine(model, config, **more)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_what_is_written_into_a_group_that_was_passed_acts_as_with_torch(
    open_engine: Open, nvme_path: Path, kind: str
) -> None:
    model = two_layers()
    groups: list[Group] = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "weight_decay": 0.0}]
    config = make_config(CPU, nvme_path, bf16=False, optimizer={"type": kind, "params": {"lr": 0.5}})
    engine = open_engine(model, config, model_parameters=groups)
    groups[1]["lr"] = 0.0
    before = engine.full_parameter("1.weight").clone(), engine.full_parameter("0.weight").clone()
    engine.backward(engine(torch.ones(2, 16)).sum())
    engine.step()
    assert engine.get_lr() == [0.5, 0.0]
    assert torch.equal(engine.full_parameter("1.weight"), before[0])
    assert not torch.equal(engine.full_parameter("0.weight"), before[1])


@pytest.mark.parametrize("grouped", [False, True])
def test_a_callable_gets_nothing_that_is_frozen(open_engine: Open, nvme_path: Path, grouped: bool) -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    every = list(model.parameters())
    got: list[Any] = []

    def make(given: Any) -> torch.optim.Optimizer:
        got.extend(given)
        return torch.optim.SGD(given, lr=1.0)

    config = make_config(CPU, nvme_path, optimizer={}, bf16=False)
    open_engine(model, config, optimizer=make, model_parameters=[{"params": every}] if grouped else iter(every))
    trained = got[0]["params"] if grouped else got
    assert [id(p) for p in trained] == [id(p) for p in model[1].parameters()]


def test_groups_that_were_passed_keep_what_is_frozen(open_engine: Open, nvme_path: Path) -> None:
    """So that code that thaws through them finds it."""
    model = two_layers()
    model[0].requires_grad_(False)
    groups: list[Group] = [{"params": layer.parameters()} for layer in model]
    engine = open_engine(model, make_config(CPU, nvme_path, bf16=False), model_parameters=groups)
    assert [len(group["params"]) for group in groups] == [2, 2]
    assert [len(group["params"]) for group in engine.optimizer.param_groups] == [0, 2]


@pytest.mark.parametrize(
    "make", [lambda given: DeepSpeedCPUAdam(given, adamw_mode=False), lambda given: FusedAdam(given, adam_w_mode=False)]
)
def test_a_group_that_is_added_later_decays_as_the_class_does(
    open_engine: Open, nvme_path: Path, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, "weight_decay": 0.5}
    optimizer = make([{"params": list(model[0].parameters()), **options}])
    engine = open_engine(model, make_config(NVME, nvme_path, bf16=False, optimizer=None), optimizer=optimizer)
    optimizer.add_param_group({"params": list(model[1].parameters()), **options})
    plain = torch.optim.Adam(twin.parameters(), **options)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())
        engine.step()
        plain.zero_grad()
        twin(x).square().mean().backward()
        plain.step()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(engine.full_parameter(name), parameter.detach(), rtol=1e-5, atol=1e-6)
