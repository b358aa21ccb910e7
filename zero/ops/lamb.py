"""LAMB (arXiv:1904.00962), also under DeepSpeed's name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offload.kernels import kernels
from offload.kernels.square_sums import SquareSum
from zero.ops.plain_optimizer import PlainOptimizer, refuse


class Lamb(PlainOptimizer):
    """Steps of Adam, each scaled by the norm of its parameter; states `exp_avg` and `exp_avg_sq`.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        bias_correction: correct the moments for their start at 0.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: of the weights; it is part of the step that is scaled.
        max_coeff: upper bound of the scale, (norm of the parameter) / (norm of its step).
        min_coeff: lower bound of the scale.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(
            params, {**options, "weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
        )

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Algorithm 2 of the paper, with bounds for the ratio of norms."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        mean, square = self.state_tensor(state, "exp_avg", weight), self.state_tensor(state, "exp_avg_sq", weight)
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        corrected = group["bias_correction"]
        bias1, bias2 = ((1 - beta ** state["step"]) if corrected else 1.0 for beta in (beta1, beta2))
        change, share = self._change(mean, square, (bias1, bias2), float(group["eps"]))
        change.add_(weight, alpha=float(group["weight_decay"]))
        weight_norm, change_norm = _norm(weight), _norm(change)
        ratio = 1.0
        if weight_norm and change_norm:
            ratio = min(max(weight_norm / change_norm, group["min_coeff"]), group["max_coeff"])
        weight.add_(change, alpha=-float(group["lr"]) * share * ratio)

    def _change(self, mean: Tensor, square: Tensor, bias: tuple[float, float], eps: float) -> tuple[Tensor, float]:
        """(the step before decay, a factor for the whole step)."""
        return mean.div(bias[0]).div_(square.div(bias[1]).sqrt_().add_(eps)), 1.0


def _norm(values: Tensor) -> float:
    """The norm, with the same bits on every device and number of threads; torch's sums depend on both."""
    return SquareSum.from_rows(kernels.block_sumsq(values.reshape(-1))).norm()


class FusedLamb(Lamb):
    """DeepSpeed's LAMB; the same results on every device.

    The bias correction is a factor of the whole step, including decay, and not part of its norm. With the default betas
    steps begin at a third of the paper's length, shrink, and reach the full length when the second moment has settled.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        eps_inside_sqrt, amsgrad: not available: must be False.
        max_grad_norm: not available: must be 0; `gradient_clipping` of the configuration does it.
        options: arguments of `Lamb`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        eps_inside_sqrt: bool = False,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        refuse("FusedLamb", eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        super().__init__(params, lr, **options)

    def _change(self, mean: Tensor, square: Tensor, bias: tuple[float, float], eps: float) -> tuple[Tensor, float]:
        return mean.div(square.sqrt().add_(eps)), bias[1] ** 0.5 / bias[0]
