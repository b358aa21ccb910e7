"""Muon for hidden matrices and AdamW for other parameters, as one optimizer: `optimizer.type: "Muon"`.

`torch.optim.Muon` itself updates each matrix as one piece; our kernel updates the other parameters. The choice is
DeepSpeed's: parameters of two dimensions or more are Muon's unless their name contains "embed" or "lm_head". An
attribute `use_muon` of a parameter, or this key in a param group, overrides the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import ConfigError
from zero.config.optimizer_block import OptimizerConfig, OptimizerParams
from zero.optim.rules import AdamRule, Rules, TiledRule, TrainedParameters

FLAG = "use_muon"
NOT_HIDDEN = ("embed", "lm_head")  # Muon does not update matrices with these in their names.
MOMENTUM = "momentum_buffer"


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """True if Muon updates the parameter by default."""
    flag = getattr(parameter, FLAG, None)
    return bool(flag) if flag is not None else parameter.dim() >= 2 and not any(w in name.lower() for w in NOT_HIDDEN)


def muon_from(block: OptimizerConfig, groups: Iterable[Mapping[str, Any]], model: nn.Module) -> TrainedParameters:
    """Param groups of each rule, and the rules, from a config's block.

    Raises ConfigError: Muon is to update a parameter that is not a matrix.

    Args:
        block: of type "Muon".
        groups: groups of trained parameters; each is split in two.
        model: has the parameters' names.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    muon_options, adam_options = _options(block.params)
    adam = AdamRule(decoupled=block.params.adam_w_mode, defaults=adam_options)
    rules = Rules((MuonRule(muon_options), adam), FLAG, is_hidden_matrix)
    rule_groups = []
    for group in groups:
        for flag, defaults in ((True, rules.each[0].defaults), (False, adam_options)):
            parameters = [p for p in group["params"] if _flag_of(group, names[id(p)], p) == flag]
            if parameters:
                options = {key: value for key, value in group.items() if key != "params"}
                rule_groups.append({**defaults, **options, FLAG: flag, "params": parameters})
    for group in rule_groups:
        _check_matrices(group, names)
    return TrainedParameters(rule_groups, rules)


class MuonRule(TiledRule):
    """`torch.optim.Muon`, matrix by matrix: each packed expert is one matrix, and a convolution's filters are rows.

    `options`: of the class.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(
                f'optimizer.type "Muon": expected torch 2.9 or newer, got {torch.__version__}; upgrade it'
            )
        muon = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1, device="cpu", dtype=torch.float32))], **options)
        super().__init__(muon, states=(MOMENTUM,), needs_whole_parameters=True)

    def tile_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The last two dimensions, or the first and all others."""
        return shape[-2:] if len(shape) < 4 else (shape[0], math.prod(shape[1:]))


def _flag_of(group: Mapping[str, Any], name: str, parameter: Tensor) -> bool:
    return bool(group[FLAG]) if FLAG in group else is_hidden_matrix(name, parameter)


def _check_matrices(group: Mapping[str, Any], names: Mapping[int, str]) -> None:
    for parameter in group["params"] if group[FLAG] else ():
        if parameter.dim() < 2:
            name, shape = names[id(parameter)], tuple(parameter.shape)
            raise ConfigError(
                f"optimizer: Muon updates matrices, and {name} has the shape {shape}; set {FLAG} to False in its "
                "param group, or as an attribute of the parameter, so that AdamW updates it"
            )


def _options(params: OptimizerParams) -> tuple[dict[str, Any], dict[str, Any]]:
    """Default options for groups of Muon and of AdamW; DeepSpeed's defaults."""
    user_options = {key: getattr(params, key) for key in params.model_fields_set}
    lr = {"lr": user_options["lr"]} if "lr" in user_options else {}
    decay = {"weight_decay": params.weight_decay}
    keys = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
    muon = {
        "lr": 0.02,
        **lr,
        "momentum": 0.95,
        **decay,
        **{key: user_options[key] for key in keys if key in user_options},
    }
    adam = {"lr": 3e-4, **lr, "betas": (0.9, 0.95), "eps": 1e-10, **decay}
    adam.update({key: user_options[key] for key in ("betas", "eps") if key in user_options})
    for options, key in ((muon, "muon_lr"), (adam, "adam_lr")):
        if user_options.get(key) is not None:
            options["lr"] = user_options[key]
    return muon, {**adam, "decoupled": params.adam_w_mode}
