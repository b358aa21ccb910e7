"""Adafactor, and any class whose states have not the parameter's shape: the bits of the class alone, on every tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import LoraLinear, make_config, seeded
from odd_states import BLOCK, BothSides, LateRows, RowMeans, Stateless, adafactor, plain_adafactor
from pairwise import in_pairs
from recovery import once_more
from tiled_optimizers import Plain, batch, differences, held_by, in_groups, patchy, train
from torch import Tensor, nn

from offload.errors import BudgetError, ConfigError, StorageError
from offload.io.aio import AioFault
from zero import utils
from zero.config import load_config

STEPS = 8
NVME = ("nvme", "nvme")
TIERS = (("none", "none"), ("cpu", "cpu"), NVME, ("cpu", "nvme"))
Open = Callable[..., Any]


def opened(open_engine: Open, folder: Path, pair: tuple[str, str], **more: Any) -> tuple[Any, nn.Module]:
    model = patchy()
    zero = {"sub_group_size": 8192, **more.pop("zero", {})}
    return open_engine(model, make_config(pair, folder, optimizer=BLOCK, zero=zero, **more)), model


def handed_over(open_engine: Open, folder: Path, kind: Any, pair: tuple[str, str], **more: Any) -> tuple[Any, Any]:
    model = patchy()
    made = kind(in_groups(list(model.named_parameters()), {"lr": 0.02}))
    return open_engine(model, make_config(pair, folder, optimizer={}, **more), optimizer=made), model


@in_pairs(pair=TIERS, bf16=(False, True), clipping=(0.0, 0.05), threshold=(0, 1000, 100_000), sub_group=(4096, 1 << 30))
def test_it_equals_torchs_adafactor_bit_for_bit(
    open_engine: Open,
    nvme_path: Path,
    pair: tuple[str, str],
    bf16: bool,
    clipping: float,
    threshold: int,
    sub_group: int,
) -> None:
    zero = {"sub_group_size": sub_group, "stage3_param_persistence_threshold": threshold}
    engine, model = opened(open_engine, nvme_path, pair, bf16=bf16, clipping=clipping, zero=zero)
    plain = plain_adafactor(bf16=bf16, clipping=clipping)
    train(engine, 0, STEPS, bf16=bf16)
    train(plain, 0, STEPS, bf16=bf16)
    assert differences(held_by(engine, model), plain.held()) == []


@pytest.mark.parametrize("pair", [("none", "none"), NVME])
@pytest.mark.parametrize("kind", [RowMeans, adafactor])
def test_an_object_gives_the_bits_that_it_gives_alone(
    open_engine: Open, nvme_path: Path, kind: Any, pair: tuple[str, str]
) -> None:
    engine, model = handed_over(open_engine, nvme_path, kind, pair, bf16=False)
    plain = Plain(kind, {"lr": 0.02}, bf16=False, clipping=0.0)
    train(engine, 0, STEPS, bf16=False)
    train(plain, 0, STEPS, bf16=False)
    assert differences(held_by(engine, model), plain.held()) == []


FORMS: dict[str, dict[str, Any]] = {
    "its own rate": {},
    "a given rate": {"scale_parameter": False, "relative_step": False, "lr": 1e-3},
    "a momentum": {"scale_parameter": False, "relative_step": False, "lr": 1e-3, "beta1": 0.9},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_adafactor_of_transformers_gives_the_bits_that_it_gives_alone(
    open_engine: Open, nvme_path: Path, tmp_path: Path, form: str
) -> None:
    """It keeps the norm of the weights, too, a number at first and then a tensor; "its own rate" comes from that."""
    kind = pytest.importorskip("transformers.optimization").Adafactor

    def started() -> tuple[Any, nn.Module]:
        model = patchy()
        made = kind(in_groups(list(model.named_parameters()), {}), **FORMS[form])
        return open_engine(model, make_config(NVME, nvme_path, optimizer={}, bf16=False), optimizer=made), model

    engine, _ = started()
    train(engine, 0, 4, bf16=False)
    engine.save_checkpoint(tmp_path)
    resumed, model = started()
    resumed.load_checkpoint(tmp_path)
    train(resumed, 4, STEPS, bf16=False)
    plain = Plain(lambda groups: kind(groups, **FORMS[form]), {}, bf16=False, clipping=0.0)
    train(plain, 0, STEPS, bf16=False)
    wanted = {key: float(v) if key.endswith("RMS") else v for key, v in plain.held().items()}
    found = {key: float(v) if key.endswith("RMS") else v for key, v in held_by(resumed, model).items()}
    assert differences(found, wanted) == []


class Shapes(nn.Module):
    """Parameters of none to four dimensions, and of one element in three ways."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((), (1,), (1, 1), (7,), (7, 1), (1, 7), (5, 3), (2, 5, 3), (6, 2, 3, 3))
        self.each = nn.ParameterList(nn.Parameter(torch.linspace(-1, 2, torch.Size(s).numel()).view(s)) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(p * x).sin().sum() for p in self.each]).sum()


