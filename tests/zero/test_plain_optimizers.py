"""The optimizers under DeepSpeed's names step by themselves, as torch's do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from offload.errors import ConfigError, StateError
from zero.ops.adagrad import DeepSpeedCPUAdagrad
from zero.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero.ops.lamb import FusedLamb
from zero.ops.lion import DeepSpeedCPULion, FusedLion, Lion
from zero.ops.schedule_free import AdamWScheduleFree

STEPS = 20
ULP = 2.0**-24


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(7, 5), (33,), (1,), (0,), (64, 3)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def groups_of(held: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": held[:2]}, {"params": held[2:], "lr": 0.003, "weight_decay": 0.0}]


def train(optimizer: torch.optim.Optimizer, held: list[nn.Parameter], steps: int = STEPS) -> None:
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        for index, parameter in enumerate(held):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            # One has no gradient in some steps: it is left alone in them.
            parameter.grad = None if index == 1 and step % 3 == 0 else gradient
        optimizer.step()


def plain_lion(held: list[nn.Parameter], lr: float, betas: tuple[float, float], decay: float) -> None:
    """The published rule, in float64."""
    generator = torch.Generator().manual_seed(5)
    masters = [parameter.detach().double() for parameter in held]
    averages = [torch.zeros_like(master) for master in masters]
    for step in range(STEPS):
        for index, (master, average) in enumerate(zip(masters, averages, strict=True)):
            gradient = torch.randn(master.shape, generator=generator).double()
            if index == 1 and step % 3 == 0:
                continue
            direction = torch.sign(betas[0] * average + (1 - betas[0]) * gradient)
            master.copy_(master * (1 - lr * decay) - lr * direction)
            average.copy_(betas[1] * average + (1 - betas[1]) * gradient)
    for parameter, master in zip(held, masters, strict=True):
        parameter.data = master


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam])
def test_adam_equals_torch_up_to_rounding(kind: Any, decoupled: bool) -> None:
    ours, theirs = parameters(), parameters()
    mode = {"adamw_mode" if kind is DeepSpeedCPUAdam else "adam_w_mode": decoupled}
    train(kind(groups_of(ours), lr=0.01, weight_decay=0.1, **mode), ours)
    torch_kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    train(torch_kind(groups_of(theirs), lr=0.01, weight_decay=0.1), theirs)
    for mine, other in zip(ours, theirs, strict=True):
        # A step has about ten roundings, each of half an ulp of its operand; a step is at most about lr here.
        bound = STEPS * (2 * ULP * other.detach().abs() + 20 * 0.01 * ULP)
        assert bool(((mine - other).abs() <= bound).all())


def test_adagrad_equals_torch_bit_for_bit() -> None:
    ours, theirs = parameters(), parameters()
    mine = DeepSpeedCPUAdagrad(groups_of(ours), lr=0.02, weight_decay=0.1)
    other = torch.optim.Adagrad(groups_of(theirs), lr=0.02, weight_decay=0.1, foreach=False)
    train(mine, ours)
    train(other, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(mine.state[a]["sum"], other.state[b]["sum"])


@pytest.mark.parametrize("kind", [DeepSpeedCPULion, FusedLion, Lion])
def test_lion_follows_the_published_rule(kind: Any) -> None:
    ours, exact = parameters(), parameters()
    train(kind([{"params": ours}], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), ours)
    plain_lion(exact, 0.01, (0.9, 0.99), 0.1)
    for mine, other in zip(ours, exact, strict=True):
        assert bool(((mine - other).abs() <= STEPS * 2 * ULP * (other.detach().abs() + 0.01 * STEPS)).all())


class Averaging:
    """Schedule-free AdamW as the paper writes it, in float64, with all three sequences kept."""

    def __init__(self, start: torch.Tensor, lr: float, beta: float, decay: float, warmup: int) -> None:
        self.x = self.z = start.double()
        self.square = torch.zeros_like(self.x)
        self.lr, self.beta, self.decay, self.warmup = lr, beta, decay, warmup
        self.count, self.largest, self.weights = 0, 0.0, 0.0

    @property
    def y(self) -> torch.Tensor:
        return (1 - self.beta) * self.z + self.beta * self.x

    def step(self, gradient: torch.Tensor) -> None:
        self.count += 1
        lr = self.lr * min(1.0, self.count / self.warmup)
        self.square = 0.99 * self.square + 0.01 * gradient.double() ** 2
        direction = gradient.double() / ((self.square / (1 - 0.99**self.count)).sqrt() + 1e-8)
        self.z = self.z - lr * (direction + self.decay * self.y)
        self.largest = max(self.largest, lr)
        self.weights += self.largest**2
        part = self.largest**2 / self.weights
        self.x = (1 - part) * self.x + part * self.z


def test_schedule_free_follows_the_published_rule_and_shows_its_average() -> None:
    held = parameters()
    exact = [Averaging(parameter.detach(), 0.01, 0.9, 0.1, 4) for parameter in held]
    optimizer = AdamWScheduleFree(held, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=4)
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        for parameter, other in zip(held, exact, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            other.step(parameter.grad)
        optimizer.step()
    bound = STEPS * 8 * ULP
    assert all(bool(((p - e.y).abs() <= bound * (1 + e.y.abs())).all()) for p, e in zip(held, exact, strict=True))
    trained = [parameter.detach().clone() for parameter in held]
    optimizer.eval()
    optimizer.eval()
    assert all(bool(((p - e.x).abs() <= bound * (1 + e.x.abs())).all()) for p, e in zip(held, exact, strict=True))
    assert not torch.allclose(held[0], trained[0], atol=1e-4)
    with pytest.raises(StateError, match=r"hold their averages now; call optimizer\.train\(\)"):
        optimizer.step()
    optimizer.train()
    assert all(bool(((p - t).abs() <= 4 * ULP * (1 + t.abs())).all()) for p, t in zip(held, trained, strict=True))


def test_schedule_free_without_a_rate_stands_still_and_without_momentum_averages_nothing() -> None:
    held = parameters()
    before = [parameter.detach().clone() for parameter in held]
    optimizer = AdamWScheduleFree(held, lr=0.0, betas=(0.0, 0.999))
    train(optimizer, held, 2)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    optimizer.param_groups[0]["lr"] = 0.1
    train(optimizer, held, 2)
    trained = [parameter.detach().clone() for parameter in held]
    optimizer.eval()
    assert all(torch.equal(a, b) for a, b in zip(held, trained, strict=True))
    assert not torch.equal(trained[0], before[0])


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPUAdagrad, Lion, AdamWScheduleFree])
def test_a_16_bit_parameter_is_updated_in_fp32_and_rounded_once(kind: Any) -> None:
    narrow, wide = parameters(torch.bfloat16), [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    train(kind([{"params": narrow}], lr=0.01), narrow, steps=1)
    generator = torch.Generator().manual_seed(5)
    for index, parameter in enumerate(wide):
        gradient = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16).float()
        parameter.grad = None if index == 1 else gradient
    kind([{"params": wide}], lr=0.01).step()
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a, b.to(torch.bfloat16))


@pytest.mark.parametrize(
    "kind", [DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion, AdamWScheduleFree]
)
def test_a_state_dict_goes_on_where_it_was(kind: Any) -> None:
    held = parameters()
    optimizer = kind(groups_of(held), lr=0.01)
    train(optimizer, held, 3)
    others = [nn.Parameter(p.detach().clone()) for p in held]
    resumed = kind(groups_of(others), lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, held, 2)
    train(resumed, others, 2)
    assert all(torch.equal(a, b) for a, b in zip(held, others, strict=True))


def test_a_parameter_that_is_not_contiguous_is_updated_too() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    FusedAdam([parameter], lr=0.5).step()
    assert torch.allclose(parameter, before - 0.5)


def embedding_pair() -> tuple[nn.Embedding, nn.Embedding]:
    first, second = nn.Embedding(20, 3, sparse=True), nn.Embedding(20, 3, sparse=True)
    second.load_state_dict(first.state_dict())
    return first, second


def test_adagrad_steps_on_the_rows_of_a_sparse_gradient_as_torch_does() -> None:
    ours, theirs = embedding_pair()
    steppers = [
        DeepSpeedCPUAdagrad(ours.parameters(), lr=0.1),
        torch.optim.Adagrad(theirs.parameters(), lr=0.1, eps=1e-10),
    ]
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        rows, scale = torch.randint(12, (9,), generator=generator), torch.randn(9, 3, generator=generator)
        for model, stepper in zip((ours, theirs), steppers, strict=True):
            stepper.zero_grad()
            (model(rows) * scale).sum().backward()
            stepper.step()
        assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(steppers[0].state[ours.weight]["sum"], steppers[1].state[theirs.weight]["sum"])
    narrow = nn.Embedding(4, 3, sparse=True, dtype=torch.bfloat16)
    narrow(torch.tensor([1, 1])).sum().backward()
    before = narrow.weight.detach().clone()
    DeepSpeedCPUAdagrad(narrow.parameters(), lr=0.5).step()
    changed = (narrow.weight != before).any(1)
    assert changed.tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in (DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPULion, FusedLion, FusedLamb)),
        *((AdamWScheduleFree, {}), (DeepSpeedCPUAdagrad, {"weight_decay": 0.1})),
    ],
)
def test_a_sparse_gradient_is_refused_by_name_before_anything_changes(kind: Any, options: dict[str, Any]) -> None:
    model, dense = nn.Embedding(4, 3, sparse=True), nn.Parameter(torch.ones(2))
    optimizer = kind([dense, model.weight], lr=0.1, **options)
    model(torch.tensor([1])).sum().backward()
    dense.grad = torch.ones(2)
    before = model.weight.detach().clone()
    with pytest.raises(ConfigError, match=rf"{kind.__name__}: expected dense gradients, got a sparse one of shape \(4"):
        optimizer.step()
    assert torch.equal(model.weight, before) and dense.tolist() == [1.0, 1.0]
    assert not any("step" in state for state in optimizer.state.values())


def test_what_they_do_not_do_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="DeepSpeedCPUAdam: amsgrad"):
        DeepSpeedCPUAdam(parameters(), amsgrad=True)
    with pytest.raises(ConfigError, match="FusedAdam: amsgrad"):
        FusedAdam(parameters(), amsgrad=True)
    with pytest.raises(ConfigError, match="fp32_optimizer_states"):
        DeepSpeedCPULion(parameters(), fp32_optimizer_states=False)
