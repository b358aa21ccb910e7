"""The assignment of layers to stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from offload.errors import ConfigError
from zero.pipe.specs import LayerSpec, trained_numel


def stage_bounds(layers: Sequence[Any], num_stages: int, method: str) -> list[int]:
    """Stage s has layers [bounds[s], bounds[s + 1]).

    Args:
        layers: specs, modules or callables.
        num_stages: at most the number of layers.
        method: what is balanced over the stages: "uniform": layers; "parameters": trained elements; "type:REGEX":
            layers whose class name matches.

    Raises:
        ConfigError: no such method, too few layers, or no matching class.
    """
    if not 1 <= num_stages <= len(layers):
        raise ConfigError(
            f"PipelineModule: num_stages: expected 1 to {len(layers)}, the number of layers, got {num_stages}"
        )
    kind = method.lower()
    if kind == "uniform":
        weights = [1] * len(layers)
    elif kind == "parameters":
        weights = [_numel(layer) for layer in layers]
    elif kind.startswith("type:"):
        pattern = re.compile(method.split(":", 1)[1], re.IGNORECASE)
        weights = [int(pattern.search(_class_name(layer)) is not None) for layer in layers]
        if not any(weights):
            raise ConfigError(
                f"PipelineModule: partition_method: no layer has a class whose name matches {pattern.pattern!r}"
            )
    else:
        raise ConfigError(
            f'PipelineModule: partition_method: expected "uniform", "parameters" or "type:REGEX", got {method!r}'
        )
    return balance_parts(weights, num_stages)


def balance_parts(weights: Sequence[int], parts: int) -> list[int]:
    """Bounds of `parts` non-empty runs, such that the weight of the heaviest run is minimal."""
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    count = len(weights)
    # heaviest[i]: the heaviest run in the best split of the first i layers into the parts so far; begins[part][i]: the
    # begin of the last run in this split.
    heaviest: list[float] = [0.0, *[float("inf")] * count]
    begins: list[list[int]] = []
    for _ in range(parts):
        now, begin = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for at in range(end):
                load = max(heaviest[at], float(sums[end] - sums[at]))
                if load < now[end]:
                    now[end], begin[end] = load, at
        heaviest = now
        begins.append(begin)
    bounds = [count]
    for begin in reversed(begins):
        bounds.insert(0, begin[bounds[0]])
    return bounds


def _numel(layer: Any) -> int:
    if isinstance(layer, LayerSpec):
        return layer.numel()
    return trained_numel(layer) if isinstance(layer, nn.Module) else 0


def _class_name(layer: Any) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")