@pytest.mark.parametrize("pair", [("cpu", "cpu"), NVME])
def test_parameters_of_any_number_of_dimensions_have_what_the_class_keeps_of_them(
    open_engine: Open, nvme_path: Path, pair: tuple[str, str]
) -> None:
    plain, model = Shapes(), Shapes()
    optimizer = adafactor(list(plain.each))  # type: ignore[arg-type]
    engine = open_engine(model, make_config(pair, nvme_path, optimizer=BLOCK, bf16=False))
    for step in range(STEPS):
        x = torch.tensor(0.3 + step)
        plain(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(x))
        engine.step()
    for number, parameter in enumerate(plain.each):
        name, state = f"each.{number}", optimizer.state[parameter]
        found = engine.full_state(name)
        assert found.keys() == state.keys() and torch.equal(engine.full_parameter(name), parameter)
        assert all(torch.equal(found[key], state[key]) for key in state if key != "step"), name


def test_the_plan_has_exactly_their_bytes(open_engine: Open, nvme_path: Path) -> None:
    engine, model = opened(open_engine, nvme_path, NVME)
    rows = {(row.tier, row.array): row.nbytes for row in engine.plan.rows}
    of = sum(sum(p.shape) if p.dim() == 2 else p.numel() for p in model.parameters())
    assert rows["device", "small optimizer states"] == 4 * of
    train(engine, 0, 4, bf16=True)
    states = [engine.full_state(name) for name, p in model.named_parameters() if "idle" not in name]
    numel = sum(value.numel() for state in states for value in state.values() if isinstance(value, Tensor))
    assert numel == of - 5 - 7 - 5, "all but those of the idle layer, which no step has updated"
    with pytest.raises(BudgetError, match="memory_budget"):
        opened(open_engine, nvme_path, NVME, memory_budget={"device": 4 * of})


# ---- checkpoints and states ------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_elsewhere_and_torchs_form_of_the_states_too(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    engine, model = opened(open_engine, nvme_path, NVME)
    train(engine, 0, 5, bf16=True)
    engine.save_checkpoint(tmp_path)
    states = engine.optimizer.state_dict()
    train(engine, 5, 9, bf16=True)
    resumed, other = opened(open_engine, nvme_path, ("cpu", "cpu"), zero={"stage3_param_persistence_threshold": 0})
    train(resumed, 0, 2, bf16=True)
    resumed.load_checkpoint(tmp_path)
    train(resumed, 5, 9, bf16=True)
    assert differences(held_by(resumed, other), held_by(engine, model)) == []
    again, third = opened(open_engine, nvme_path, ("none", "none"))
    again.load_checkpoint(tmp_path, load_optimizer_states=False)
    again.optimizer.load_state_dict(states)
    train(again, 5, 9, bf16=True)
    assert differences(held_by(again, third), held_by(engine, model)) == []


def test_states_go_to_torchs_optimizer_and_come_from_it(open_engine: Open, nvme_path: Path) -> None:
    engine, model = handed_over(open_engine, nvme_path, adafactor, ("cpu", "nvme"), bf16=False)
    plain = Plain(adafactor, {"lr": 0.02}, bf16=False, clipping=0.0)
    train(engine, 0, 4, bf16=False)
    train(plain, 0, 4, bf16=False)
    saved = engine.optimizer.state_dict()
    plain.optimizer.load_state_dict(saved)
    train(plain, 4, 6, bf16=False)
    train(engine, 4, 5, bf16=False)  # is taken back
    engine.optimizer.load_state_dict({**plain.optimizer.state_dict(), "state": saved["state"]})
    for name, parameter in plain.model.named_parameters():
        utils.safe_set_full_fp32_param(model.get_parameter(name), parameter.detach())
    engine.optimizer.load_state_dict(plain.optimizer.state_dict())
    train(engine, 6, 9, bf16=False)
    train(plain, 6, 9, bf16=False)
    assert differences(held_by(engine, model), plain.held()) == []


