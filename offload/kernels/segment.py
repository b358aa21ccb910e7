"""The inputs of one optimizer update: the formula, and the numbers for a run of elements."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Formula(IntEnum):
    """Formulas of an element's update, apart from Adam's; see `zn_cpu_update` in native/include/zn_abi.h."""

    LION = 1
    SGD = 2
    ADAGRAD = 3
    RMSPROP = 4

    @property
    def states(self) -> tuple[str, ...]:
        """The states of each element, with torch's names."""
        return _STATES[self]


_STATES = {
    Formula.LION: ("exp_avg",),
    Formula.SGD: ("momentum_buffer",),
    Formula.ADAGRAD: ("sum",),
    Formula.RMSPROP: ("square_avg", "momentum_buffer", "grad_avg"),
}


@dataclass(frozen=True)
class Segment:
    """One run of elements [begin, end) that share hyper-parameters. Their meaning for Adam:

    Attributes:
        begin: first element, relative to the tensors of the call.
        end: one past the last element.
        skip: do not change the range (a parameter without a gradient).
        step_size: lr / (1 - beta1^t), with the parameter's own step count t = 1, 2, ...
        bias2_sqrt: sqrt(1 - beta2^t).
        decay: 1 - lr * weight_decay for decoupled decay (AdamW), else 1.
        l2: weight_decay for Adam's L2 term, else 0.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the denominator.
        gain: weight of the gradient in the first average; None: 1 - beta1.
        first: SGD only: momentum begins with this update.
        nesterov: SGD only.

    In the other formulas, step_size is the learning rate, beta1 also the momentum of SGD and RMSprop, and beta2 also
    RMSprop's alpha.
    """

    begin: int
    end: int
    skip: bool = False
    step_size: float = 0.0
    bias2_sqrt: float = 1.0
    decay: float = 1.0
    l2: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    gain: float | None = None
    first: bool = False
    nesterov: bool = False

    @property
    def step_size_hat(self) -> float:
        """step_size * bias2_sqrt, so that the division by `bias2_sqrt` is done once and not for each element.

        m / (sqrt(v) / b + eps) = b * m / (sqrt(v) + b * eps); the "eps hat" of arXiv:1412.6980, section 2.
        """
        return self.step_size * self.bias2_sqrt

    @property
    def eps_hat(self) -> float:
        """Eps * bias2_sqrt: see `step_size_hat`."""
        return self.eps * self.bias2_sqrt

    @property
    def one_minus_beta1(self) -> float:
        """`gain`, or 1 - beta1 in double precision; rounded to fp32 only afterwards."""
        return 1.0 - self.beta1 if self.gain is None else self.gain

    @property
    def one_minus_beta2(self) -> float:
        """1 - beta2 in double precision; rounded to fp32 only afterwards."""
        return 1.0 - self.beta2
