"""Transforms of torch.func run through an engine and its module as through the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_config, seeded
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

Open = Callable[..., Any]


def data() -> Tensor:
    with seeded(1):
        return torch.randn(5, 8)


def squares(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


TRANSFORMS: dict[str, Callable[[Any], Tensor]] = {
    "grad": lambda model: grad(squares(model))(data()),
    "jacrev": lambda model: jacrev(model)(data()[0]),
    "jacfwd": lambda model: jacfwd(model)(data()[0]),
    "hessian": lambda model: hessian(squares(model))(data()[0]),
    "vmap": lambda model: vmap(model)(data()),
    "vmap of grad": lambda model: vmap(grad(squares(model)))(data()),
    "vmap of grad in chunks": lambda model: vmap(grad(squares(model)), chunk_size=2)(data()),
    "vjp": lambda model: vjp(model, data())[1](torch.ones(5, 3))[0],
    "jvp": lambda model: jvp(model, (data(),), (torch.ones(5, 8),))[1],
}


def net() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_transforms_give_what_they_give_of_the_model(open_engine: Open, nvme_path: Path, tier: str) -> None:
    engine = open_engine(net(), make_config((tier, tier), nvme_path, bf16=False))
    wrong = []
    for _ in range(2):
        for name, transform in TRANSFORMS.items():
            expected = transform(net())
            wrong += [name for model in (engine, engine.module) if not torch.equal(transform(model), expected)]
    assert wrong == []


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_a_loss_of_derivatives_trains(open_engine: Open, nvme_path: Path, tier: str) -> None:
    """Physics-informed training: the loss is made of the model's derivative, and its backward reaches the weights."""
    config = make_config((tier, tier), nvme_path, bf16=False)
    engine, plain = open_engine(net(), config), net()
    optimizer = torch.optim.AdamW(plain.parameters(), **config["optimizer"]["params"])
    for step in range(3):
        losses = []
        for model, backward in ((engine, engine.backward), (plain, Tensor.backward)):
            slopes = vmap(grad(squares(model)))(data() + step)
            loss = (slopes - 1).square().mean() + model(data()).square().mean()
            backward(loss)
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(engine.full_master(name), parameter.detach(), rtol=1e-4, atol=1e-5)


def test_training_goes_on_after_a_transform_that_failed(open_engine: Open, nvme_path: Path) -> None:
    config = make_config(("nvme", "nvme"), nvme_path)
    engine, untouched = open_engine(net(), config), open_engine(net(), config)

    def broken(x: Tensor) -> Tensor:
        engine(x.bfloat16())
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        vmap(grad(broken))(data())
    for trainer in (engine, untouched):
        trainer.backward(trainer(data().bfloat16()).float().square().mean())
        trainer.step()
    for name, _ in untouched.module.named_parameters():
        assert torch.equal(engine.full_master(name), untouched.full_master(name))
