"""Adam and AdamW under DeepSpeed's names, with our kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.kernels import kernels
from zero.ops.plain_optimizer import PlainOptimizer, refuse


class AdamValues(NamedTuple):
    """Hyper-parameters of one parameter in one step; Python doubles."""

    step_size: float
    bias2_sqrt: float
    decay: float
    l2: float
    beta1: float
    beta2: float
    eps: float

    @classmethod
    def from_group(cls, group: Mapping[str, Any], count: int, *, decoupled: bool) -> AdamValues:
        """From torch's options `betas`, `lr`, `weight_decay`, `eps`, and `bias_correction`.

        `count`: number of updates, this one included; `decoupled`: decay the weights (AdamW) and not the gradients.
        """
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr, decay, corrected = float(group["lr"]), float(group["weight_decay"]), group.get("bias_correction", True)
        return cls(
            step_size=lr / (1 - beta1**count) if corrected else lr,
            bias2_sqrt=math.sqrt(1 - beta2**count) if corrected else 1.0,
            decay=1 - lr * decay if decoupled else 1.0,
            l2=0.0 if decoupled else decay,
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
        )


class KernelAdam(PlainOptimizer):
    """Adam over fp32 moments.

    Attributes:
        adam_w_mode: decay the weights (AdamW) instead of the gradients.
    """

    adam_w_mode = True

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """The same bits as the engine's update of fp32 weights."""
        values = AdamValues.from_group(group, state["step"], decoupled=self.adam_w_mode)
        segment = kernels.Segment(0, weight.numel(), **values._asdict())
        first, second = (self.state_tensor(state, name, weight).view(-1) for name in ("exp_avg", "exp_avg_sq"))
        threads = max(torch.get_num_threads(), 1)
        kernels.adamw(weight.view(-1), None, kernels.Moments(first, second), grad.view(-1), [segment], threads=threads)


class DeepSpeedCPUAdam(KernelAdam):
    """DeepSpeed's CPU Adam.

    Args:
        model_params: parameters or param groups.
        lr: learning rate.
        bias_correction: False: use both moments without correction.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: of the weights; without `adamw_mode` it is added to the gradients.
        amsgrad: not available: must be False.
        adamw_mode: decay the weights instead of the gradients.
        fp32_optimizer_states: states are fp32; False is not available.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse("DeepSpeedCPUAdam", amsgrad=amsgrad)
        if not fp32_optimizer_states:
            refuse("DeepSpeedCPUAdam", fp32_optimizer_states="false")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, {**defaults, "bias_correction": bias_correction, "amsgrad": False})
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states


class FusedAdam(KernelAdam):
    """DeepSpeed's GPU Adam; the same results on every device.

    Args:
        params, lr, bias_correction, betas, eps, weight_decay, amsgrad: as in `DeepSpeedCPUAdam`.
        adam_w_mode: same as `adamw_mode` there.
        set_grad_none: no effect; torch's `zero_grad` sets gradients to None anyway.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse("FusedAdam", amsgrad=amsgrad)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
