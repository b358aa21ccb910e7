"""From what the user asks for, a name in the config or an optimizer object, to param groups and an update rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError
from zero.config import Config
from zero.config.optimizer_block import OptimizerConfig
from zero.ops.adam import KernelAdam
from zero.ops.lion import Lion
from zero.optim.probe_optimizer import rule_for
from zero.optim.rules import AdamRule, Rule, Trained

_PLAIN = {"amsgrad": False, "maximize": False, "differentiable": False}
"""Options of torch's Adam with which it is what our kernel computes."""


def trained_from(
    optimizer: torch.optim.Optimizer | Callable[..., Any] | None,
    model_parameters: Iterable[Any] | None,
    model: nn.Module,
    config: Config,
) -> Trained | None:
    """Param groups and rule of an optimizer passed in, else of the config; None when there is neither.

    Raises:
        ConfigError: both are missing what is needed, or ask for something that is not available.
    """
    if optimizer is not None:
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}; "
                "or leave it out and set optimizer.type in the config"
            )
        groups = _owned(optimizer.param_groups, model)
        return Trained(groups, _checked(_rule_of(optimizer), config), optimizer)
    if config.optimizer is None:
        return None
    given: list[Any] = (
        list(model_parameters) if model_parameters is not None else [p for p in model.parameters() if p.requires_grad]
    )
    if any(isinstance(entry, tuple) for entry in given):
        raise ConfigError("model_parameters: got (name, parameter) pairs; pass model.parameters() or param groups")
    as_groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return _named(config, _owned([{**g, "params": _trainable(g["params"])} for g in as_groups], model))


def rule_of_config(config: Config) -> Rule | None:
    """The rule that `zero.initialize` would take with this configuration; None if it has no optimizer."""
    return None if config.optimizer is None else _named(config, [{"params": []}]).rule


def _named(config: Config, groups: list[dict[str, Any]]) -> Trained:
    """What the config's optimizer block asks for."""
    block = config.optimizer or OptimizerConfig()
    if block.is_plain_adam and not any(group.get("amsgrad") or group.get("maximize") for group in groups):
        params = block.params
        common = {
            "lr": params.lr,
            "betas": tuple(params.betas),
            "eps": params.eps,
            "weight_decay": params.weight_decay,
            "decoupled": block.decoupled_weight_decay,
        }
        if not params.bias_correction:
            common["bias_correction"] = False
        rule = AdamRule(decoupled=block.decoupled_weight_decay, defaults=common)
        return Trained([{**common, **group} for group in groups], rule)
    kind = _class_of(block)
    try:
        made = kind([nn.Parameter(torch.zeros(1, device="cpu"))], **block.options())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {error}") from error
    merged = [{**made.defaults, **group} for group in groups]
    return Trained(merged, _checked(rule_for(made, merged), config))


def _class_of(block: OptimizerConfig) -> Callable[..., torch.optim.Optimizer]:
    if block.type == "Lion":
        return Lion
    name = ("AdamW" if block.decoupled_weight_decay else "Adam") if block.type in ("Adam", "AdamW") else block.type
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    return kind


def _rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of an optimizer object, which gives its param groups away."""
    if isinstance(optimizer, KernelAdam):
        decoupled, known = optimizer.adam_w_mode, _same_step(optimizer, KernelAdam)
    else:
        decoupled = isinstance(optimizer, torch.optim.AdamW)
        known = _same_step(optimizer, torch.optim.Adam) or _same_step(optimizer, torch.optim.AdamW)
    plain = all(group.get(key, value) == value for group in optimizer.param_groups for key, value in _PLAIN.items())
    if not (known and plain):
        return rule_for(optimizer, optimizer.param_groups)
    if any(optimizer.state.values()):
        raise ConfigError("optimizer: has state already; pass a fresh one, its states are kept by the engine")
    for group in optimizer.param_groups:
        group["decoupled"] = bool(group.get("decoupled_weight_decay", decoupled))
    return AdamRule(decoupled=decoupled, defaults=optimizer.defaults)


def _same_step(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> bool:
    """True when the optimizer is of the class, or of a subclass that steps as it does."""
    own = type(optimizer)
    if not isinstance(optimizer, kind) or inspect.unwrap(own.step) is not inspect.unwrap(kind.step):
        return False
    return not issubclass(kind, KernelAdam) or own.update is kind.update  # type: ignore[attr-defined]


def _checked(rule: Rule, config: Config) -> Rule:
    stored = config.zero_optimization.offload_optimizer.state_dtype
    if stored != "fp32" and not isinstance(rule, AdamRule):
        raise ConfigError(
            f"zero_optimization.offload_optimizer.state_dtype: {stored} is for Adam and AdamW, and {rule.name} is "
            "something else; set it to fp32"
        )
    return rule


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


def _trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad]
