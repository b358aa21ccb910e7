"""Update rules: what an optimizer keeps of each parameter, and what it does to a run of elements.

[Note: a rule is data] Its state planes have names (as in torch's state dict) and lie beside one another in the records;
plan, checkpoint and `safe_get_*` go by the names alone. What a parameter has besides planes, counts above all, is
fixed by `step()` for every parameter; the update of a sub-group is a function of that and of the elements it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.kernels import kernels
from zero.plan.record import ADAM_STATES, States


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number that a parameter's state has; immutable, so that an update can be made again."""

    value: int | float | bool | None
    """None says that a state has the name, and nothing yet."""
    dtype: torch.dtype | None = None
    """Of a tensor; None: a Python number."""
    shape: tuple[int, ...] = ()

    @staticmethod
    def of(value: Any) -> Scalar:
        """From a Python number or a tensor of one element."""
        if isinstance(value, Tensor):
            return Scalar(value.item(), value.dtype, tuple(value.shape))
        return Scalar(value)

    def make(self) -> Any:
        """As it was."""
        if self.dtype is None or self.value is None:
            return self.value
        return torch.full(self.shape, self.value, dtype=self.dtype, device="cpu")

    def tensor(self) -> Tensor:
        """For a checkpoint: the same number, of shape ()."""
        double = self.dtype is None and isinstance(self.value, float)  # torch would make it fp32
        return torch.tensor(self.value, dtype=torch.float64 if double else self.dtype, device="cpu")

    def like(self, saved: Tensor) -> Scalar:
        """The number that was saved, in the form of this one."""
        value = saved.item()
        if self.dtype is None and self.value is not None:
            value = type(self.value)(value)
        return Scalar(value, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a parameter's state is besides its planes, after so many updates."""

    scalars: tuple[tuple[str, Scalar], ...] = ()
    present: tuple[str, ...] = ()
    """Names of the planes that have been made; the others are to be made by the next update."""


class Values(Protocol):
    """What is fixed of one parameter in one step; compared by value."""


class Run(NamedTuple):
    """A run of elements of one unit, to be updated in place. All tensors are flat and of the same length and device."""

    weight: Tensor
    """fp32, bf16 or fp16."""
    master: Tensor | None
    """What the weights lack of their fp32 masters, see `offload.kernels.masters`; None: they are the masters."""
    states: States
    gradient: Tensor
    """As it was collected."""
    segments: Sequence[tuple[int, int, Any]]
    """(begin, end, values) of each parameter in it that is updated."""


class Rule(Protocol):
    """One optimizer's.

    Attributes:
        name: for users.
        states: names of its planes.
        defaults: of what param groups say.
        scalars: what parameters have besides planes and the number of updates, by name; the values are examples.
        fills: what planes are full of before the first update, where it is not 0.
    """

    name: str
    states: tuple[str, ...]
    defaults: Mapping[str, Any]
    scalars: Mapping[str, Scalar]
    fills: Mapping[str, float]

    def begin(self) -> None:
        """A step is about to be fixed: `values` is called for each of its parameters."""

    def values(self, group: Mapping[str, Any], count: int, progress: Progress | None) -> Any:
        """What is fixed of one parameter in the step that would be taken now.

        Args:
            group: its param group.
            count: updates with this one.
            progress: since its last update; None before the first.

        Raises:
            ConfigError: the group asks for what the rule cannot do.
        """

    def after(self, values: Any) -> tuple[Progress | None, Mapping[str, Any]]:
        """The parameter's progress once it is updated with `values`, and what changes in its param group."""

    def update(self, run: Run, grad_scale: float, threads: int) -> None:
        """Update the elements in place; depends on nothing but the arguments."""


@dataclass(frozen=True, slots=True)
class AdamValues:
    """Hyper-parameters of one parameter in one step; Python doubles."""

    step_size: float
    bias2_sqrt: float
    decay: float
    l2: float
    beta1: float
    beta2: float
    eps: float


class AdamRule:
    """Adam and AdamW, by our kernel.

    Args:
        decoupled: decay the weights (AdamW) and not the gradients.
        defaults: of param groups that are added later, where they are not Adam's.
    """

    name = "Adam"
    states: tuple[str, ...] = ADAM_STATES
    scalars: Mapping[str, Scalar] = {}
    fills: Mapping[str, float] = {}

    def __init__(self, *, decoupled: bool = True, defaults: Mapping[str, Any] | None = None) -> None:
        adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        self.defaults: Mapping[str, Any] = {**adam, **(defaults or {}), "decoupled": decoupled}

    def begin(self) -> None:
        """Nothing is kept between parameters."""

    def values(self, group: Mapping[str, Any], count: int, progress: Progress | None) -> AdamValues:
        """As torch: `betas`, `lr`, `weight_decay`, `eps`, and ours `decoupled`."""
        for key in ("amsgrad", "maximize"):
            if group.get(key):
                raise ConfigError(f"param_groups: {key}: set it before zero.initialize, it is {group[key]} now")
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        decoupled = bool(group.get("decoupled", group.get("decoupled_weight_decay", True)))
        corrected = group.get("bias_correction", True)
        return AdamValues(
            step_size=lr / (1 - beta1**count) if corrected else lr,
            bias2_sqrt=math.sqrt(1 - beta2**count) if corrected else 1.0,
            decay=1 - lr * decay if decoupled else 1.0,
            l2=0.0 if decoupled else decay,
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
        )

    def after(self, values: Any) -> tuple[Progress | None, Mapping[str, Any]]:
        """The number of updates is all there is."""
        return None, {}

    def update(self, run: Run, grad_scale: float, threads: int) -> None:
        """One call of the kernel."""
        if run.states.moments is None:
            raise ConfigError("Adam: its record has no moments")
        kernels.adamw(
            run.weight,
            run.master,
            run.states.moments,
            run.gradient,
            [_segment(begin, end, values) for begin, end, values in run.segments],
            grad_scale=grad_scale,
            threads=threads,
        )


def _segment(begin: int, end: int, values: AdamValues) -> kernels.Segment:
    return kernels.Segment(
        begin=begin,
        end=end,
        step_size=values.step_size,
        bias2_sqrt=values.bias2_sqrt,
        decay=values.decay,
        l2=values.l2,
        beta1=values.beta1,
        beta2=values.beta2,
        eps=values.eps,
    )


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained, and how."""

    groups: list[dict[str, Any]]
    """Param groups, as torch's; live."""
    rule: Rule
    given: torch.optim.Optimizer | None = None
    """What they were taken from, if it was an object."""
