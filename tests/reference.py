"""A plain-torch trainer that gives the exact bits that the engine must produce.

It is slow, complete and simple: every tensor is in memory, each line has one operation, and it uses no code of the
product. It has the engine's methods, so one training loop drives both:

    loss = trainer(batch); trainer.backward(loss); trainer.step()

bf16 mode: parameters are bf16 leaves, the master is fp32 and the weight is the master rounded half away from zero.
fp16 mode: the same with fp16, rounded to nearest even. fp32 mode: the weight is the master. In all modes a gradient
with one contribution is kept in autograd's dtype; from the second contribution on it is summed in fp32, in order. A
parameter without a gradient is not updated: no decay, no step count.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from probe import units_read_once
from torch import Tensor, nn


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of one parameter's Adam update, with the names of torch.optim."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True


@dataclass
class State:
    """fp32 master and moments of one parameter, flat, with its own step count."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int = 0


def round_half_away(master: Tensor) -> Tensor:
    """fp32 -> bf16 with integers: add half an ulp to the magnitude, then cut off the low 16 bits."""
    bits = master.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def adam(state: State, grad: Tensor, grad_scale: float, hyper: Hyper) -> None:
    """One update in place: each line is one fp32 operation per element, rounded to nearest even."""
    state.step += 1
    beta1, beta2 = hyper.betas
    # Both bias corrections in the second form of arXiv:1412.6980, section 2: one division per element.
    bias2_sqrt = math.sqrt(1 - beta2**state.step)
    step_size, eps = fp32(hyper.lr / (1 - beta1**state.step) * bias2_sqrt), fp32(hyper.eps * bias2_sqrt)
    g = grad.float() * fp32(grad_scale)
    w, m, v = state.master, state.exp_avg, state.exp_avg_sq
    if hyper.weight_decay and not hyper.decoupled:
        g = g + w * fp32(hyper.weight_decay)
    if hyper.weight_decay and hyper.decoupled:
        w = w * fp32(1 - hyper.lr * hyper.weight_decay)
    m = m + (g - m) * fp32(1 - beta1)
    v_new = (g * g) * fp32(1 - beta2)
    v = v * fp32(beta2) + v_new
    w = w - (m / (correctly_rounded_sqrt(v) + eps)) * step_size
    state.master, state.exp_avg, state.exp_avg_sq = w, m, v


def correctly_rounded_sqrt(x: Tensor) -> Tensor:
    """IEEE sqrt. torch.sqrt on the CPU may use MKL's vector library, which is sometimes off by an ulp."""
    return torch.from_numpy(np.sqrt(x.reshape(-1).numpy())).reshape(x.shape)


def fp32(value: float) -> Tensor:
    """A double rounded to fp32 once, as for an argument of a kernel."""
    return torch.tensor(value, dtype=torch.float32)


