"""Lion (arXiv:2302.06675), also under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zero.ops.plain_optimizer import PlainOptimizer, refuse


class Lion(PlainOptimizer):
    """Steps of constant size, in the direction of the sign of a moving average; one state, `exp_avg`.

    Args:
        params: parameters or param groups.
        lr: learning rate; a third to a tenth of AdamW's.
        betas: decay rates of the direction, and of the moving average.
        weight_decay: of the weights, times `lr`; three to ten times AdamW's.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Do w = w (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g); m = beta2 m + (1 - beta2) g."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        average = self.state_tensor(state, "exp_avg", weight)
        if decay:
            weight.mul_(1 - lr * decay)
        weight.add_(average.mul(beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-lr)
        average.mul_(beta2).add_(grad, alpha=1 - beta2)


class DeepSpeedCPULion(Lion):
    """DeepSpeed's CPU Lion.

    Args:
        model_params, lr, betas, weight_decay: as in `Lion`, with other defaults.
        fp32_optimizer_states: states are fp32; False is not available.
        adamw_mode: of Adam; no effect. accelerate passes it to each optimizer that it replaces by DeepSpeed's.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool = False,
    ) -> None:
        if not fp32_optimizer_states:
            refuse("DeepSpeedCPULion", fp32_optimizer_states="false")
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(Lion):
    """DeepSpeed's GPU Lion; the same results on every device.

    Args:
        params, lr, betas, weight_decay: as in `Lion`, with other defaults.
        set_grad_none: no effect; torch's `zero_grad` sets gradients to None anyway.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
        self.set_grad_none = set_grad_none
