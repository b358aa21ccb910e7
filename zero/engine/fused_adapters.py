"""LoRA adapters of peft, added to the weights while a model generates.

A token then costs one product per layer instead of three. Only the device copies that a generation keeps are altered.
Weights that are used in the memory that owns them, and streamed weights, are left alone: their adapters are computed as
usual. While a generation rests the copies stay too, out of sight of the parameters: only the next call of `generate`
uses them, if the adapters are still the same. The trained weights never change, so nothing has to be subtracted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from zero.assembly.run import Run
from zero.params.binding import UnitBinding
from zero.params.gathering import GatheredParameters
from zero.params.layout import Slot

LAYERS = "peft.tuners.lora.layer"


class FusedAdapters:
    """The adapters in the copies of units, by unit: they are compared before a copy that has rested is used again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._inputs: dict[int, list[DeltaInputs]] = {}

    @contextmanager
    def fuse_all(self, *, keep_for_next: bool) -> Iterator[None]:
        """Inside, adapters are added to the weight copies that a generation keeps. The generation has begun before.

        `keep_for_next`: afterwards the copies stay for the next call.
        """
        coordinator = self._run.parts.coordinator
        try:
            for index, layers in self._by_unit().items():
                if not self._fuse_unit(index, layers):
                    break  # the memory for kept copies is full
            yield
            if keep_for_next:
                coordinator.park_altered()
        finally:
            coordinator.drop_altered()

    def _by_unit(self) -> dict[int, list[AdapterLayer]]:
        parts = self._run.parts
        shared = {id(leaf.parameter) for leaf in parts.leaves if len(leaf.names) > 1}
        found: dict[int, list[AdapterLayer]] = {}
        for layer in layers_of(self._run.module):
            weight = layer.get_base_layer().weight
            place = parts.parameter_store.binding_of(weight)
            if place is None or id(weight) in shared:
                continue  # the weight is cut into tiles, or other modules compute with it too
            binding, slot = place
            found.setdefault(binding.unit.index, []).append(AdapterLayer(layer, binding, slot))
        return found

    def _fuse_unit(self, index: int, adapter_layers: list[AdapterLayer]) -> bool:
        """Add the adapters of a unit's layers, or use the copy that has them. False: there is no kept copy."""
        coordinator, known = self._run.parts.coordinator, self._inputs.pop(index, [])
        is_same = coordinator.is_parked(index) and [each.inputs(self._run) for each in adapter_layers] == known
        if is_same and coordinator.resume_altered(index, adapter_layers):
            for each in adapter_layers:
                each.layer.merged_adapters = each.names
            self._inputs[index] = known
            return True
        deltas: list[DeltaInputs] = []
        self._inputs[index] = deltas
        return all(_fuse_layer(self._run, each, deltas) for each in adapter_layers)


@dataclass(frozen=True, eq=False)
class DeltaInputs:
    """What a layer's delta is made of: copies."""

    place: tuple[int, int]
    scaling: dict[str, float]
    weights: list[torch.Tensor]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeltaInputs) or (self.place, self.scaling) != (other.place, other.scaling):
            return False
        return all(torch.equal(a, b) for a, b in zip(self.weights, other.weights, strict=True))


class AdapterLayer(NamedTuple):
    """A layer with adapters, and where its weight is."""

    layer: Any
    binding: UnitBinding
    slot: Slot

    @property
    def names(self) -> list[str]:
        return [name for name in self.layer.active_adapters if name in self.layer.lora_A]

    @property
    def weights(self) -> list[Any]:
        layer = self.layer
        return [side[name].weight for name in self.names for side in (layer.lora_A, layer.lora_B)]

    def undo(self) -> None:
        self.layer.merged_adapters = []

    def inputs(self, run: Run) -> DeltaInputs:
        scaling = {name: self.layer.scaling[name] for name in self.names}
        copies = [_copy_of(run, weight) for weight in self.weights]
        return DeltaInputs((self.slot.offset_numel, self.slot.end_numel), scaling, copies)


def _copy_of(run: Run, weight: nn.Parameter) -> torch.Tensor:
    """Its values; out of the unit that the generation keeps, if it does."""
    place = run.parts.parameter_store.binding_of(weight)
    if place is not None and run.parts.coordinator.is_pinned_for_generation(place[0].unit.index):
        binding, slot = place
        return binding.flat.data[slot.offset_numel : slot.end_numel].view(slot.shape).clone()
    with GatheredParameters([weight]), torch.no_grad():
        return weight.detach().clone()


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


def _fuse_layer(run: Run, adapter_layer: AdapterLayer, delta_inputs: list[DeltaInputs]) -> bool:
    """Add the layer's adapters to the copy of its weight. False: there is no kept copy, and nothing has changed.

    `delta_inputs`: gets what the delta is made of.
    """
    layer, binding, slot = adapter_layer
    names = adapter_layer.names
    with GatheredParameters(adapter_layer.weights):
        delta_inputs.append(adapter_layer.inputs(run))
        delta = _delta_of(layer, names, adapter_layer.weights)
    if not run.parts.coordinator.fetch_to_alter(binding.unit.index, adapter_layer):
        return False
    weight = binding.flat.data[slot.offset_numel : slot.end_numel].view(slot.shape)
    weight.add_(delta.to(weight))
    layer.merged_adapters = names
    return True


def _delta_of(layer: Any, names: Sequence[str], weights: list[Any]) -> torch.Tensor:
    with GatheredParameters(weights), torch.no_grad():
        deltas: list[torch.Tensor] = [layer.get_delta_weight(name) for name in names]
        return torch.stack(deltas).sum(0) if len(deltas) > 1 else deltas[0]
