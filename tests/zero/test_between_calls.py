"""What users do to gradients and weights between calls counts as it does in plain torch."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiled
import torch
from models import build, make_config, tokens
from torch import nn

import zero
from offload.errors import StateError
from zero.utils import safe_get_full_grad, safe_set_full_grad, safe_update_full_grad_vectorized

Open = Callable[..., Any]
WHERE = [(1, ("none", "none")), (3, ("cpu", "cpu")), (3, ("nvme", "nvme"))]


@pytest.fixture(params=WHERE, ids=lambda given: f"stage {given[0]}, {'-'.join(given[1])}")
def engine(request: pytest.FixtureRequest, open_engine: Open, nvme_path: Path) -> Any:
    stage, pair = request.param
    return open_engine(build("gpt"), make_config(pair, nvme_path, bf16=False, zero={"stage": stage}))


def near(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    assert found is not None and expected is not None
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_what_is_written_to_grad_replaces_what_was_collected_and_the_next_backward_adds_to_it(engine: Any) -> None:
    plain, p = build("gpt"), engine.module.head.weight
    for trained, backward in ((plain, lambda loss: loss.backward()), (engine, engine.backward)):
        model: nn.Module = trained if trained is plain else engine.module
        backward(trained(tokens(0)))
        model.head.weight.grad = torch.full(p.shape, 0.25)
        backward(trained(tokens(1)))
    assert near(safe_get_full_grad(p), plain.head.weight.grad)


def test_a_bare_backward_is_added_to_what_is_written_to_grad(engine: Any) -> None:
    plain, p = build("gpt"), engine.module.head.weight
    for model in (plain, engine.module):
        forward: Any = plain if model is plain else engine
        forward(tokens(0)).backward()
        model.head.weight.grad = torch.full(p.shape, 0.25)
        forward(tokens(1)).backward()
    assert near(safe_get_full_grad(p), plain.head.weight.grad)


def test_what_is_written_to_grad_is_what_is_read_and_the_last_write_wins(engine: Any) -> None:
    p = engine.module.head.weight
    engine.backward(engine(tokens(0)))
    p.grad = torch.full(p.shape, 5.0)
    safe_update_full_grad_vectorized([p], lambda gradient, parameter: gradient * 2)
    assert near(safe_get_full_grad(p), torch.full(p.shape, 10.0))
    p.grad = torch.full(p.shape, 5.0)
    safe_set_full_grad(p, torch.ones(p.shape))
    assert near(safe_get_full_grad(p), torch.ones(p.shape))
    with pytest.raises(StateError, match=r"shape \(64, 32\), got \(32, 64\)"):
        safe_set_full_grad(p, torch.ones(32, 64))


def test_a_penalty_on_gathered_weights_has_its_gradient(engine: Any) -> None:
    plain, up = build("gpt"), "blocks.0.up.weight"
    for index in range(2):
        plain.zero_grad()
        head, weight = plain.head.weight, plain.get_parameter(up)
        (plain(tokens(index)) + 0.1 * head.pow(2).sum() + (weight * weight).norm()).backward()
        mine = [engine.module.head.weight, engine.module.get_parameter(up)]
        with zero.GatheredParameters(mine):
            penalty = 0.1 * mine[0].pow(2).sum() + (mine[1] * mine[1]).norm()
        engine.backward(engine(tokens(index)) + penalty)
        assert near(safe_get_full_grad(mine[0]), head.grad) and near(safe_get_full_grad(mine[1]), weight.grad)
        engine.zero_grad()


@pytest.mark.parametrize("first", ["penalty", "forward"])
def test_a_penalty_on_a_weight_in_tiles_has_its_gradient(open_engine: Open, nvme_path: Path, first: str) -> None:
    model = tiled.wide()
    plain, x = copy.deepcopy(model), tiled.inputs(model, 0)
    engine = open_engine(model, tiled.config_for(("nvme", "nvme"), nvme_path, bf16=False))
    (plain(x) + 0.1 * plain.head.weight.pow(2).sum()).backward()
    loss = engine(x) if first == "forward" else 0.0
    with zero.GatheredParameters([model.head.weight]):
        penalty = 0.1 * model.head.weight.pow(2).sum()
    engine.backward((loss if first == "forward" else engine(x)) + penalty)
    assert near(safe_get_full_grad(model.head.weight), plain.head.weight.grad)


def test_weights_are_gathered_where_hooks_on_saved_tensors_are_forbidden(engine: Any) -> None:
    gathered = zero.GatheredParameters([engine.module.head.weight])
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), gathered:
        assert engine.module.head.weight.sum().isfinite()
    gathered.__exit__(None, None, None)  # once more is nothing
    engine.backward(engine(tokens(0)))
    engine.step()
    assert engine.global_steps == 1


def test_autograd_lets_go_and_notices_edits_where_weights_are_gathered(engine: Any) -> None:
    with zero.GatheredParameters([engine.module.head.weight]):
        kept = torch.tanh(engine.module.head.weight.sum())
        let_go = weakref.ref(kept)
        del kept
        assert let_go() is None
        edited = torch.ones(3, requires_grad=True) * 1
        loss = (edited * edited).sum()
        edited.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_a_model_is_copied_right_behind_a_step(open_engine: Open, nvme_path: Path, stage: int) -> None:
    engine = open_engine(build("gpt"), make_config(("none", "none"), nvme_path, zero={"stage": stage}))
    engine.backward(engine(tokens(0)))
    engine.step()
    copied = copy.deepcopy(engine.module)
    assert all(torch.equal(value, engine.full_parameter(name)) for name, value in copied.named_parameters())


def test_a_group_that_joins_later_keeps_its_own_rate(open_engine: Open, nvme_path: Path) -> None:
    model: Any = build("gpt")
    model.head.weight.requires_grad_(False)
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
    engine = open_engine(model, make_config(("cpu", "cpu"), nvme_path, scheduler=schedule))
    for index in range(3):
        engine.backward(engine(tokens(index)))
        engine.step()
        if index == 0:
            model.head.weight.requires_grad_(True)
            engine.optimizer.add_param_group({"params": [model.head.weight], "lr": 1e-3})
    assert engine.optimizer.param_groups[1]["lr"] == 1e-3


def test_after_a_load_each_step_is_reported_once_with_its_whole_loss(
    open_engine: Open, nvme_path: Path, tmp_path: Path
) -> None:
    def started(name: str) -> Any:
        monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": name}
        config = make_config(("cpu", "cpu"), nvme_path, accumulation=2)
        return open_engine(build("gpt"), {**config, "csv_monitor": monitor})

    def train(engine: Any, *indices: int) -> None:
        for index in indices:
            engine.backward(engine(tokens(index)))
            engine.step()

    def rows(name: str) -> list[str]:
        (file,) = (tmp_path / name).rglob("*train_loss*")
        return file.read_text().splitlines()[1:]

    engine = started("straight")
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "saves")
    train(engine, 2, 3, 4, 5)
    engine.close()
    again = started("resumed")
    again.load_checkpoint(tmp_path / "saves")
    train(again, 2, 3, 4, 5)
    again.close()
    assert rows("resumed") == rows("straight")[1:]


class Raising(torch.autograd.Function):
    """A layer whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: type[Exception]) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise ctx.error("on purpose")


