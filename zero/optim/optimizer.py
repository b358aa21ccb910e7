"""The optimizer the user holds: live param groups in front, the sub-group pipeline behind.

It is a `torch.optim.Optimizer`, so learning-rate schedulers and clients that write into
`param_groups` work as they do with torch. What is read from the groups is read at `step()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, StateError
from zero.config import Config
from zero.optim.loss_scale import HasLossScale
from zero.optim.pipeline import AdamValues

_PLAIN = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}


class ZeroOptimizer(HasLossScale, torch.optim.Optimizer):
    """Adam or AdamW over states that live wherever the plan put them.

    Args:
        groups: torch-style param groups with lr, betas, eps, weight_decay and `decoupled` (AdamW).
        take_step: called by `step()`; the engine's boundary step.
        clear: called by `zero_grad()`.
    """

    def __init__(self, groups: list[dict[str, Any]], take_step: Callable[[], None], clear: Callable[[], None]) -> None:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
        super().__init__(groups, defaults)
        self._take_step, self._clear = take_step, clear
        self.step_counts: dict[int, int] = {}
        """id(parameter) -> updates so far; torch counts per parameter too."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the step that `engine.step()` takes on an accumulation boundary.

        Raises:
            StateError: a closure was given: it would run the model inside the step.
        """
        if closure is not None:
            raise StateError(
                "optimizer.step(closure): closures are not supported; run forward and backward before step()"
            )
        self._take_step()

    def mark_stepped(self) -> None:
        """Tell torch's schedulers that a step was taken before theirs, or they warn of a wrong order."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that have been accumulated."""
        self._clear()

    def values(self, index_of: dict[int, int], contributed: Container[int]) -> dict[int, AdamValues]:
        """Hyper-parameters of the step that would be taken now, of every parameter that has a gradient.

        Args:
            index_of: id(parameter) -> parameter index.
            contributed: indices of parameters with a gradient.
        """
        values: dict[int, AdamValues] = {}
        for group in self.param_groups:
            beta1, beta2 = (float(beta) for beta in group["betas"])
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            decoupled = bool(group.get("decoupled", group.get("decoupled_weight_decay", True)))
            for parameter in group["params"]:
                index = index_of.get(id(parameter))
                if index is None or index not in contributed:
                    continue
                count = self.step_counts.get(id(parameter), 0) + 1
                values[index] = AdamValues(
                    step_size=lr / (1 - beta1**count),
                    bias2_sqrt=math.sqrt(1 - beta2**count),
                    decay=1 - lr * decay if decoupled else 1.0,
                    l2=0.0 if decoupled else decay,
                    beta1=beta1,
                    beta2=beta2,
                    eps=float(group["eps"]),
                )
        return values

    def count_step(self, index_of: dict[int, int], contributed: Container[int]) -> None:
        """A step is taken: count it for every parameter that has a gradient, as torch does."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if index_of.get(id(parameter)) in contributed:
                    self.step_counts[id(parameter)] = self.step_counts.get(id(parameter), 0) + 1


def groups_from(
    optimizer: torch.optim.Optimizer | Callable[..., Any] | None,
    model_parameters: Iterable[Any] | None,
    model: nn.Module,
    config: Config,
) -> list[dict[str, Any]] | None:
    """Param groups from an optimizer passed in, else from the config; None when there is neither.

    Raises:
        ConfigError: both are missing what is needed, or ask for something that is not available.
    """
    if optimizer is not None:
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer: expected a torch.optim.Adam or AdamW, got {type(optimizer).__name__}; "
                "or leave it out and set optimizer.type in the config"
            )
        return _owned(_groups_of_torch(optimizer), model)
    if config.optimizer is None:
        return None
    params = config.optimizer.params
    decoupled = config.optimizer.decoupled_weight_decay
    common = {
        "lr": params.lr,
        "betas": tuple(params.betas),
        "eps": params.eps,
        "weight_decay": params.weight_decay,
        "decoupled": decoupled,
    }
    given: list[Any] = (
        list(model_parameters) if model_parameters is not None else [p for p in model.parameters() if p.requires_grad]
    )
    if any(isinstance(entry, tuple) for entry in given):
        raise ConfigError("model_parameters: got (name, parameter) pairs; pass model.parameters() or param groups")
    if given and isinstance(given[0], dict):
        return _owned([{**common, **group, "params": _trainable(group["params"])} for group in given], model)
    return _owned([{**common, "params": _trainable(given)}], model)


def _owned(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """The groups, if every parameter in them is the model's."""
    known = {id(p) for p in model.parameters()}
    foreign = [tuple(p.shape) for group in groups for p in group["params"] if id(p) not in known]
    if foreign:
        raise ConfigError(
            f"optimizer: {len(foreign)} parameters are not the model's (shapes {foreign[:4]}); build the optimizer "
            "from the parameters of the model that is passed"
        )
    return groups


def _groups_of_torch(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} is not available yet; pass torch.optim.Adam or AdamW, "
            "or set optimizer.type in the config"
        )
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    if any(optimizer.state.values()):
        raise ConfigError("optimizer: has state already; pass a fresh one, its states are kept by the engine")
    for number, group in enumerate(optimizer.param_groups):
        for key, expected in _PLAIN.items():
            if group.get(key, expected) != expected:
                raise ConfigError(f"optimizer.param_groups[{number}].{key}: expected {expected}, got {group[key]}")
        group["decoupled"] = bool(group.get("decoupled_weight_decay", decoupled))
    return optimizer.param_groups


def _trainable(parameters: Sequence[nn.Parameter] | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad]
