"""A plain-torch trainer for any torch optimizer: it gives the exact bits that the engine must produce.

Every tensor is in memory, and the optimizer is a real one over fp32 masters. With bf16 weights, a weight is its master
rounded half away from zero. Nothing of the product is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from exact_roots import as_its_kernel
from probe import units_read_once
from reference import clip_coefficient, fp32, norm_of, round_half_away
from torch import Tensor, nn

WIDTH, HIDDEN = 21, 150

Group = dict[str, Any]
Make = Callable[[list[Group]], torch.optim.Optimizer]


class Patchy(nn.Module):
    """Two branches, of which a pass uses one, an unused layer, and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, HIDDEN)
        self.branches = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.idle = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.tensor([0.7]))
        self.outside = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        hidden = torch.tanh(self.inside(x))
        hidden = hidden + torch.tanh(self.branches[branch](hidden)) * self.gain
        return (self.outside(hidden) - x).float().square().mean()


def patchy(seed: int = 3) -> Patchy:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Patchy()


def batch(index: int, bf16: bool) -> Tensor:
    generator = torch.Generator().manual_seed(100 + index)
    x = 3 * torch.randn(9, WIDTH, generator=generator)
    return x.to(torch.bfloat16) if bf16 else x


def in_groups(named: Sequence[tuple[str, nn.Parameter]], second: Group) -> list[Group]:
    """Weights in one group; biases and the gain in another, with its own options."""
    wide = [parameter for name, parameter in named if name.endswith("weight")]
    rest = [parameter for name, parameter in named if not name.endswith("weight")]
    return [{"params": wide}, {"params": rest, **second}]


class Plain:
    """The trainer; it has the engine's methods.

    Args:
        make: called with param groups of fp32 masters.
        second: options of the second group.
    """

    def __init__(self, make: Make, second: Group, *, bf16: bool, clipping: float) -> None:
        self.model, self._clipping = patchy(), clipping
        self._held = dict(self.model.named_parameters())
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in self._held.items()}
        if bf16:
            for name, parameter in self._held.items():
                parameter.data = round_half_away(self.masters[name].detach())
        self.optimizer = make(in_groups(list(self.masters.items()), second))

    def __call__(self, x: Tensor, branch: int) -> Tensor:
        return self.model(x, branch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        grads = {name: p.grad for name, p in self._held.items() if p.grad is not None}
        scale = 1.0
        if self._clipping:
            scale = clip_coefficient(norm_of(grads), self._clipping)
        for name, master in self.masters.items():
            grad = grads.get(name)
            master.grad = None if grad is None else grad.float() * fp32(scale)
        with as_its_kernel(self.optimizer):
            self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self._held.items():
                master = self.masters[name].detach()
                parameter.copy_(round_half_away(master) if parameter.dtype == torch.bfloat16 else master)
                parameter.grad = None

    def held(self) -> dict[str, Any]:
        """All values, by "name/kind"."""
        found: dict[str, Any] = {}
        for name, master in self.masters.items():
            found[f"{name}/weight"], found[f"{name}/master"] = (
                self._held[name].detach().clone(),
                master.detach().clone(),
            )
            for kind, value in self.optimizer.state.get(master, {}).items():
                if value is not None:
                    found[f"{name}/{kind}"] = (
                        value.clone() if isinstance(value, Tensor) and value.dim() else float(value)
                    )
        return found


def held_by(engine: Any, model: nn.Module) -> dict[str, Any]:
    """The same for an engine, without states of parameters that were not updated yet, since torch has not made them.

    Adagrad is an exception: torch makes its states when it is constructed.
    """
    adagrad = engine.plan.states == (("sum",),)
    found: dict[str, Any] = {}
    with units_read_once(engine):
        for name, _ in model.named_parameters():
            found[f"{name}/weight"], found[f"{name}/master"] = engine.full_parameter(name), engine.full_master(name)
            state = engine.full_state(name)
            count = state.pop("step")
            for kind, value in state.items() if count or adagrad else ():
                found[f"{name}/{kind}"] = value if isinstance(value, Tensor) else float(value)
    return found


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Keys that differ in any bit, except the step count: every state has one here, but torch's SGD has none."""
    wanted = {key: value for key, value in wanted.items() if not key.endswith("/step")}
    if found.keys() != wanted.keys():
        return [f"only in one: {sorted(found.keys() ^ wanted.keys())}"]
    return [
        key
        for key, value in wanted.items()
        if not (torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value)
    ]


def train(trainer: Any, first: int, end: int, *, bf16: bool, after: Callable[[int], None] = lambda step: None) -> None:
    """Steps [first, end) of the common loop; the branch changes every other step."""
    for step in range(first, end):
        trainer.backward(trainer(batch(step, bf16), step // 2 % 2))
        trainer.step()
        after(step)
