"""`loss.backward()` gives what `engine.backward(loss)` gives, also where a step is made of several backwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import masters
from models import build, make_config, tokens
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Open = Callable[..., Any]

WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "bare": lambda engine, loss: loss.backward(),
    "scaled": lambda engine, loss: engine.scale(loss).backward(),
    "torch.autograd": lambda engine, loss: torch.autograd.backward([loss]),
    "by turns": lambda engine, loss: loss.backward() if engine.micro_steps % 2 else engine.scale(loss).backward(),
}


def trained(engine: Any, backward: Callable[[Any, torch.Tensor], Any], accumulation: int) -> dict[str, torch.Tensor]:
    for index in range(2 * accumulation):
        backward(engine, engine(tokens(index)))
        engine.step()
    return masters(engine)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tier", "bf16"), [("none", True), ("cpu", False), ("nvme", True)])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_both_ways_agree(
    open_engine: Open, nvme_path: Path, way: str, tier: str, bf16: bool, accumulation: int
) -> None:
    config = make_config((tier, tier), nvme_path, accumulation=accumulation, clipping=0.1, bf16=bf16)
    found, expected = (
        trained(open_engine(build("gpt"), config), backward, accumulation)
        for backward in (WAYS[way], lambda engine, loss: engine.backward(loss))
    )
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_loss_made_of_several_outputs_is_divided_once(open_engine: Open, nvme_path: Path) -> None:
    """Of outputs that depend on each other, as a model's loss and logits do."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.layer(x)
            return F.mse_loss(logits, x), logits

    config = make_config(("cpu", "cpu"), nvme_path, accumulation=2, bf16=False)
    told = []
    for by_engine in (True, False):
        torch.manual_seed(0)
        engine = open_engine(Both(), config)
        for index in range(4):
            loss, logits = engine(torch.full((4, 8), 0.1 * index))
            total = loss + logits.square().mean()
            engine.backward(total) if by_engine else total.backward()
            engine.step()
        told.append(engine.full_master("layer.weight"))
    assert torch.equal(*told)


class Checkpointed(torch.nn.Module):
    """Nothing with parameters comes behind what is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()


def test_a_scaled_loss_is_divided_once_where_layers_are_recomputed(open_engine: Open, nvme_path: Path) -> None:
    config = make_config(("cpu", "cpu"), nvme_path, accumulation=2, bf16=False)
    told = []
    for way in ("scaled", "engine"):
        torch.manual_seed(0)
        engine = open_engine(Checkpointed(), config)
        for index in range(4):
            loss = engine(torch.full((4, 8), 0.1 * (index + 1), requires_grad=True))
            engine.backward(loss) if way == "engine" else engine.scale(loss).backward()
            engine.step()
        told.append(masters(engine))
    assert [name for name in told[0] if not torch.equal(told[0][name], told[1][name])] == []


def test_a_backward_that_raised_divides_nothing_of_the_next(open_engine: Open, nvme_path: Path) -> None:
    config = make_config(("cpu", "cpu"), nvme_path, accumulation=2)
    engine, untouched = (open_engine(build("gpt"), config) for _ in range(2))

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")

    loss = engine(tokens(9))
    first = next(iter(engine.module.parameters()))
    handle = first.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    handle.remove()
    engine.zero_grad()
    for trainer in (engine, untouched):
        loss = trainer(tokens(0))
        trainer.backward(loss)
        trainer.step()
        trainer.backward(trainer(tokens(1)))
        trainer.step()
    found, expected = masters(engine), masters(untouched)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
