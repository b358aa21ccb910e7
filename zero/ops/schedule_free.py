"""AdamW without a schedule (Defazio et al., "The Road Less Scheduled", arXiv:2405.15682).

There are three sequences, of which two are stored. `z` takes the steps, `x` is the average of `z` for final use, and
gradients are computed at `y = (1 - beta1) z + beta1 x`, a point between them. The parameters hold `y` in training and
`x` in evaluation; `z` is a state. The one of `x` and `y` that is not stored follows from the other two.

[Note: numbers of a group] The weight of a step in the average is `k^r lr_max^p`, where `k` counts steps and `lr_max` is
the largest rate so far, so that steps of a warmup count little. `k`, `lr_max` and the sum of the weights are stored in
the param group: they are equal for all its parameters, and become part of its state dict.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offload.errors import StateError
from zero.ops.plain_optimizer import PlainOptimizer


class AdamWScheduleFree(PlainOptimizer):
    """AdamW with averaging in place of a schedule; states `z` and `exp_avg_sq`.

    Call `eval()` before the parameters are used or saved, and `train()` before training continues. It begins in
    training mode: until the first step all three sequences are equal.

    Args:
        params: parameters or param groups.
        lr: learning rate, constant after the warmup; one to ten times the rate of AdamW with a schedule.
        betas: `beta1` in `y`, and the decay rate of the average of squared gradients.
        eps: added to the denominator.
        weight_decay: of `y`, times the rate.
        warmup_steps: number of steps in which the rate rises.
        r: power of the step's number in its weight in the average.
        weight_lr_power: power of the largest rate so far in this weight.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        average = {"warmup_steps": warmup_steps, "r": r, "weight_lr_power": weight_lr_power}
        numbers = {"k": 0, "lr_max": -1.0, "weight_sum": 0.0, "scheduled_lr": 0.0, "train_mode": True}
        super().__init__(params, {**options, **average, **numbers})

    def begin_group_step(self, group: dict[str, Any]) -> None:
        """Count a step of the group: its rate, and its weight in the average.

        Raises:
            StateError: the parameters hold `x`.
        """
        if not group["train_mode"]:
            raise StateError(
                "AdamWScheduleFree.step: the parameters hold their averages now; call optimizer.train() first"
            )
        warmup, before = group["warmup_steps"], group["k"]
        lr = float(group["lr"]) * ((before + 1) / warmup if before < warmup else 1.0)
        group.update(k=before + 1, scheduled_lr=lr, lr_max=max(lr, group["lr_max"]))
        group["weight_sum"] += _weight(group)

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Move `z` by a step of Adam without momentum, and move `y` with `z` and its average."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr, decay = group["scheduled_lr"], float(group["weight_decay"])
        part = _weight(group) / group["weight_sum"] if group["weight_sum"] else 0.0  # share of this step in the average
        if "z" not in state:
            state["z"] = weight.clone()
        z, square = state["z"], self.state_tensor(state, "exp_avg_sq", weight)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        change = grad.div(square.div(1 - beta2 ** group["k"]).sqrt_().add_(group["eps"]))
        if decay:
            change.add_(weight, alpha=decay)
        weight.lerp_(z, part).add_(change, alpha=lr * (beta1 * (1 - part) - 1))
        z.sub_(change, alpha=lr)

    @torch.no_grad()
    def eval(self) -> None:
        """Replace the parameters' values by their averages `x`; does nothing if they hold them already."""
        for group in self.param_groups:
            if group["train_mode"]:
                self._move_to_z(group, averaging_factor(float(group["betas"][0])))
                group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Restore `y` in the parameters, except for rounding; does nothing if they hold it already."""
        for group in self.param_groups:
            if not group["train_mode"]:
                self._move_to_z(group, 1 - float(group["betas"][0]))
                group["train_mode"] = True

    def _move_to_z(self, group: dict[str, Any], part: float) -> None:
        for parameter in group["params"]:
            if "z" in self.state.get(parameter, {}):
                parameter.lerp_(self.state[parameter]["z"].to(parameter.dtype), part)


def averaging_factor(beta1: float) -> float:
    """The factor that moves `y` towards `z` to get `x`; it is negative. `beta1` 0 has no average: `y` is `z`."""
    return 1 - 1 / beta1 if beta1 else 0.0


def _weight(group: dict[str, Any]) -> float:
    weight: float = group["k"] ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
    return weight
