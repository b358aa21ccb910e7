"""Parameters that are read past `module.name` train as they do where every weight is always there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import masters
from models import make_config, seeded
from torch import nn

from offload.errors import StateError

Open = Callable[..., Any]
WIDTH, LAYERS = 64, 6
UNIT_NUMEL = 2 * 4096
"""Of a layer, padded."""


def squares(parameters: Any) -> torch.Tensor:
    return sum((p.float().square().sum() for p in parameters), torch.zeros(()))


def views(model: Stack) -> torch.Tensor:
    first, last = model.layers[0].weight, model.kept[-2]
    return (first.t() @ last.view(WIDTH, WIDTH)).float().square().mean()


def in_place(model: Stack) -> torch.Tensor:
    total = torch.zeros(WIDTH, dtype=model.kept[1].dtype)
    for bias in model.kept[1::2]:
        total += bias
        total.mul_(bias)
    return total.float().square().sum()


READS: dict[str, Callable[[Stack], torch.Tensor]] = {
    "self.parameters()": lambda model: squares(model.parameters()),
    "a list": lambda model: squares(model.kept),
    "a closure, twice": lambda model: squares(model.kept[:2]) * squares(model.kept[1:3]),
    "norms by torch": lambda model: torch.stack([torch.linalg.vector_norm(p) for p in model.kept]).float().sum(),
    "stacked": lambda model: torch.stack(model.kept[1::2]).float().square().sum(),
    "views": views,
    "in place": in_place,
    "by module": lambda model: squares(layer.weight for layer in model.layers[:2]),
}


ONE_BY_ONE = ("self.parameters()", "a list", "a closure, twice", "norms by torch")
"""What needs one unit at a time, however many it reads."""


class Stack(nn.Module):
    def __init__(self, read: Callable[[Stack], torch.Tensor], where: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._keeps = [list(self.parameters())]
        self.read, self.where = read, where

    @property
    def kept(self) -> list[nn.Parameter]:
        return self._keeps[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = self.read(self) if self.where == "before" else None
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean() + 0.1 * (self.read(self) if penalty is None else penalty)


def trained(open_engine: Open, config: dict[str, Any], model: Stack) -> dict[str, torch.Tensor]:
    engine = open_engine(model, config)
    for index in range(4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
        engine.backward(engine(x.bfloat16()))
        engine.step()
    assert engine.skipped_steps == 0
    return masters(engine)


@pytest.mark.parametrize("reuse", [0, 3 * UNIT_NUMEL, 10**9])
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("read", READS)
def test_reads_train_as_where_every_weight_is_always_there(
    open_engine: Open, nvme_path: Path, read: str, where: str, tier: str, reuse: int
) -> None:
    if (list(READS).index(read) + len(where) + len(tier) + len(str(reuse))) % 3:
        pytest.skip("every combination of two is there")
    models = []
    for _ in range(2):
        with seeded(1):
            models.append(Stack(READS[read], where))
    live = UNIT_NUMEL * (2 if read in ONE_BY_ONE else LAYERS + 2)
    zero = {"stage3_max_reuse_distance": reuse, "stage3_max_live_parameters": live}
    config = make_config((tier, tier), nvme_path, accumulation=2, zero=zero)
    found = trained(open_engine, config, models[0])
    always = make_config(("none", "none"), nvme_path, accumulation=2, zero={"stage": 0})
    expected = trained(open_engine, always, models[1])
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_outside_a_forward_a_value_that_is_there_lasts_for_its_backward_and_others_say_what_to_do(
    open_engine: Open, nvme_path: Path, tier: str
) -> None:
    with seeded(1):
        model = Stack(READS["a list"], "after")
    engine = open_engine(model, make_config((tier, tier), nvme_path, zero={"stage3_max_reuse_distance": 10**9}))
    x = torch.randn(4, WIDTH).bfloat16()
    loss, read = engine(x), 0
    for parameter in model.kept:
        try:
            loss = loss + parameter.float().square().sum()
            read += 1
        except StateError as error:
            assert "GatheredParameters" in str(error)
    engine.backward(loss)
    engine.step()
    assert engine.skipped_steps == 0
    assert read > 0


class ReadsTwo(torch.autograd.Function):
    """Reads two weights at once, in forward and in backward; gradients of these reads are none of its business."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: nn.Linear, second: nn.Linear) -> torch.Tensor:
        ctx.layers = first, second
        return x @ (first.weight.detach() @ second.weight.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        first, second = ctx.layers
        return gradients[0] @ torch.matmul(first.weight, second.weight).t(), None, None


class ReadsInBackward(Stack):
    def __init__(self, position: int) -> None:
        super().__init__(READS["a list"], "after")
        self.position = position

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if position == self.position:
                x = ReadsTwo.apply(x, self.layers[-1], self.layers[-2])
        return x.float().square().mean()


@pytest.mark.parametrize("units", range(3, 7))
@pytest.mark.parametrize("position", range(LAYERS - 2))
def test_a_backward_may_read_weights_whose_gradients_have_passed(
    open_engine: Open, nvme_path: Path, position: int, units: int
) -> None:
    """As a fused operation may. What it reads first is not evicted for what is fetched ahead at its second read."""
    models = []
    for _ in range(2):
        with seeded(1):
            models.append(ReadsInBackward(position))
    tight = {"stage3_max_live_parameters": units * UNIT_NUMEL, "stage3_prefetch_bucket_size": UNIT_NUMEL}
    found = trained(open_engine, make_config(("cpu", "cpu"), nvme_path, zero=tight), models[0])
    expected = trained(open_engine, make_config(("none", "none"), nvme_path, zero={"stage": 0}), models[1])
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
