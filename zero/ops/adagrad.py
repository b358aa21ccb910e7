"""Adagrad under DeepSpeed's name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from zero.ops.plain_optimizer import PlainOptimizer, refuse


class DeepSpeedCPUAdagrad(PlainOptimizer):
    """DeepSpeed's CPU Adagrad; equals torch.optim.Adagrad bit for bit. Its state is `sum`, as in torch.

    A sparse gradient updates the rows that it has, without `weight_decay`.

    Args:
        model_params: parameters or param groups.
        lr: learning rate.
        eps: added to the denominator.
        weight_decay: added to the gradients.
        amsgrad: not available: must be False.
        fp32_optimizer_states: states are fp32; False is not available.
        adamw_mode: of Adam; no effect. accelerate passes it to each optimizer that it replaces by DeepSpeed's.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool = False,
    ) -> None:
        refuse("DeepSpeedCPUAdagrad", amsgrad=amsgrad)
        if not fp32_optimizer_states:
            refuse("DeepSpeedCPUAdagrad", fp32_optimizer_states="false")
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def takes_sparse(self, group: dict[str, Any]) -> bool:
        """Rows without a gradient stay, so they cannot decay."""
        return not group["weight_decay"]

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """By torch's own function, whose count only its `lr_decay` would use."""
        total, count = self.state_tensor(state, "sum", weight), torch.zeros((), device="cpu", dtype=torch.float32)
        options: dict[str, Any] = {name: float(group[name]) for name in ("lr", "weight_decay", "eps")}
        options.update(lr_decay=0.0, maximize=False, fused=False, foreach=False, has_sparse_grad=grad.is_sparse)
        adagrad([weight], [grad], [total], [count], **options)
