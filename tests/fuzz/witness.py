"""What the numbers of a case must be, bit for bit: the plain-torch reference, once for each rank, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz.blocks import Stumble, batch, made
from fuzz.cases import Case
from fuzz.optimizers import Optimizer, fresh, update
from fuzz.sides import Each, Side, Told, changed, inputs_of_a_block
from ranks_runs import HYPER
from reference import Hyper, Reference, fp32
from torch import Tensor


@dataclass
class Replica(Reference):
    """One rank's model, and what its backwards have given."""

    arrived: dict[str, list[Tensor]] = field(default_factory=dict)
    """In the last backward: one for each time that it gave one."""
    waiting: dict[str, Tensor] = field(default_factory=dict)
    """Sums of this rank alone, fp32."""
    updated_by: dict[str, Optimizer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.states:
            self.join(name)

    def _contribute(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is None:
            raise RuntimeError(f"{name}: the hook ran without a gradient")
        self.arrived.setdefault(name, []).append(parameter.grad.detach().clone())
        parameter.grad = None

    def give(self, loss: Tensor, *, divided_first: bool) -> None:
        """A backward: of a part of the loss, or of the loss, with each gradient divided as it arrives."""
        if divided_first:
            return self.backward(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        for given in self.arrived.values():
            for gradient in given:
                gradient.div_(self.accumulation)

    def wait(self, name: str, gradient: Tensor) -> None:
        held = self.waiting.get(name)
        self.waiting[name] = gradient.float() if held is None else held + gradient.float()

    def join(self, name: str) -> None:
        """A parameter is trained from now on that was not."""
        known = self.states.get(name)
        master = self.model.get_parameter(name).detach().float().clone() if known is None else known.master
        self.states[name] = fresh(self.updated_by[name], master)

    def _update(self, name: str, grad: Tensor, coefficient: float) -> None:
        optimizer, state = self.updated_by[name], self.states[name]
        if optimizer.kind is None:
            return super()._update(name, grad, coefficient)
        return update(optimizer, state, grad.float() * fp32(coefficient), self.hyper_of(name).lr)

    def full_state(self, name: str) -> dict[str, Any]:
        state = self.states[name]
        return {"step": state.step, **{key: getattr(state, key).clone() for key in self.updated_by[name].states}}


class Witness(Side):
    """The slow side."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.grads: dict[str, Tensor] = {}
        self.replicas = [self._replica() for _ in range(case.run.ranks)]
        self.hooked = set(self.first.states)
        self.kept: Any = None

    def _replica(self) -> Replica:
        run, hyper = self.case.run, {**HYPER, "betas": tuple(HYPER["betas"])}
        model = made(self.case.blocks, self.case.ways)
        hyper_of = lambda name: Hyper(**{**hyper, "lr": self.lr})  # noqa: E731
        options = (run.bf16, run.clipping, run.accumulation)
        return Replica(model, hyper_of, *options, updated_by=self.updated_by)

    @property
    def first(self) -> Replica:
        """All have the same weights and states."""
        return self.replicas[0]

    # ---- training -------------------------------------------------------------------------------------

    def train(self, way: str, turn: int) -> Told:
        losses = [self._backward(way, turn + more) for more in range(1 + (way == "two backwards"))]
        steps = self.steps_next
        if steps:
            self._reduce()
        for replica in self.replicas:
            replica.grads = dict(self.grads)
            replica.step()
        self.micro_steps += 1
        if steps:
            self.grads.clear()
        return {"losses": Each(map(list, zip(*losses, strict=True))), "norm": self.first.norms[-1] if steps else None}

    def _backward(self, way: str, turn: int) -> list[Tensor]:
        losses = self._forward(turn)
        if way == "two losses":
            losses = [one + other for one, other in zip(losses, self._forward(turn + 1), strict=True)]
        for replica, loss in zip(self.replicas, losses, strict=True):
            replica.give(loss, divided_first=way != "bare")
        self._fold()
        return [loss.detach() for loss in losses]

    def _forward(self, turn: int, **more: Any) -> list[Tensor]:
        """On every rank. Running statistics of one that trains begin as the first rank's."""
        self.index += 1
        if self.first.model.training and torch.is_grad_enabled():
            self._share_buffers()
        return [replica(batch(self.index, rank), turn, **more) for rank, replica in enumerate(self.replicas)]

    def _share_buffers(self) -> None:
        for replica in self.replicas[1:]:
            for mine, theirs in zip(replica.model.buffers(), self.first.model.buffers(), strict=True):
                mine.data.copy_(theirs)

    def _fold(self) -> None:
        """Take up what a backward gave. A mean of ranks is rounded as one rank's gradient would be."""
        if len(self.replicas) == 1:
            for name, given in self.first.arrived.items():
                for gradient in given:
                    self._add(name, gradient)
            self.first.arrived.clear()
            return
        reducing = not self.deferred or self.steps_next
        for further in (False, True):
            for replica in self.replicas:
                for name, given in replica.arrived.items():
                    for gradient in given[1:] if further else given[:1]:
                        replica.wait(name, gradient)
            if reducing:
                self._reduce(rounds=not (further or self.deferred))
        for replica in self.replicas:
            replica.arrived.clear()

    def _reduce(self, *, rounds: bool = False) -> None:
        for name in dict.fromkeys(name for replica in self.replicas for name in replica.waiting):
            mean = self._mean(name)
            self._add(name, mean.to(self.first.model.get_parameter(name).dtype) if rounds else mean)
        for replica in self.replicas:
            replica.waiting.clear()

    def _mean(self, name: str) -> Tensor:
        """Over all ranks, of what waits; in the order of ranks."""
        nothing = torch.zeros(self.first.model.get_parameter(name).shape)
        parts = [replica.waiting.get(name, nothing) for replica in self.replicas]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total / len(parts)

    def _add(self, name: str, gradient: Tensor) -> None:
        held = self.grads.get(name)
        self.grads[name] = gradient if held is None else held.float() + gradient.float()

    def zero_grad(self) -> None:
        self.grads.clear()
        for replica in self.replicas:
            replica.waiting.clear()

    # ---- forwards without a step ------------------------------------------------------------------------

    def forget(self, turn: int) -> Told:
        return {"loss": Each(loss.detach() for loss in self._forward(turn))}

    def evaluate(self, turn: int) -> Told:
        return {"loss": Each(self._evaluating(lambda: self._forward(turn)))}

    def alone(self, block: int, turn: int) -> Told:
        x = inputs_of_a_block(self.index, self.case.run.bf16)
        return {"out": Each(self._evaluating(lambda: [r.model.blocks[block](x, turn) for r in self.replicas]))}

    def _evaluating(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        for replica in self.replicas:
            replica.eval()
        with torch.no_grad():
            out = run()
        for replica in self.replicas:
            replica.train()
        return out

    def stumble(self, block: int) -> None:
        self.index += 1
        self._share_buffers()
        for rank, replica in enumerate(self.replicas):
            try:
                replica(batch(self.index, rank), stumble=block)
            except Stumble:
                continue

    # ---- values -----------------------------------------------------------------------------------------

    def edit(self, name: str, factor: float, modifier: int | None, late: int) -> Told:
        value = self.first.full_parameter(name) * factor
        for replica in self.replicas:
            replica.edit(name, value)
        return self.read_one(name)

    def look(self, name: str) -> Told:
        return {"value": self.first.full_parameter(name)}

    def replace(self, name: str, plane: str, factor: float, *, local: bool) -> Tensor | None:
        before: Tensor | None = self.read_one(name)[plane]
        if before is None:
            return None
        value = changed(before, plane, factor)
        if plane == "grad":
            self.grads[name] = value
        for replica in self.replicas:
            if plane == "grad":
                replica.waiting.pop(name, None)
            else:
                setattr(replica.states[name], plane, value)
            if plane == "master":
                replica.model.get_parameter(name).data = replica._weight(value)
        return before

    def read_one(self, name: str) -> Told:
        told: Told = dict.fromkeys(("master", *self.updated_by[name].states, "step", "grad"))
        told["weight"] = self.first.full_parameter(name)
        if name in self.first.states:
            state = self.first.full_state(name)
            told |= {"master": self.first.full_master(name), **state, "grad": self._gradient(name)}
        return told

    def _gradient(self, name: str) -> Tensor | None:
        held = self.grads.get(name)
        if not any(name in replica.waiting for replica in self.replicas):
            return None if held is None else held.float()
        return self._mean(name) if held is None else held.float() + self._mean(name)

    def read_all(self) -> Told:
        weights = dict(self.first.model.named_parameters(remove_duplicate=False))
        told = {name: weight.detach().clone() for name, weight in weights.items()}
        for name in dict(self.first.model.named_buffers()):
            told[name] = Each(replica.model.get_buffer(name).clone() for replica in self.replicas)
        return told

    # ---- what is trained, and how -----------------------------------------------------------------------

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def require(self, name: str, gradient: bool) -> None:
        for replica in self.replicas:
            parameter = replica.model.get_parameter(name).requires_grad_(gradient)
            if name not in replica.states:
                replica.join(name)
            if name not in self.hooked:
                parameter.register_post_accumulate_grad_hook(lambda p, replica=replica: replica._contribute(name, p))
        self.hooked.add(name)

    def restart(self) -> None:
        self._share_buffers()

    def keep(self) -> None:
        mine = [(replica.states, replica.waiting, replica.model.state_dict()) for replica in self.replicas]
        self.kept = copy.deepcopy((self.grads, mine))

    def bring_back(self) -> None:
        self.grads, mine = copy.deepcopy(self.kept)
        for replica, (states, waiting, values) in zip(self.replicas, mine, strict=True):
            replica.states, replica.waiting, replica.micro_steps = states, waiting, self.micro_steps
            replica.model.load_state_dict(values)
        self._share_buffers()

    # ---- what is nothing to plain torch -----------------------------------------------------------------

    def offload(self, what: str | None, reload: bool) -> None:
        """Only memory moves."""

    def empty_cache(self) -> None:
        """Only memory moves."""
