"""Quantize weights to codes one layer at a time, so the 16-bit model and all its codes are never in memory together.

Values are read from memory, from the place where `zero.Init` has put them, or from the checkpoint that
`load_pretrained` has referred them to.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from torch import nn

from offload.errors import ConfigError
from offload.memory.host_memory import trim_heap
from offload.sizes import format_bytes
from zero.config.quantization_block import Codes
from zero.params.gathering import GatheredParameters
from zero.params.quantized_weights import QuantizedLinear

logger = logging.getLogger("zero")


def quantize(
    model: nn.Module, rules: Mapping[str, Codes], trained: Callable[[nn.Parameter], bool] = lambda p: False
) -> list[str]:
    """Replace layers of the model by `QuantizedLinear`, in place.

    Layers whose weight another module uses too (an embedding) stay as they are.

    Args:
        model: before it has an engine.
        rules: part of a module's name -> how its weight is coded; the first match counts, "" matches all names.
        trained: True for a parameter that is to be trained.

    Returns:
        The names of the layers.

    Raises:
        ConfigError: a weight that a name selects is trained; a shape cannot be cut into groups; a name matches nothing.
            Names the layer. If a value cannot be coded, the layers before this one are already codes.
    """
    chosen = list(_layers_to_quantize(model, rules, trained))
    _check_names(rules, [name for name, _, _ in chosen])
    if not chosen:
        logger.warning(
            "weight_quantization: no weight is kept as codes: no nn.Linear that is not trained has a weight of its own "
            "whose shape the groups divide; choose another group_size"
        )
        return []
    before_bytes = after_bytes = 0
    for count, (name, linear, codes) in enumerate(chosen):
        before_bytes += linear.weight.numel() * linear.weight.element_size()
        with GatheredParameters(linear.weight):
            try:
                layer = QuantizedLinear.from_linear(linear, codes)
            except ConfigError as error:
                coded = (
                    f"; {count} layers before it have already been converted to codes, so build the model again"
                    if count
                    else ""
                )
                raise ConfigError(f"weight_quantization: {name}: {error}{coded}") from error
        parent, _, own = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, own, layer)
        if own == "base_layer" and hasattr(owner, "merge"):
            owner.__dict__["merge"] = partial(_refuse_merge, name)  # on this layer only, not on its class
        after_bytes += sum(
            p.numel() * p.element_size() for p in (layer.packed, layer.steps, layer.least) if p is not None
        )
        trim_heap()
    logger.info(
        "%d weights are kept as codes: %s instead of %s",
        len(chosen),
        format_bytes(after_bytes),
        format_bytes(before_bytes),
    )
    return [name for name, _, _ in chosen]


def _refuse_merge(name: str, *args: object, **options: object) -> None:
    raise ConfigError(
        f"merge: the weight of {name} is kept as codes, into which no adapter can be merged; save the adapter alone, "
        "and merge it into the model without weight_quantization"
    )


def _layers_to_quantize(
    model: nn.Module, rules: Mapping[str, Codes], trained: Callable[[nn.Parameter], bool]
) -> Iterator[tuple[str, nn.Linear, Codes]]:
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    wrapped = [f"{name}." for name, module in model.named_modules() if hasattr(module, "base_layer")]  # by peft
    for name, module in model.named_modules():
        rule = next((part for part in rules if part in name), None) if type(module) is nn.Linear else None
        if rule is None or owners[id(module.weight)] > 1 or not name:
            continue
        around = [wrapper for wrapper in wrapped if rule and rule in wrapper and name.startswith(wrapper)]
        if around and not any(name.startswith(f"{wrapper}base_layer") for wrapper in around):
            continue  # an adapter, whose name contains the name of its layer
        wrong = rules[rule].why_not(module.out_features, module.in_features)
        if trained(module.weight):
            if rule:
                raise ConfigError(
                    f"weight_quantization: {name}: its weight is trained, but codes cannot be trained; freeze it "
                    "(requires_grad_(False)) and train an adapter, or take it out of post_init_quant"
                )
        elif wrong and rule:
            raise ConfigError(
                f"weight_quantization: {name}: {wrong}; choose another group_size, or leave the layer out"
            )
        elif not wrong:
            yield name, module, rules[rule]


def _check_names(rules: Mapping[str, Codes], chosen: list[str]) -> None:
    unused = [part for part in rules if part and not any(part in name for name in chosen)]
    if unused:
        raise ConfigError(
            f"weight_quantization.post_init_quant: no nn.Linear with an unshared weight has {unused[0]!r} in its "
            "name; use names from model.named_modules(), or parts of them"
        )
