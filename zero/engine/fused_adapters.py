"""LoRA adapters of peft, added to the weights while a model generates.

A token then costs one product per layer instead of three. Only the device copies that a generation keeps are altered.
Weights that are used in the memory that owns them, and streamed weights, are left alone: their adapters are computed as
usual. The copies are dropped afterwards. The trained weights never change, so nothing has to be subtracted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zero.assembly.run import Run
from zero.params.binding import BoundUnit
from zero.params.gathering import GatheredParameters
from zero.params.layout import Slot

LAYERS = "peft.tuners.lora.layer"


@contextmanager
def fused(run: Run) -> Iterator[None]:
    """Inside, adapters are added to the weight copies that a generation keeps. The generation has begun before."""
    parts = run.parts
    shared = {id(leaf.parameter) for leaf in parts.leaves if len(leaf.names) > 1}
    try:
        for layer in layers_of(run.module):
            weight = layer.get_base_layer().weight
            held = parts.keeper.bound_at(weight)
            if held is None or id(weight) in shared:
                continue  # the weight is cut into tiles, or other modules compute with it too
            if not _fuse(run, layer, *held):
                break  # the memory for kept copies is full
        yield
    finally:
        parts.coordinator.drop_altered()


def layers_of(model: nn.Module) -> list[Any]:
    """Linear layers with plain adapters that are active and not merged."""
    peft = sys.modules.get(LAYERS)
    if peft is None:
        return []
    return [module for module in model.modules() if isinstance(module, peft.Linear) and _is_plain(module)]


def _is_plain(layer: Any) -> bool:
    base = layer.get_base_layer()
    return (
        type(base) is nn.Linear
        and base.weight.is_floating_point()
        and not (layer.training or layer.merged or layer.disable_adapters or layer.lora_variant)
        and not any(layer.lora_bias.values())
        and any(name in layer.lora_A for name in layer.active_adapters)
    )


def _fuse(run: Run, layer: Any, bound: BoundUnit, slot: Slot) -> bool:
    """Add the layer's adapters to the copy of its weight. False: there is no kept copy, and nothing has changed."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    weights = [side[name].weight for name in names for side in (layer.lora_A, layer.lora_B)]
    delta = _delta_of(layer, names, weights)
    if not run.parts.coordinator.alter(bound.unit.index, partial(_unfuse, layer)):
        return False
    weight = bound.flat.data[slot.offset_numel : slot.end_numel].view(slot.shape)
    weight.add_(delta.to(weight))
    layer.merged_adapters = names
    return True


def _delta_of(layer: Any, names: Sequence[str], weights: list[Any]) -> torch.Tensor:
    with GatheredParameters(weights), torch.no_grad():
        deltas: list[torch.Tensor] = [layer.get_delta_weight(name) for name in names]
        return torch.stack(deltas).sum(0) if len(deltas) > 1 else deltas[0]


def _unfuse(layer: Any) -> None:
    layer.merged_adapters = []
