"""The optimizers of cases: what a configuration says of each, what it keeps, and a step of the class itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from ranks_runs import HYPER
from reference import State
from torch import Tensor, nn

from zero.ops.lamb import FusedLamb
from zero.ops.lion import Lion


@dataclass(frozen=True)
class Optimizer:
    """One of them.

    Attributes:
        weight: how often it is drawn.
        states: names of what it keeps of a parameter, in the parameter's shape.
        kind: its class, which the witness runs over fp32 masters; None: the reference's Adam is meant.
        options: of the class, but for the learning rate.
    """

    weight: int
    states: tuple[str, ...]
    kind: Callable[..., torch.optim.Optimizer] | None = None
    options: tuple[tuple[str, Any], ...] = ()


MOMENTS = ("exp_avg", "exp_avg_sq")
DECAY = ("weight_decay", 0.1)
OPTIMIZERS = {
    "AdamW": Optimizer(12, MOMENTS),
    "Muon": Optimizer(3, ("momentum_buffer",), torch.optim.Muon, (DECAY, ("momentum", 0.9))),
    "Lamb": Optimizer(1, MOMENTS, FusedLamb, (DECAY, ("betas", (0.8, 0.9)), ("eps", 1e-3))),
    "Lion": Optimizer(1, ("exp_avg",), Lion, (DECAY, ("betas", (0.8, 0.95)))),
    "SGD": Optimizer(2, ("momentum_buffer",), torch.optim.SGD, (DECAY, ("momentum", 0.9), ("dampening", 0.3))),
    "RAdam": Optimizer(1, MOMENTS, torch.optim.RAdam, (DECAY, ("betas", (0.8, 0.9)), ("eps", 1e-3))),
}


def of_parameter(name: str, parameter_name: str, parameter: Tensor) -> Optimizer:
    """What updates a parameter: the one of this name, or Adam the rest of Muon's."""
    hidden = parameter.dim() >= 2 and "embed" not in parameter_name
    return OPTIMIZERS["AdamW" if name == "Muon" and not hidden else name]


def block_of(name: str) -> dict[str, Any]:
    """A configuration's. What Muon leaves to Adam has Adam's keys beside its own."""
    adams = HYPER if name in ("AdamW", "Muon") else {"lr": HYPER["lr"]}
    params = {**adams, **dict(OPTIMIZERS[name].options)}
    return {"type": name, "params": {key: list(v) if isinstance(v, tuple) else v for key, v in params.items()}}


def fresh(optimizer: Optimizer, master: Tensor) -> Any:
    """The state of a parameter that has had no update: its planes are attributes."""
    if optimizer.kind is None:
        return State(master, torch.zeros_like(master), torch.zeros_like(master))
    return SimpleNamespace(master=master, step=0, **{key: torch.zeros_like(master) for key in optimizer.states})


def update(optimizer: Optimizer, state: Any, grad: Tensor, lr: float) -> None:
    """A step of the class over the whole parameter, or over each matrix of a stack of them."""
    matrices = optimizer.kind is torch.optim.Muon
    shape = (-1, *grad.shape[-2:]) if matrices else (1, *grad.shape)
    planes = {key: getattr(state, key).reshape(shape).clone() for key in optimizer.states}
    wholes = state.master.reshape(shape).clone()
    for index, (whole, part) in enumerate(zip(wholes, grad.reshape(shape), strict=True)):
        parameter = nn.Parameter(whole.clone())
        parameter.grad = part.clone()
        torchs = optimizer.kind([parameter], lr=lr, **dict(optimizer.options))  # type: ignore[misc]
        if state.step:
            torchs.state[parameter] = {key: plane[index].clone() for key, plane in planes.items()}
            # Of torch's a tensor, which counts the updates so far; of ours a number.
            count = state.step if optimizer.kind in (FusedLamb, Lion) else torch.tensor(float(state.step))
            torchs.state[parameter]["step"] = count
        torchs.step()
        whole.copy_(parameter.detach())
        for key, plane in planes.items():
            plane[index] = torchs.state[parameter][key]
    state.step += 1
    state.master = wholes.reshape(state.master.shape)
    for key, plane in planes.items():
        setattr(state, key, plane.reshape(state.master.shape))