def test_states_without_what_an_update_needs_are_refused_and_change_nothing(open_engine: Open, nvme_path: Path) -> None:
    engine, model = opened(open_engine, nvme_path, ("cpu", "cpu"))
    train(engine, 0, 4, bf16=True)
    before, saved = held_by(engine, model), engine.optimizer.state_dict()
    for state in saved["state"].values():
        state.pop("col_var", None)
    with pytest.raises(
        ConfigError, match=r"col_var of a parameter of shape \(150, 21\): expected .*\(1, 21\), got none"
    ):
        engine.optimizer.load_state_dict(saved)
    assert differences(held_by(engine, model), before) == []


def test_a_checkpoint_written_beside_training_has_the_states_of_its_step(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    engine, model = opened(open_engine, nvme_path, NVME, checkpoint={"async_save": True})
    train(engine, 0, 5, bf16=True)
    engine.save_checkpoint(tmp_path)
    train(engine, 5, 9, bf16=True)
    engine.wait_for_checkpoint()
    resumed, other = opened(open_engine, nvme_path, ("cpu", "cpu"))
    resumed.load_checkpoint(tmp_path)
    train(resumed, 5, 9, bf16=True)
    assert differences(held_by(resumed, other), held_by(engine, model)) == []


@pytest.mark.parametrize("ours", [BLOCK, {"type": "AdamW"}], ids=["into Adafactor", "out of it"])
def test_a_checkpoint_of_another_optimizer_is_refused(
    open_engine: Open, nvme_path: Path, tmp_path: Path, ours: dict[str, Any]
) -> None:
    theirs = {"type": "AdamW"} if ours is BLOCK else BLOCK
    engine = open_engine(patchy(), make_config(("cpu", "cpu"), nvme_path, optimizer=theirs))
    train(engine, 0, 2, bf16=True)
    engine.save_checkpoint(tmp_path)
    other = open_engine(patchy(), make_config(("cpu", "cpu"), nvme_path, optimizer=ours))
    with pytest.raises(ConfigError, match=r"load_checkpoint: .*load_optimizer_states=False"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert torch.equal(other.full_parameter("gain"), engine.full_parameter("gain"))


def test_a_snapshot_goes_on_bit_for_bit(open_engine: Open, nvme_path: Path) -> None:
    plain = plain_adafactor()
    train(plain, 0, 9, bf16=True)
    keys = {"zero": {"offload_optimizer": {"snapshot": {"every": 3}}}}
    engine, _ = opened(open_engine, nvme_path, NVME, **keys)
    train(engine, 0, 7, bf16=True)
    engine.close()
    resumed, model = opened(open_engine, nvme_path, NVME, **keys)
    assert resumed.load_snapshot() == 6
    train(resumed, 6, 9, bf16=True)
    assert differences(held_by(resumed, model), plain.held()) == []


def test_a_snapshot_of_a_class_without_them_is_refused(open_engine: Open, nvme_path: Path) -> None:
    keys = {"zero": {"offload_optimizer": {"snapshot": {"every": 1}}}}
    engine, _ = handed_over(open_engine, nvme_path, Stateless, NVME, **keys)
    train(engine, 0, 2, bf16=True)
    engine.close()
    with pytest.raises(ConfigError, match=r"has another layout \(small states: None then, 5,724 bytes now\)"):
        handed_over(open_engine, nvme_path, adafactor, NVME, **keys)


def test_whole_and_own_states_are_read_and_replaced(open_engine: Open, nvme_path: Path) -> None:
    engine, model = opened(open_engine, nvme_path, NVME)
    train(engine, 0, 3, bf16=True)
    weight = model.get_parameter("inside.weight")
    value = torch.rand(150, 1)
    utils.safe_set_full_optimizer_state(weight, value, "row_var")
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "row_var"), value)
    utils.safe_set_local_optimizer_state(weight, 2 * value.view(-1), "row_var")
    assert torch.equal(utils.safe_get_local_optimizer_state(weight, "row_var"), 2 * value.view(-1))
    assert torch.equal(engine.optimizer.state[weight]["row_var"], 2 * value)
    plain = plain_adafactor()
    train(plain, 0, 3, bf16=True)
    plain.optimizer.state[plain.masters["inside.weight"]]["row_var"].copy_(2 * value)
    train(engine, 3, 6, bf16=True)
    train(plain, 3, 6, bf16=True)
    assert differences(held_by(engine, model), plain.held()) == []