def norm_of(grads: Mapping[str, Tensor]) -> float:
    """The global gradient norm with 53 bits: every square is rounded to a multiple of one power of two, which depends
    on the largest element, and these multiples are added exactly."""
    values = np.concatenate([np.zeros(1), *(grad.detach().double().flatten().numpy() for grad in grads.values())])
    if not np.isfinite(values).all():
        return math.nan
    exponent = math.frexp(np.abs(values).max())[1]
    unit = 48 * (2 * exponent // 48 - 1) if values.any() else 0
    # Halves of a unit are rounded to even; scaling by a power of two is exact.
    total = exact_sum(np.rint(np.ldexp(values * values, -unit)))
    return math.sqrt(math.ldexp(float(total), unit))


def exact_sum(whole: np.ndarray) -> int:
    """The exact sum of whole numbers below 2^96: their halves of 48 bits are added, of which int64 can add 2^14."""
    high = np.floor(np.ldexp(whole, -48))
    halves = ((high, 48), (whole - np.ldexp(high, 48), 0))
    pieces = range(0, whole.size, 2**14)
    return sum(int(half[at : at + 2**14].astype(np.int64).sum()) << shift for half, shift in halves for at in pieces)


def norm_exact(grads: Mapping[str, Tensor]) -> float:
    """The global gradient norm from the correctly rounded sum of all squares."""
    return math.sqrt(math.fsum(x * x for grad in grads.values() for x in grad.detach().double().flatten().tolist()))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor of the gradients; 1 when clipping is off."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


@dataclass
class LossScaleRule:
    """The dynamic loss scale, as DeepSpeed documents it: `loss_scale` 0 and the other keys of its `fp16` block."""

    scale: float = 65536.0
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0

    def __post_init__(self) -> None:
        self.left, self.step, self.overflowed_at = self.hysteresis, 0, -1

    def update(self, overflow: bool) -> None:
        if overflow and self.left == 1:
            if self.scale == self.minimum:
                raise ArithmeticError("the scale cannot be less")
            self.scale = max(self.scale / 2, self.minimum)
        elif overflow:
            self.left -= 1
        elif self.consecutive:
            self.left = self.hysteresis
        if overflow:
            self.overflowed_at = self.step
        elif (good := self.step - self.overflowed_at - 1) > 0 and good % self.window == 0:
            self.left, self.scale = self.hysteresis, self.scale * 2
        self.step += 1


def _contributed(reference: weakref.ref[Reference], name: str, parameter: Tensor) -> None:
    """A weak reference, since the garbage collector does not see torch's hooks: a strong one would never be freed."""
    if (held := reference()) is not None:
        held._contribute(name, parameter)


@dataclass
class Reference:
    """Trains `model` in the slow way.

    Attributes:
        hyper_of: parameter name -> its hyper-parameters, called at every step (a scheduler may change them).
        on_step: called after each optimizer step, like a learning-rate scheduler.
        opaque: True for names of parameters that are quantised storage, which is not changed.
        fp16: fp16 weights instead of bf16 ones.
        rule: scales the loss; a step whose gradients are not finite is skipped.
    """

    model: nn.Module
    hyper_of: Callable[[str], Hyper]
    bf16: bool = True
    clipping: float = 0.0
    accumulation: int = 1
    on_step: Callable[[], None] | None = None
    opaque: Callable[[str], bool] = lambda name: False
    fp16: bool = False
    rule: LossScaleRule | None = None
    states: dict[str, State] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    micro_steps: int = 0

    def __post_init__(self) -> None:
        for name, parameter in self.model.named_parameters():
            if self.opaque(name) or not parameter.is_floating_point():
                continue  # codes of a quantised base are bytes, not numbers
            master = parameter.detach().clone().float()
            if self.bf16 or self.fp16:
                parameter.data = self._weight(master)
            if parameter.requires_grad:
                self.states[name] = State(master, torch.zeros_like(master), torch.zeros_like(master))
                parameter.register_post_accumulate_grad_hook(partial(_contributed, weakref.ref(self), name))

    def _weight(self, master: Tensor) -> Tensor:
        if self.fp16:
            return master.half()
        return round_half_away(master) if self.bf16 else master.clone()

    def _contribute(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is None:
            raise RuntimeError(f"{name}: the hook ran without a gradient")
        new, parameter.grad = parameter.grad.detach().clone(), None
        held = self.grads.get(name)
        self.grads[name] = new if held is None else held.float() + new.float()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def train(self, mode: bool = True) -> None:
        self.model.train(mode)

    def eval(self) -> None:
        self.model.eval()

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        scaled = loss / self.accumulation * (1.0 if self.rule is None else self.rule.scale)
        scaled.backward(retain_graph=retain_graph)

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.accumulation:
            return
        norm = norm_of(self.grads)
        scale = 1.0 if self.rule is None else self.rule.scale
        if self.rule is not None:
            self.rule.update(overflow=not math.isfinite(norm))
            if not math.isfinite(norm):
                self.norms.append(math.inf)
                self.grads.clear()
                return
        norm = norm / scale
        coefficient = clip_coefficient(norm, self.clipping) / scale
        self.norms.append(norm)
        self.coefficients.append(coefficient)
        parameters = dict(self.model.named_parameters())
        for name, grad in self.grads.items():
            self._update(name, grad, coefficient)
            parameters[name].data = self._weight(self.states[name].master)
        self.grads.clear()
        if self.on_step is not None:
            self.on_step()

    def _update(self, name: str, grad: Tensor, coefficient: float) -> None:
        adam(self.states[name], grad, coefficient, self.hyper_of(name))

    def edit(self, name: str, value: Tensor) -> None:
        """Set a parameter by hand, as in GatheredParameters: the master changes only where the weight has changed."""
        parameter = self.model.get_parameter(name)
        edited = value.to(parameter.dtype)
        if name in self.states:
            state = self.states[name]
            state.master = torch.where(edited == parameter.detach(), state.master, edited.float())
        parameter.data = edited.clone()

    def get_global_grad_norm(self) -> float:
        return self.norms[-1]

    def full_parameter(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach().clone()

    def full_master(self, name: str) -> Tensor:
        return self.states[name].master.clone()

    def full_state(self, name: str) -> dict[str, Any]:
        state = self.states[name]
        return {"exp_avg": state.exp_avg.clone(), "exp_avg_sq": state.exp_avg_sq.clone(), "step": state.step}


def snapshot(trainer: Any, model_names: Iterable[tuple[str, bool]]) -> dict[str, Tensor]:
    """All values of a trainer, by "name/plane": all weights; master, moments and step count of trainable parameters."""
    held: dict[str, Tensor] = {}
    with units_read_once(trainer):
        for name, trainable in model_names:
            held[f"{name}/weight"] = trainer.full_parameter(name)
            if not trainable:
                continue
            state = trainer.full_state(name)
            held[f"{name}/master"] = trainer.full_master(name)
            held[f"{name}/exp_avg"] = state["exp_avg"]
            held[f"{name}/exp_avg_sq"] = state["exp_avg_sq"]
            held[f"{name}/step"] = torch.tensor(int(state["step"]))
    return held


def differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """The tensors that are not bit-equal, in words; empty if all are equal."""
    found = [f"only on one side: {key}" for key in sorted(set(ours) ^ set(theirs))]
    for key in sorted(set(ours) & set(theirs)):
        a, b = ours[key].detach().cpu(), theirs[key].detach().cpu()
        if a.dtype != b.dtype or a.shape != b.shape:
            found.append(f"{key}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
        elif not torch.equal(a, b):
            unequal = (a != b).sum().item()
            gap = (a.double() - b.double()).abs().max().item()
            found.append(f"{key}: {unequal} of {a.numel()} differ, by up to {gap:.3g}")
    return found


def changed(before: Reference, change: Callable[[nn.Module], None]) -> Reference:
    """A reference on a changed copy of the model, with the states and gradients of every remaining parameter."""
    model = copy.deepcopy(before.model)
    names = {id(p): name for name, p in model.named_parameters()}
    change(model)
    kept = {name: names[id(p)] for name, p in model.named_parameters() if id(p) in names}
    after = Reference(model, before.hyper_of, bf16=before.bf16, accumulation=before.accumulation)
    after.micro_steps = before.micro_steps
    for new, old in kept.items():
        if old in before.states:
            after.states[new] = before.states[old]
        if old in before.grads:
            after.grads[new] = before.grads[old]
    return after
