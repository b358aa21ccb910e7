"""The cover of a model under a configuration: which parameters are fetched and released together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from offload.errors import ConfigError
from zero.config import Config
from zero.params.leaf_modules import apply_zero_leaf_module_config, flag_fine_modules, mark_leaf_parameters
from zero.params.quantized_weights import is_packed, is_wrapper
from zero.params.released_parameter import is_managed
from zero.params.units import CoveredUnit, CoverRules, Leaf, cover

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIVE_UNITS = 4
"""An explicit live limit is cut into this many units at least."""


def cover_model(
    model: nn.Module,
    leaves: list[Leaf],
    trainable: Mapping[int, int],
    config: Config,
    whole_parameter_rules: frozenset[int] = frozenset(),
) -> list[CoveredUnit]:
    """The units of a model, in model order.

    Args:
        model: the whole tree.
        leaves: its parameters.
        trainable: id(parameter) of each parameter in the optimizer -> number of the rule that updates it.
        config: validated configuration.
        whole_parameter_rules: numbers of the rules that need whole parameters.

    Raises:
        ConfigError: a parameter's dtype cannot be trained, its memory is another's too, or a leaf module does not
            exist; names it.
    """
    zero = config.zero_optimization
    apply_zero_leaf_module_config(model, zero.leaf_module)
    flag_fine_modules(model, zero.stage3_module_granularity_threshold)
    mark_leaf_parameters(model)
    explicit = zero.stage3_max_live_parameters
    rules = CoverRules(
        numel_max=None if explicit is None else explicit // LIVE_UNITS,
        persistence_numel=zero.stage3_param_persistence_threshold,
        compute_dtype=config.compute_dtype,
        live_numel_max=explicit,
        rule_of=trainable,
        whole_parameter_rules=whole_parameter_rules,
    )
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"model: a {type(model).__name__} runs no hooks when it is called, so its weights would not be fetched; "
            "pass torch.nn.Sequential(model), which calls it, or the model as it was before torch.jit"
        )
    for name, parameter in model.named_parameters():
        if id(parameter) in trainable and is_wrapper(parameter):
            raise ConfigError(
                f"parameter {name}: training a {type(parameter).__name__}, which wraps other tensors, is not "
                "available; call requires_grad_(False) on it and train adapters instead"
            )
    for leaf in leaves:
        p = leaf.parameter
        castable = rules.compute_dtype is not None and not is_packed(p) and p.is_floating_point()
        if id(p) in trainable and not castable and p.dtype not in TRAINABLE_DTYPES:
            raise ConfigError(
                f"parameter {leaf.names[0]}: training {p.dtype} weights is not available; use float32, bfloat16 or "
                'float16, or set "bf16" or "fp16": {"enabled": true}'
            )
    _refuse_shared_memory(leaves, trainable)
    return cover(model, leaves, trainable, rules)


def _refuse_shared_memory(leaves: list[Leaf], trainable: Mapping[int, int]) -> None:
    """Two parameters in the same memory are one weight in torch; here each would have a place and steps of its own."""
    leaf_at: dict[tuple[int, int], Leaf] = {}
    for leaf in leaves:
        p = leaf.parameter
        if not p.numel() or p.is_meta or p.layout != torch.strided or is_managed(p):
            continue
        first = leaf_at.setdefault((p.untyped_storage()._cdata, int(p.storage_offset())), leaf)
        if first is not leaf and (id(p) in trainable or id(first.parameter) in trainable):
            raise ConfigError(
                f"parameter {leaf.names[0]}: its memory is that of {first.names[0]}, so training would untie the two; "
                "make both names one nn.Parameter (b.weight = a.weight), or give it memory of its own (clone)"
            )
