"""What both sides of a case have in common: which operations are legal now, and what comes after them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz.blocks import SAMPLES, TOKENS, WIDTH, made
from fuzz.cases import PLANES, Case
from fuzz.optimizers import of_parameter
from torch import Tensor

Told = dict[str, Any]
"""What an operation has shown."""


class Each(list[Any]):
    """One value a rank."""


@dataclass(frozen=True)
class Standing:
    """Of parameters: trained; trained but frozen at the moment."""

    trained: frozenset[str]
    frozen: frozenset[str] = frozenset()


@dataclass
class Side:
    """Runs the operations of a case by name.

    Attributes:
        index: micro-batches so far; those of failed and forgotten forwards too.
        micro_steps: calls of step().
        saved: what was true at the last save into this engine, if there was one.
    """

    case: Case
    index: int = 0
    micro_steps: int = 0
    saved: tuple[Standing, int, float] | None = None
    lr: float = 1e-2
    told: list[Told] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place = self.case.places[0]
        model = made(self.case.blocks, self.case.ways)
        self.standing = Standing(frozenset(name for name, p in model.named_parameters() if p.requires_grad))
        self.updated_by = {name: of_parameter(self.case.optimizer, name, p) for name, p in model.named_parameters()}

    @property
    def amid(self) -> bool:
        """Some micro-steps of a step have been taken."""
        return bool(self.micro_steps % self.case.run.accumulation)

    @property
    def steps_next(self) -> bool:
        return (self.micro_steps + 1) % self.case.run.accumulation == 0

    def run(self) -> list[Told]:
        """What each operation has shown, and everything at the end."""
        for number, op in enumerate(self.case.ops):
            try:
                self.told.append(getattr(self, op.kind)(*op.args) or {})
            except Exception as error:
                raise RuntimeError(f"operation {number}, {op.kind}{op.args}") from error
        self.told.append(self.everything())
        return self.told

    # ---- what decides is the same on both sides -------------------------------------------------------

    def resume(self, number: int) -> None:
        """Save, end, and go on with a fresh engine: in another place, if it is between two steps."""
        self.place = self.place if self.amid else self.case.places[number]
        self.saved = None
        self.restart()

    def save(self) -> None:
        self.saved = self.standing, self.micro_steps, self.lr
        self.keep()

    def load(self) -> None:
        if self.saved is not None and self.saved[0].trained == self.standing.trained:
            _, self.micro_steps, self.lr = self.saved
            self.bring_back()

    def freeze(self, name: str) -> None:
        trained, frozen = self.standing.trained, self.standing.frozen
        if name in trained - frozen:
            self.standing = Standing(trained, frozen | {name})
            self.require(name, False)

    def thaw(self, name: str | None) -> None:
        """One that was frozen; None: the first that was so from the beginning."""
        trained, frozen = self.standing.trained, self.standing.frozen
        never = sorted(set(self.names()) - trained)
        name = name or (never[0] if never else None)
        if name in frozen:
            self.standing = Standing(trained, frozen - {name})
            self.require(name, True)
        elif name in never and not (self.amid and self.case.run.ranks > 1):
            self.standing = Standing(trained | {name}, frozen)
            self.require(name, True)

    def set_full(self, name: str, plane: str, factor: float) -> Told:
        return {"before": self.replace(name, self._plane(name, plane), factor, local=False), **self.read_one(name)}

    def set_local(self, name: str, plane: str, factor: float) -> Told:
        if plane == "grad" and self.deferred:
            return {}  # nothing is reduced yet, so there is no part of this rank's
        return {"before": self.replace(name, self._plane(name, plane), factor, local=True), **self.read_one(name)}

    def _plane(self, name: str, drawn: str) -> str:
        states = self.updated_by[name].states
        return {PLANES[1]: states[0], PLANES[2]: states[-1]}.get(drawn, drawn)

    @property
    def deferred(self) -> bool:
        """Each rank adds up its own gradients until the last backward before a step."""
        return self.case.run.ranks > 1 and self.place.stage < 2 and self.case.run.accumulation > 1

    def everything(self) -> Told:
        told = {f"{name}/{key}": value for name in self.names() for key, value in self.read_one(name).items()}
        return {**told, **self.read_all()}

    def names(self) -> list[str]:
        """Of parameters, each once."""
        return [name for name, _ in made(self.case.blocks, self.case.ways).named_parameters()]

    # ---- what each side does in its own way -----------------------------------------------------------

    def restart(self) -> None:
        raise NotImplementedError

    def keep(self) -> None:
        raise NotImplementedError

    def bring_back(self) -> None:
        raise NotImplementedError

    def require(self, name: str, gradient: bool) -> None:
        raise NotImplementedError

    def replace(self, name: str, plane: str, factor: float, *, local: bool) -> Tensor | None:
        raise NotImplementedError

    def read_one(self, name: str) -> Told:
        raise NotImplementedError

    def read_all(self) -> Told:
        raise NotImplementedError


def changed(value: Tensor, plane: str, factor: float) -> Tensor:
    """What a plane is given: a gradient is one that every dtype holds, a second moment is not negative."""
    if plane == "grad":
        return (value * factor).bfloat16().float()
    return value * (abs(factor) if plane == "exp_avg_sq" else factor)


def inputs_of_a_block(index: int, bf16: bool) -> Tensor:
    x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(index))
    return x.bfloat16() if bf16 else x