def broken_off(engine: Any, error: type[Exception], *, bare: bool) -> None:
    """A backward that has passed the head and the last block."""
    handle = engine.module.blocks[0].register_forward_hook(lambda module, given, out: Raising.apply(out, error))
    loss = engine(tokens(0))
    handle.remove()
    with pytest.raises(error, match="on purpose"):
        loss.backward() if bare else engine.backward(loss)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
@pytest.mark.parametrize("bare", [True, False], ids=["loss.backward", "engine.backward"])
def test_a_backward_that_is_broken_off_is_not_stepped_on(engine: Any, bare: bool, error: type[Exception]) -> None:
    broken_off(engine, error, bare=bare)
    with pytest.raises(StateError, match="some gradients are missing"):
        engine.step()
    engine.zero_grad()
    engine.backward(engine(tokens(0)))
    engine.step()
    assert engine.global_steps == 1


def test_a_backward_behind_one_that_is_broken_off_does_not_hide_it(engine: Any) -> None:
    other = engine(tokens(1))
    broken_off(engine, ValueError, bare=True)
    engine.backward(other)
    with pytest.raises(StateError, match="some gradients are missing"):
        engine.step()


def test_a_backward_that_gave_nothing_before_it_raised_leaves_the_gradients_of_others(engine: Any) -> None:
    loss = engine(tokens(0))
    engine.backward(engine(tokens(1)))
    with pytest.raises(ValueError, match="on purpose"):
        engine.backward(Raising.apply(loss, ValueError))
    engine.step()
    assert engine.global_steps == 1
