"""`safe_get_*` and `safe_set_*`: exact values, states and gradients of one parameter, on every tier and stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import masters
from models import build, make_config, tokens
from tiled import LIMIT, wide
from torch import Tensor, nn

from offload.errors import StateError
from zero import utils
from zero.optim.gradients import Gradients

Open = Callable[..., Any]

PLACES = {
    "stage 0": (("none", "none"), {"stage": 0}),
    "stage 1, nvme": (("none", "nvme"), {"stage": 1}),
    "stage 2, cpu": (("none", "cpu"), {"stage": 2}),
    "stage 3": (("none", "none"), {}),
    "stage 3, cpu": (("cpu", "cpu"), {}),
    "stage 3, nvme": (("nvme", "nvme"), {}),
    "stage 3, nvme, small sub-groups": (("nvme", "nvme"), {"sub_group_size": 4096}),
    "stage 3, cpu, persistent": (("cpu", "cpu"), {"stage3_param_persistence_threshold": 5000}),
    "stage 3, nvme, tiles": (("nvme", "nvme"), {"stage3_max_live_parameters": LIMIT}),
}
everywhere = pytest.mark.parametrize("place", PLACES)
in_both_dtypes = pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])


def fresh(place: str) -> nn.Module:
    return wide() if "tiles" in place else build("gpt")


def opened(
    open_engine: Open, place: str, nvme_path: Path, *, bf16: bool = True, model: nn.Module | None = None, **more: Any
) -> Any:
    pair, zero_keys = PLACES[place]
    return open_engine(model or fresh(place), make_config(pair, nvme_path, bf16=bf16, zero=zero_keys, **more))


def trained(engine: Any) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]


def some(engine: Any) -> list[tuple[str, nn.Parameter]]:
    """An embedding (in tiles where they are small), a weight, a bias inside a unit, and the last parameter."""
    wanted = ("embedding.weight", "blocks.1.up.weight", "blocks.1.up.bias", "head.weight")
    return [(name, p) for name, p in trained(engine) if name in wanted]


def backward(engine: Any, index: int) -> None:
    engine.backward(engine(tokens(index)))


def random_like(parameter: nn.Parameter, seed: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


@everywhere
@in_both_dtypes
def test_what_is_got_is_what_the_engine_keeps(open_engine: Open, place: str, nvme_path: Path, bf16: bool) -> None:
    engine = opened(open_engine, place, nvme_path, bf16=bf16)
    for index in range(2):
        backward(engine, index)
        engine.step()
    for name, parameter in some(engine):  # the step's updates are waited for
        state = engine.full_state(name)
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), engine.full_master(name))
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].abs().sum() > 0
            assert torch.equal(utils.safe_get_full_optimizer_state(parameter, key), state[key])
            assert torch.equal(utils.safe_get_local_optimizer_state(parameter, key), state[key].flatten())
        assert torch.equal(utils.safe_get_local_fp32_param(parameter), engine.full_master(name).flatten())


@everywhere
@in_both_dtypes
def test_what_is_set_is_got_again_and_nothing_else_changes(
    open_engine: Open, place: str, nvme_path: Path, bf16: bool
) -> None:
    engine = opened(open_engine, place, nvme_path, bf16=bf16)
    backward(engine, 0)
    engine.step()
    chosen = some(engine)
    others = {n: (engine.full_master(n), engine.full_state(n)) for n, _ in trained(engine) if n not in dict(chosen)}
    for seed, (name, parameter) in enumerate(chosen):
        value, mean, square = (random_like(parameter, 3 * seed + k) for k in range(3))
        utils.safe_set_full_fp32_param(parameter, value)
        utils.safe_set_full_optimizer_state(parameter, mean, "exp_avg")
        utils.safe_set_full_optimizer_state(parameter, square.abs(), "exp_avg_sq")
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), value)
        assert torch.equal(utils.safe_get_full_optimizer_state(parameter, "exp_avg"), mean)
        assert torch.equal(utils.safe_get_full_optimizer_state(parameter, "exp_avg_sq"), square.abs())
        weight = engine.full_parameter(name)
        assert (weight.float() - value).abs().max() <= value.abs().max() * 2**-8  # half a unit of bf16's last place
    for name, (master, state) in others.items():
        assert torch.equal(engine.full_master(name), master)
        assert torch.equal(engine.full_state(name)["exp_avg_sq"], state["exp_avg_sq"])


@everywhere
def test_the_gradient_is_autograds_until_the_step_takes_it(open_engine: Open, place: str, nvme_path: Path) -> None:
    engine = opened(open_engine, place, nvme_path, bf16=False)
    plain = fresh(place)
    parameters = some(engine)
    assert all(utils.safe_get_full_grad(p) is None for _, p in parameters)
    backward(engine, 0)
    plain(tokens(0)).backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in parameters:
        gradient = utils.safe_get_full_grad(parameter)
        torch.testing.assert_close(gradient, theirs[name].grad, rtol=1e-5, atol=1e-7)  # tiles sum in another order
        assert torch.equal(utils.safe_get_local_grad(parameter), gradient.flatten())
    engine.step()
    assert all(utils.safe_get_full_grad(p) is None for _, p in parameters)


def test_getting_gradients_looks_at_no_unit_that_has_nothing_on_its_way(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(open_engine, "stage 3, nvme", nvme_path)
    backward(engine, 0)
    utils.safe_get_full_grad(engine.module.head.weight)
    flush, looked = Gradients.flush, list[int]()

    def counted(gradients: Gradients, index: int) -> None:
        looked.append(index)
        flush(gradients, index)

    monkeypatch.setattr(Gradients, "flush", counted)
    for _, parameter in trained(engine):
        utils.safe_set_full_grad(parameter, 2 * utils.safe_get_full_grad(parameter))
    assert looked == []


@everywhere
def test_what_has_no_gradient_has_none_wherever_it_lies(open_engine: Open, place: str, nvme_path: Path) -> None:
    engine = opened(open_engine, place, nvme_path, model=build("branching"))
    engine.backward(engine(tokens(0), branch=0))
    for name, parameter in trained(engine):
        with_gradient = not name.startswith("blocks.2.")
        assert (utils.safe_get_full_grad(parameter) is not None) is with_gradient, name
        assert (utils.safe_get_local_grad(parameter) is not None) is with_gradient, name


@everywhere
def test_a_sum_of_backwards_is_got_as_a_sum(open_engine: Open, place: str, nvme_path: Path) -> None:
    engine = opened(open_engine, place, nvme_path, accumulation=2)
    backward(engine, 0)
    engine.step()
    first = {name: utils.safe_get_full_grad(p) for name, p in some(engine)}
    engine.zero_grad()
    backward(engine, 1)
    second = {name: utils.safe_get_full_grad(p) for name, p in some(engine)}
    engine.zero_grad()
    backward(engine, 0)
    backward(engine, 1)
    for name, parameter in some(engine):
        assert torch.equal(utils.safe_get_full_grad(parameter), first[name] + second[name])


@everywhere
@in_both_dtypes
def test_a_step_works_with_the_gradient_that_was_set(
    open_engine: Open, place: str, nvme_path: Path, bf16: bool
) -> None:
    """Doubling every gradient, 2**k times what it was, is exact: the step is that of the doubled loss."""
    engine = opened(open_engine, place, nvme_path, bf16=bf16)
    other = opened(open_engine, place, nvme_path, bf16=bf16)
    backward(engine, 0)
    parameters = [p for _, p in trained(engine)]
    utils.safe_update_full_grad_vectorized(parameters, lambda gradient, parameter: 2 * gradient)
    other.backward(2 * other(tokens(0)))
    for trainer in (engine, other):
        trainer.step()
    assert engine.get_global_grad_norm() == other.get_global_grad_norm()
    for name, _ in trained(engine):
        assert torch.equal(engine.full_master(name), other.full_master(name))


@everywhere
def test_a_gradient_can_be_set_where_there_was_none(open_engine: Open, place: str, nvme_path: Path) -> None:
    engine = opened(open_engine, place, nvme_path, bf16=False)
    backward(engine, 0)
    engine.step()
    parameters = some(engine)
    before = masters(engine)
    for seed, (_, parameter) in enumerate(parameters):
        value = random_like(parameter, seed)
        utils.safe_set_full_grad(parameter, value)
        assert torch.equal(utils.safe_get_full_grad(parameter), value)
    total = sum(float(utils.safe_get_full_grad(p).double().square().sum()) for _, p in parameters)
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(total**0.5, rel=1e-12)
    changed = {name for name, master in masters(engine).items() if not torch.equal(master, before[name])}
    assert changed == {name for name, _ in parameters}


def test_what_was_set_is_what_forward_uses(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, "stage 3, nvme", nvme_path, bf16=False)
    other = build("gpt", seed=5)
    for name, parameter in other.named_parameters():
        utils.safe_set_full_fp32_param(engine.module.get_parameter(name), parameter)
    with torch.no_grad():
        assert torch.equal(engine(tokens(0)), other(tokens(0)))


@pytest.mark.parametrize("model", ["mixed", "tied"])
def test_frozen_and_tied_parameters(open_engine: Open, nvme_path: Path, model: str) -> None:
    engine = opened(open_engine, "stage 3, cpu", nvme_path, model=build(model))
    backward(engine, 0)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            before = engine.full_parameter(name)
            assert utils.safe_get_full_fp32_param(parameter) is None
            assert utils.safe_get_full_grad(parameter) is None
            utils.safe_set_full_fp32_param(parameter, torch.zeros(parameter.shape))
            assert torch.equal(engine.full_parameter(name), before)
    if model == "tied":
        value = torch.ones(engine.module.head.weight.shape)
        utils.safe_set_full_fp32_param(engine.module.head.weight, value)
        assert torch.equal(utils.safe_get_full_fp32_param(engine.module.embedding.weight), value)


def test_who_is_no_engines_is_left_to_torch() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert utils.safe_get_full_fp32_param(parameter) is None
    assert utils.safe_get_full_grad(parameter) is None
    parameter.grad = torch.ones(3)
    utils.safe_set_full_grad(parameter, torch.full((3,), 2.0))
    assert utils.safe_get_full_grad(parameter).tolist() == [2.0] * 3


def test_what_cannot_be_is_refused_and_nothing_changes(open_engine: Open, nvme_path: Path) -> None:
    engine = opened(open_engine, "stage 3, cpu", nvme_path)
    backward(engine, 0)
    parameter = engine.module.head.weight
    before, gradient = engine.full_master("head.weight"), utils.safe_get_full_grad(parameter)
    with pytest.raises(StateError, match=r"head\.weight: expected a value of shape"):
        utils.safe_set_full_fp32_param(parameter, torch.zeros(3))
    with pytest.raises(StateError, match=r"head\.weight: there is no optimizer state 'momentum'"):
        utils.safe_get_full_optimizer_state(parameter, "momentum")
    with pytest.raises(StateError, match=r"head\.weight: expected .* elements"):
        utils.safe_set_full_grad(parameter, torch.zeros(3))
    assert torch.equal(engine.full_master("head.weight"), before)
    assert torch.equal(utils.safe_get_full_grad(parameter), gradient)
