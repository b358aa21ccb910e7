"""A GPT whose embedding and head exceed the live limit, and the same in plain torch, with the sums of tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, WIDTH, make_config, seeded, tokens
from reference import Hyper
from torch import Tensor, nn

from zero.params.tiles import row_ranges

ROWS = 3_000
LIMIT = 52_000
"""A quarter of it is enough for a block of the tiny GPT; embedding and head have 96,000 elements."""
STEPS = 3


def wide(**sizes: Any) -> GPT:
    with seeded(0):
        return GPT(vocab=ROWS, blocks=2, **sizes)


def inputs(model: nn.Module, step: int) -> Tensor:
    if hasattr(model, "up"):
        return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step))
    return tokens(step, vocab=ROWS)


def config_for(pair: tuple[str, str], path: Any, **more: Any) -> dict[str, Any]:
    zero_keys = {"stage3_max_live_parameters": LIMIT, **more.pop("zero", {})}
    return make_config(pair, path, zero=zero_keys, **more)


def train(trainer: Any, model: nn.Module, steps: int = STEPS, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = trainer(inputs(model, step))
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.item())
    return losses


def hyper_of(engine: Any) -> Callable[[str], Hyper]:
    group = engine.optimizer.param_groups[0]
    values = Hyper(group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"], group["decoupled"])
    return lambda name: values


def in_tiles(model: GPT) -> GPT:
    """The same model in plain torch, with the same sums as with tiles."""
    rows = model.head.weight.shape[0]
    cuts = [end - begin for begin, end in row_ranges(rows, WIDTH, LIMIT // 4)]

    def forward(x: Tensor) -> Tensor:
        return torch.cat([F.linear(x, part) for part in model.head.weight.split(cuts)], -1)

    model.head.forward = forward
    return model
