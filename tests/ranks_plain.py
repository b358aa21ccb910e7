"""Plain torch on several ranks: the engine's results are compared with it, within the distance of two such runs.

    loss = trainer(batch); trainer.backward(loss); trainer.step()

`Ddp` is DistributedDataParallel, torch's AdamW and clip_grad_norm_. `Opposite` computes the same in another order: each
rank sums its own gradients over a whole step, then all are added from the last rank to the first; the norm is computed
in fp64, and AdamW is torch's fused one. `Late` is `Ddp` that reduces once a step (`no_sync`). None is more exact than
the others, so their distance is the effect of the order of operations. All average over ranks and over the micro-steps
of one step; several backwards are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALLOWED_SPREADS = 4
FLOOR_ULPS = 32
FP32_EPS = 2.0**-23


@dataclass
class Outcome:
    """The result of a run: "name/weight", "name/exp_avg", ... of every parameter, and the norm of every step."""

    tensors: dict[str, Tensor]
    norms: list[float]


@dataclass
class Plain:
    """Common code of both trainers. Attributes: as in the engine's config."""

    model: nn.Module
    adamw: Mapping[str, Any]
    accumulation: int = 1
    clipping: float = 0.0
    fused: bool = False
    norms: list[float] = field(default_factory=list)
    micro_steps: int = 0

    def __post_init__(self) -> None:
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), fused=self.fused, **self.adamw)
        self.callable: nn.Module = self.model

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.callable(*inputs, **named)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        (loss / self.accumulation).backward(retain_graph=retain_graph)

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.accumulation:
            return
        self.norms.append(self.settle())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> float:
        """Reduce and clip the gradients of the step; returns their norm before clipping."""
        raise NotImplementedError

    def outcome(self) -> Outcome:
        held: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            held[f"{name}/weight"] = parameter.detach().clone()
            if name in self.trained:
                state = self.optimizer.state.get(parameter, {})
                zeros = torch.zeros_like(parameter)
                held[f"{name}/master"] = parameter.detach().clone()
                held[f"{name}/exp_avg"] = state.get("exp_avg", zeros).clone()
                held[f"{name}/exp_avg_sq"] = state.get("exp_avg_sq", zeros).clone()
                held[f"{name}/step"] = torch.tensor(int(state.get("step", 0)))
        return Outcome(held, list(self.norms))


@dataclass
class Ddp(Plain):
    """DistributedDataParallel; gradients are reduced in each backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.callable = nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)

    def settle(self) -> float:
        limit = self.clipping or math.inf
        return float(torch.nn.utils.clip_grad_norm_(self.trained.values(), limit))


@dataclass
class Late(Ddp):
    """The gradients of a step are reduced in its last backward."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        last = (self.micro_steps + 1) % self.accumulation == 0
        with nullcontext() if last else self.callable.no_sync():
            return super().__call__(*inputs, **named)


@dataclass
class Opposite(Plain):
    """A reduction by hand; ranks are added from the last to the first."""

    def __post_init__(self) -> None:
        self.fused = True
        super().__post_init__()

    def settle(self) -> float:
        ranks = dist.get_world_size()
        for parameter in self.trained.values():
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            flat = torch.cat([mine.flatten(), torch.tensor([float(parameter.grad is not None)])])
            everyone = [torch.empty_like(flat) for _ in range(ranks)]
            dist.all_gather(everyone, flat)
            total = torch.zeros_like(flat)
            for rank in reversed(range(ranks)):
                total += everyone[rank]
            parameter.grad = (total[:-1] / ranks).view_as(parameter) if total[-1] else None
        held = [p.grad for p in self.trained.values() if p.grad is not None]
        norm = math.sqrt(math.fsum(float(grad.double().square().sum()) for grad in held))
        if self.clipping and norm > self.clipping:
            for grad in held:
                grad *= self.clipping / (norm + 1e-6)
        return norm


def beyond(ours: Outcome, one: Outcome, *others: Outcome) -> list[str]:
    """Where `ours` is further from `one` than the spread of `one` and `others` allows, in words; empty if nowhere.

    The spread of a tensor is the largest distance of its elements in `one` from those in another run. There is a
    minimum, in case all agree: a few ulps of the largest element.
    """
    found = [f"only on one side: {key}" for key in sorted(set(ours.tensors) ^ set(one.tensors))]
    for key in sorted(set(ours.tensors) & set(one.tensors)):
        a, b, *rest = (run.tensors[key].double() for run in (ours, one, *others))
        if a.shape != b.shape:
            found.append(f"{key}: {tuple(a.shape)} against {tuple(b.shape)}")
            continue
        allowed = allowed_distance(b, *rest)
        distance = (a - b).abs()
        if key.endswith("/step"):
            allowed = torch.zeros(())
        if (distance > allowed).any():
            found.append(f"{key}: {distance.max():.3g} apart, {allowed.max():.3g} allowed, up to {b.abs().max():.3g}")
    norms = [torch.tensor(run.norms, dtype=torch.float64) for run in (ours, one, *others)]
    if norms[0].shape != norms[1].shape:
        found.append(f"{len(norms[0])} norms against {len(norms[1])}")
    elif ((norms[0] - norms[1]).abs() > allowed_distance(*norms[1:])).any():
        found.append(f"norms: {ours.norms} against {one.norms}")
    return found


def allowed_distance(one: Tensor, *others: Tensor) -> Tensor:
    """The allowed distance of a further run from `one`: 4 times the spread, and at least the minimum."""
    nothing = torch.zeros(())
    spread = max(((one - other).abs().max() for other in others), default=nothing) if one.numel() else nothing
    largest = one.abs().max() if one.numel() else nothing
    return torch.maximum(ALLOWED_SPREADS * spread, FLOOR_ULPS * FP32_EPS * largest).expand(one.shape)
