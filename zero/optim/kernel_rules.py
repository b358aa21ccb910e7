"""Tiled rules whose arithmetic is our kernels': Lion, SGD, Adagrad and RMSprop.

[Note: rows] What there is of a parameter, when it begins and what is counted stays the class's word, as for any tiled
rule. A row says how the numbers that the class would compute with are those of a kernel; then the kernel updates the
elements in one pass over memory. Where the row does not cover what a param group asks for, and where there is no native
library, the class's own step runs over tiles.

[Note: rounding] A kernel does the operations of torch's single-tensor step, each rounded once as IEEE says, and fuses
the products and sums that torch fuses. So its bits are the same on every CPU and on a GPU, and those of torch wherever
torch rounds so too: not on a CPU without fused multiply-add, and not where its square roots are MKL's (builds for x86),
which are off by one unit in the last place now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.kernels import kernels
from offload.kernels.kernels import Formula, Segment
from zero.ops.adagrad import DeepSpeedCPUAdagrad
from zero.ops.lion import DeepSpeedCPULion, FusedLion, Lion
from zero.optim.rules import TiledRule, TileValues, UpdateRun

Options = Mapping[str, Any]
NOT_COVERED = ("maximize", "differentiable")  # Options with which a class computes something else.


@dataclass(frozen=True, slots=True)
class Row:
    """One optimizer.

    Attributes:
        formula: the kernel's.
        numbers: fields of a segment, from a param group's options and the number of updates before this one.
        states: of those of the formula the ones that these options use.
    """

    formula: Formula
    numbers: Callable[[Options, float], dict[str, Any]]
    states: Callable[[Options], tuple[str, ...]]


def _lion(options: Options, before: float) -> dict[str, Any]:
    beta1, beta2 = (float(beta) for beta in options["betas"])
    decay = 1 - float(options["lr"]) * float(options["weight_decay"])
    return {"step_size": float(options["lr"]), "decay": decay, "beta1": beta1, "beta2": beta2}


def _sgd(options: Options, before: float) -> dict[str, Any]:
    return {
        "step_size": options["lr"],
        "l2": options["weight_decay"],
        "beta1": options["momentum"],
        "gain": 1 - options["dampening"],
        "nesterov": bool(options["nesterov"]),
    }


def _adagrad(options: Options, before: float) -> dict[str, Any]:
    step_size = options["lr"] / (1 + before * options.get("lr_decay", 0.0))
    return {"step_size": step_size, "l2": options["weight_decay"], "eps": options["eps"]}


def _rmsprop(options: Options, before: float) -> dict[str, Any]:
    return {
        "step_size": options["lr"],
        "l2": options["weight_decay"],
        "beta1": options["momentum"],
        "beta2": options["alpha"],
        "eps": options["eps"],
    }


def _rmsprop_states(options: Options) -> tuple[str, ...]:
    used = {"momentum_buffer": options["momentum"] > 0, "grad_avg": options["centered"]}
    return tuple(name for name in Formula.RMSPROP.states if used.get(name, True))


LION = Row(Formula.LION, _lion, lambda options: Formula.LION.states)
ADAGRAD = Row(Formula.ADAGRAD, _adagrad, lambda options: Formula.ADAGRAD.states)
# By the class itself: what a subclass does instead is not known.
ROWS: dict[type[torch.optim.Optimizer], Row] = {
    torch.optim.SGD: Row(Formula.SGD, _sgd, lambda options: Formula.SGD.states if options["momentum"] != 0 else ()),
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.RMSprop: Row(Formula.RMSPROP, _rmsprop, _rmsprop_states),
    **dict.fromkeys((Lion, DeepSpeedCPULion, FusedLion), LION),
    DeepSpeedCPUAdagrad: ADAGRAD,
}


class KernelRule(TiledRule):
    """The rule of an optimizer object whose class has a row; the arguments are those of a tiled one."""

    def __init__(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        super().__init__(optimizer, *arguments)
        self._row = ROWS[self.kind]

    def update(self, run: UpdateRun, grad_scale: float, threads: int) -> None:
        """One call of the kernel for the segments that use the same states; tiles for those that are not covered."""
        native = kernels.native_on(run.weight.device)
        by_states: dict[tuple[str, ...], list[Segment]] = {}
        tiled = []
        for begin, end, values in run.segments:
            used = self._row.states(values.options)
            if not native or any(values.options.get(key) for key in NOT_COVERED):
                tiled.append((begin, end, values))
                continue
            missing = self._missing(used, values)
            for name in missing:
                plane: Tensor = run.states.planes[self.states.index(name)]
                plane[begin:end].fill_(self.fills.get(name, 0.0))
            by_states.setdefault(used, []).append(self._segment(begin, end, values))
        planes = dict(zip(self.states, run.states.planes, strict=True))
        for used, segments in by_states.items():
            states = [planes[name] if name in used else None for name in self._row.formula.states]
            operands = run.weight, run.master, states, run.gradient, segments
            kernels.update(self._row.formula, *operands, grad_scale=grad_scale, threads=threads)
        if tiled:
            super().update(run._replace(segments=tiled), grad_scale, threads)

    def _missing(self, used: tuple[str, ...], values: TileValues) -> list[str]:
        """The planes that this update begins with."""
        known = () if values.progress is None else values.progress.present
        return [name for name in used if name not in known]

    def _segment(self, begin: int, end: int, values: TileValues) -> Segment:
        scalars = {} if values.progress is None else dict(values.progress.scalars)
        before = float(scalars["step"].value or 0) if "step" in scalars else 0.0
        first = bool(self._missing(self._row.states(values.options), values))
        return Segment(begin, end, **self._row.numbers(values.options, before), first=first)
