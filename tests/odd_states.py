"""Optimizers whose states do not have the parameter's shape: Adafactor, and classes of a user."""

from __future__ import annotations

from typing import Any

import torch
from tiled_optimizers import Group, Plain
from torch import Tensor

OPTIONS = {"lr": 0.02, "weight_decay": 0.01}
BLOCK = {"type": "Adafactor", "params": OPTIONS}
"""The same, in a configuration."""


def adafactor(groups: list[Group]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, **OPTIONS, foreach=False)  # type: ignore[arg-type]


def plain_adafactor(*, bf16: bool = True, clipping: float = 0.0) -> Plain:
    return Plain(adafactor, {}, bf16=bf16, clipping=clipping)


class _Keeping(torch.optim.Optimizer):
    """Subtracts lr times the result of `keep`, which subclasses compute from state and gradient."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.keep(self.state[p], p.grad), alpha=group["lr"])

    def keep(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        raise NotImplementedError


class RowMeans(_Keeping):
    """A momentum of the parameter's shape, a mean of squares for each row, and a norm, as new tensors in each step."""

    def keep(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        if not state:
            state.update(calls=0, momentum=torch.zeros_like(grad), rows=grad.new_zeros(grad.shape[:1]), norm=None)
        rows = grad.view(grad.shape[0], -1)
        state["calls"] += 1
        state["momentum"].lerp_(grad, 0.1)
        state["rows"] = 0.9 * state["rows"] + 0.1 * rows.square().mean(1)
        state["norm"] = grad.norm() + (0.5 * state["norm"] if state["norm"] is not None else 0)
        scaled = state["momentum"].view(rows.shape) / (state["rows"].sqrt()[:, None] + 1e-4)
        return scaled.view(grad.shape) / (1 + state["norm"])


class RowsAlone(_Keeping):
    """State: a mean of squares for each row, but none of the parameter's shape: with fp32 weights a record is empty."""

    def keep(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        rows = grad.view(grad.shape[0], -1)
        state["rows"] = 0.9 * state.get("rows", 0.0) + 0.1 * rows.square().mean(1)
        return (rows / (state["rows"].sqrt()[:, None] + 1e-4)).view(grad.shape)


class Stateless(_Keeping):
    """Uses a norm, but has no state."""

    def keep(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return grad / (1 + grad.norm())


class BothSides(_Keeping):
    """The states that Shampoo has for a matrix."""

    def keep(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        matrix = grad.view(grad.shape[0], -1)
        if not state:
            state.update(left=torch.eye(matrix.shape[0]), right=torch.eye(matrix.shape[1]))
        state["left"] += matrix @ matrix.T
        state["right"] += matrix.T @ matrix
        return (torch.linalg.inv(state["left"]) @ matrix).view(grad.shape)


class LateRows(_Keeping):
    """A state of row means that only the third step makes."""

    def keep(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        state["calls"] = state.get("calls", 0) + 1
        if state["calls"] == 3:
            state["rows"] = grad.view(grad.shape[0], -1).mean(1)
        return grad + float(state["calls"] > 3) * grad.norm()
