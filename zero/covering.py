"""The cover of a model under a configuration: which parameters move together."""

from __future__ import annotations

import torch
from torch import nn

from offload.errors import ConfigError
from zero.config import Config
from zero.params.units import CoveredUnit, CoverRules, Leaf, cover

LIVE_UNITS = 4
"""An explicit live limit is cut into this many units at least."""


def cover_model(model: nn.Module, leaves: list[Leaf], trainable: set[int], config: Config) -> list[CoveredUnit]:
    """The units of a model, in model order.

    Args:
        model: the whole tree.
        leaves: its parameters.
        trainable: id(parameter) of those the optimizer holds.
        config: validated configuration.

    Raises:
        ConfigError: a parameter's dtype cannot be trained; names it.
    """
    zero = config.zero_optimization
    explicit = zero.stage3_max_live_parameters
    rules = CoverRules(
        numel_max=None if explicit is None else explicit // LIVE_UNITS,
        persistence_numel=zero.stage3_param_persistence_threshold,
        compute_dtype=torch.bfloat16 if config.bf16.enabled else None,
        live_numel_max=explicit,
    )
    for leaf in leaves:
        p = leaf.parameter
        if id(p) in trainable and rules.compute_dtype is None and p.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"parameter {leaf.names[0]}: training {p.dtype} weights is not available; use float32 or bfloat16, "
                'or set "bf16": {"enabled": true}'
            )
    return cover(model, leaves, trainable, rules)
