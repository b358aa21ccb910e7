"""What users do with `p.grad`: every function of torch.nn.utils that deals with gradients, and loops of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import zero

Parameters = list[nn.Parameter]
Act = Callable[[Parameters], Any]


def gradient_functions() -> set[str]:
    """Public functions of torch.nn.utils of the module of gradients, or whose code reads `.grad`."""
    found = set()
    for name, value in vars(nn.utils).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            code = inspect.unwrap(value).__code__
            if inspect.unwrap(value).__module__ == nn.utils.clip_grad.__name__ or "grad" in code.co_names:
                found.add(name)
    return found


def with_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def clip_with_norm(parameters: Parameters) -> Any:
    norm = nn.utils.get_total_norm(with_gradients(parameters))
    nn.utils.clip_grads_with_norm_(parameters, 0.05, norm)
    return norm


UTILITIES: dict[str, tuple[str, Act]] = {
    "clip_grad_norm_": ("clip_grad_norm_", lambda ps: nn.utils.clip_grad_norm_(ps, 0.05)),
    "clip_grad_norm_ of a loop over a generator": ("", lambda ps: nn.utils.clip_grad_norm_((p for p in ps), 0.05)),
    "clip_grad_norm_ above": ("", lambda ps: nn.utils.clip_grad_norm_(ps, 1e9)),
    "clip_grad_norm_ inf": ("", lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, norm_type=float("inf"))),
    "clip_grad_norm_ 1": ("", lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, norm_type=1)),
    "clip_grad_norm_ foreach": ("", lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, foreach=True)),
    "clip_grad_norm_ of some": ("", lambda ps: nn.utils.clip_grad_norm_(ps[::2], 0.05)),
    "clip_grad_norm_ twice": ("", lambda ps: [nn.utils.clip_grad_norm_(ps, c) for c in (0.05, 0.02)]),
    "clip_grad_norm": ("clip_grad_norm", lambda ps: nn.utils.clip_grad_norm(ps, 0.05)),
    "get_total_norm": ("get_total_norm", lambda ps: nn.utils.get_total_norm(with_gradients(ps))),
    "clip_grads_with_norm_": ("clip_grads_with_norm_", clip_with_norm),
    "clip_grad_value_": ("clip_grad_value_", lambda ps: nn.utils.clip_grad_value_(ps, 0.003)),
    "clip_grad_value_ foreach": ("", lambda ps: nn.utils.clip_grad_value_(ps, 0.003, foreach=True)),
}
"""Name -> the function of torch.nn.utils that it stands for, if it is the first for it, and the call."""


def scale_in_place(parameters: Parameters) -> None:
    for gradient in with_gradients(parameters):
        gradient.mul_(0.5)


def operators(parameters: Parameters) -> None:
    for number, p in enumerate(parameters):
        if p.grad is not None:
            p.grad *= 0.25 + number % 3


def through_data(parameters: Parameters) -> list[float]:
    norms = []
    for gradient in with_gradients(parameters):
        norms.append(float(gradient.data.norm(2)))
        gradient.data.div_(4)
        gradient.detach().add_(0.01)
    return norms


def replace(parameters: Parameters) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad = p.grad * 0.5 + 0.125


def views(parameters: Parameters) -> None:
    for gradient in with_gradients(parameters):
        gradient.view(-1)[:3] = 0.25
        gradient[..., :1] = 0.5


def nan_to_num(parameters: Parameters) -> None:
    for gradient in with_gradients(parameters):
        torch.nan_to_num(gradient, nan=0, posinf=1e5, neginf=-1e5, out=gradient)
        gradient.clamp_(-0.01, 0.01)


def while_gathered(parameters: Parameters) -> None:
    with zero.GatheredParameters([p for p in parameters if hasattr(p, "ds_id")]):
        nn.utils.clip_grad_norm_(parameters, 0.05)


def drop_some(parameters: Parameters) -> None:
    for p in parameters[::2]:
        p.grad = None


def read(parameters: Parameters) -> list[Any]:
    found: list[Any] = []
    for gradient in with_gradients(parameters):
        found += [gradient.abs().max(), gradient.mean(), gradient.norm(), gradient.numpy(force=True).sum()]
        found += [gradient.clone(), gradient.float() + 1, bool(torch.isfinite(gradient).all()), tuple(gradient.shape)]
    return found


LOOPS: dict[str, Act] = {
    each.__name__: each
    for each in (scale_in_place, operators, through_data, replace, views, nan_to_num, while_gathered, drop_some, read)
}
ACTS: dict[str, Act] = {**{name: act for name, (_, act) in UTILITIES.items()}, **LOOPS}


LR = 0.1


class Small(nn.Module):
    """Blocks (units of their own), a tied weight, one whose gradient is larger than a block of sums, a frozen one."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(40, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 200), nn.Tanh(), nn.Linear(200, 24)) for _ in range(2))
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 40)
        self.head.weight = self.embed.weight
        self.aside = nn.Parameter(torch.ones(24)) if unused else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(torch.tanh(self.frozen(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def tokens(index: int, rank: int = 0) -> torch.Tensor:
    return torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(10 * index + rank))


def compare(engine: Any, plain: nn.Module, acts: dict[str, Act], accumulation: int, ranks: int, rtol: float) -> None:
    """A step with each act, whose results and weights are torch's; the act comes after each micro-batch."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    rank, index = (torch.distributed.get_rank() if ranks > 1 else 0), 0
    names = dict(plain.named_parameters())
    for name, act in acts.items():
        for _ in range(accumulation):
            loss = sum(plain(tokens(index, each)) for each in range(ranks)) / (ranks * accumulation)
            loss.backward()  # type: ignore[union-attr]
            engine.backward(engine(tokens(index, rank)))
            index += 1
            wanted, got = act(list(plain.parameters())), act(list(engine.parameters()))
            torch.testing.assert_close(plainly(got), plainly(wanted), rtol=rtol, atol=rtol / 10, msg=name_of(name))
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
        for key, parameter in names.items():
            found = engine.full_parameter(key).float()
            what = name_of(f"{name}: {key}")
            torch.testing.assert_close(found, parameter.detach(), rtol=rtol, atol=rtol / 10, msg=what)
        assert all(p.grad is None for p in engine.parameters()), name


def name_of(what: str) -> Callable[[str], str]:
    return lambda message: f"{what}: {message}"


def plainly(found: Any) -> Any:
    """fp32 tensors, whatever the dtype of the weights."""
    if isinstance(found, torch.Tensor):
        return found.detach().clone().float()
    return [plainly(item) for item in found] if isinstance(found, list) else found
