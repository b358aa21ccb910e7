"""Tiled rules whose elements our kernels update: Lion, SGD, Adagrad and RMSprop.

[Note: rows] As for any tiled rule, the class decides which states a parameter has, when they begin and what is counted.
A row translates the class's numbers into a kernel's numbers; then the kernel updates the elements in one pass over
memory. If the row does not cover the options of a param group, or if there is no native library, the class's own step
runs over tiles.

[Note: rounding] A kernel does the operations of torch's single-tensor step, each rounded once as in IEEE 754, and fuses
the same products and sums as torch. So its bits are the same on every CPU and on a GPU. They equal torch's bits where
torch rounds in the same way: not on a CPU without fused multiply-add, and not where torch uses MKL's square roots
(builds for x86), which are sometimes wrong by one unit in the last place.
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
NOT_COVERED = ("maximize", "differentiable")  # With these options a class computes something else.


@dataclass(frozen=True, slots=True)
class Row:
    """How a kernel updates for one optimizer class.

    Attributes:
        formula: the kernel's.
        numbers: fields of a segment, from a param group's options and the number of updates before this one.
        states: the formula's states that these options use.
    """

    formula: Formula
    numbers: Callable[[Options, float], dict[str, Any]]
    states: Callable[[Options], tuple[str, ...]]


def _lion(options: Options, count: float) -> dict[str, Any]:
    beta1, beta2 = (float(beta) for beta in options["betas"])
    decay = 1 - float(options["lr"]) * float(options["weight_decay"])
    return {"step_size": float(options["lr"]), "decay": decay, "beta1": beta1, "beta2": beta2}


def _sgd(options: Options, count: float) -> dict[str, Any]:
    return {
        "step_size": options["lr"],
        "l2": options["weight_decay"],
        "beta1": options["momentum"],
        "gain": 1 - options["dampening"],
        "nesterov": bool(options["nesterov"]),
    }


def _adagrad(options: Options, count: float) -> dict[str, Any]:
    step_size = options["lr"] / (1 + count * options.get("lr_decay", 0.0))
    return {"step_size": step_size, "l2": options["weight_decay"], "eps": options["eps"]}


def _rmsprop(options: Options, count: float) -> dict[str, Any]:
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
# For exactly these classes: a subclass may compute something else.
ROWS: dict[type[torch.optim.Optimizer], Row] = {
    torch.optim.SGD: Row(Formula.SGD, _sgd, lambda options: Formula.SGD.states if options["momentum"] != 0 else ()),
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.RMSprop: Row(Formula.RMSPROP, _rmsprop, _rmsprop_states),
    **dict.fromkeys((Lion, DeepSpeedCPULion, FusedLion), LION),
    DeepSpeedCPUAdagrad: ADAGRAD,
}


class KernelRule(TiledRule):
    """The rule of an optimizer object whose class has a row; it takes the arguments of `TiledRule`."""

    def __init__(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        super().__init__(optimizer, *arguments)
        self._row = ROWS[self.kind]

    def update_run(self, run: UpdateRun, grad_scale: float, threads: int) -> None:
        """One kernel call for all segments that use the same states; tiles for segments that are not covered."""
        native = kernels.native_on(run.weight.device)
        by_states: dict[tuple[str, ...], list[Segment]] = {}
        tiled_segments = []
        for begin, end, values in run.segments:
            used = self._row.states(values.options)
            if not native or any(values.options.get(key) for key in NOT_COVERED):
                tiled_segments.append((begin, end, values))
                continue
            missing = self._missing(used, values)
            for name in missing:
                array: Tensor = run.states.tensors[self.states.index(name)]
                array[begin:end].fill_(self.fills.get(name, 0.0))
            by_states.setdefault(used, []).append(self._segment(begin, end, values))
        arrays = dict(zip(self.states, run.states.tensors, strict=True))
        for used, segments in by_states.items():
            states = [arrays[name] if name in used else None for name in self._row.formula.states]
            operands = run.weight, run.master, states, run.gradient, segments
            kernels.update(self._row.formula, *operands, grad_scale=grad_scale, threads=threads)
        if tiled_segments:
            super().update_run(run._replace(segments=tiled_segments), grad_scale, threads)

    def _missing(self, used: tuple[str, ...], values: TileValues) -> list[str]:
        """The array states that begin with this update."""
        present = () if values.progress is None else values.progress.present
        return [name for name in used if name not in present]

    def _segment(self, begin: int, end: int, values: TileValues) -> Segment:
        scalars = {} if values.progress is None else dict(values.progress.scalars)
        count = float(scalars["step"].value or 0) if "step" in scalars else 0.0
        first = bool(self._missing(self._row.states(values.options), values))
        return Segment(begin, end, **self._row.numbers(values.options, count), first=first)