# ---- updates that fail, are taken back, or never come ----------------------------------------------------------------


@pytest.mark.parametrize("skip", [0, 2, 7])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_after_a_failed_transfer_they_are_of_the_same_step_as_the_weights(
    open_engine: Open, nvme_path: Path, operation: Any, skip: int
) -> None:
    engine, model = opened(open_engine, nvme_path, NVME, zero={"sub_group_size": 4096})
    train(engine, 0, 2, bf16=True)
    engine.inject(AioFault(fail_rate=1.0, ops=(operation,), skip=skip))
    with pytest.raises(StorageError):
        train(engine, 2, 5, bf16=True)
        engine.synchronize()
    engine.inject(None)
    once_more(engine.synchronize)
    plain = plain_adafactor()
    train(plain, 0, engine.global_steps, bf16=True)
    assert differences(held_by(engine, model), plain.held()) == []


def test_a_step_that_is_skipped_leaves_them_alone(open_engine: Open, nvme_path: Path) -> None:
    engine, model = opened(open_engine, nvme_path, ("cpu", "nvme"), bf16=False)
    plain = plain_adafactor(bf16=False)
    for trainer in (engine, plain):
        train(trainer, 0, 3, bf16=False)
    engine.backward(engine(batch(3, False), 0) * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1 or engine.optimizer.overflow
    for trainer in (engine, plain):
        train(trainer, 4, 6, bf16=False)
    assert differences(held_by(engine, model), plain.held()) == []


def test_a_model_that_changes_keeps_them(open_engine: Open, nvme_path: Path) -> None:
    engine, model = opened(open_engine, nvme_path, ("cpu", "nvme"))
    train(engine, 0, 3, bf16=True)
    before = engine.full_state("outside.weight")
    with seeded(5):
        model.inside = LoraLinear(model.inside)
    engine.replan()
    after = engine.full_state("outside.weight")
    assert before.keys() == after.keys() == {"step", "row_var", "col_var"}
    assert all(torch.equal(after[name], before[name]) for name in ("row_var", "col_var"))
    train(engine, 3, 4, bf16=True)
    joined = [name for name, p in model.named_parameters() if p.requires_grad and name.startswith("inside")]
    assert joined and all({"row_var", "variance"} & engine.full_state(name).keys() for name in joined)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            BothSides,
            r"its state left has the shape \(150, 150\).*elements for parameters of 51,812 elements they are too large",
        ),
        (LateRows, "its state rows is made after the first step"),
    ],
)
def test_what_is_not_small_or_comes_late_is_refused_by_name(
    open_engine: Open, nvme_path: Path, kind: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__} is not available: .*{why}.*Adafactor"):
        handed_over(open_engine, nvme_path, kind, ("cpu", "cpu"))


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"type": "Adafactor", "params": {"betas": [0.9, 0.99]}}, "optimizer.params.betas"),
        ({"type": "Adafactor", "params": {"eps": 1e-8}}, "params.eps: expected two numbers, the first may be null"),
        ({"type": "AdamW", "params": {"eps": [1e-30, 1e-3]}}, "params.eps: expected a number with AdamW"),
        ({"type": "Adafactor", "params": {"eps": [None, -1]}}, "params.eps: expected no number below 0"),
        ({"type": "Adafactor", "params": {"beta2_decay": 0.8}}, "params.beta2_decay"),
        ({"type": "Shampoo"}, "its states are larger than the matrix"),
    ],
)
def test_keys_that_do_not_fit_are_errors(block: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({"optimizer": block})


def test_the_keys_of_the_configuration_are_the_constructors(open_engine: Open, nvme_path: Path) -> None:
    params = {"lr": 0.03, "beta2_decay": -0.7, "eps": [None, 1e-2], "d": 1.5, "weight_decay": 0.1}
    block = {"type": "adafactor", "params": params}
    engine = open_engine(patchy(), make_config(("cpu", "cpu"), nvme_path, optimizer=block, bf16=False))
    group = engine.optimizer.param_groups[0]
    assert {key: group[key] for key in params} == {**params, "eps": (None, 1e-2)}
    plain = Plain(lambda groups: torch.optim.Adafactor(groups, **params), {}, bf16=False, clipping=0.0)  # type: ignore[arg-type]
    train(engine, 0, 3, bf16=False)
    train(plain, 0, 3, bf16=False)
    assert differences(held_by(engine, engine.module), plain.held()) == []
