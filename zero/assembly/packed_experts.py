"""Packed experts of transformers, fetched by rows: an experts implementation that wraps the model's own.

Transformers keeps a layer's experts in 3-D parameters, and the config chooses the function that computes with them
(`ALL_EXPERTS_FUNCTIONS`). Ours fetches the rows of the experts that the router has chosen, renumbers them and passes
them to the function that the config had chosen before, as if the layer had no other experts. So the arithmetic is
unchanged, and only chosen experts are transferred. Code without this dispatch uses the parameters directly and gets all
of their rows; `engine.statistics().whole_experts_by_unit` counts these cases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero.cache.expert_rows import ExpertRowFetcher
from zero.params.released_parameter import is_managed, store_of
from zero.params.units import packed_experts
from zero.values.engine_store import EngineParameterStore

PREFIX = "zero:"  # Ours are called "zero:eager", "zero:grouped_mm" and so on; the second part names the wrapped one.


class RoutedExperts:
    """Stands for a layer's experts module, but has only the chosen experts.

    Args:
        module: the layer's experts module; all other attributes are read from it.
        tensors: name -> rows of that parameter.
        count: number of chosen experts.
    """

    def __init__(self, module: nn.Module, tensors: dict[str, torch.Tensor], count: int) -> None:
        self.__dict__.update(tensors, _module=module, num_experts=count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class PackedExpertDispatch:
    """Has a model's packed experts fetched by rows, where transformers dispatches them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changed: list[tuple[Any, Any]] = []  # Configs, and the implementations that they had before.

    def install(self) -> None:
        integration: Any = sys.modules.get("transformers.integrations.moe")
        functions: Any = getattr(integration, "ALL_EXPERTS_FUNCTIONS", None)
        for module in self._model.modules() if functions is not None else ():
            config: Any = getattr(module, "config", None)
            if not (packed_experts(module) and is_dispatched(module) and hasattr(config, "_experts_implementation")):
                continue
            inner = config._experts_implementation
            if str(inner).startswith(PREFIX):
                continue  # another layer with the same config
            name = f"{PREFIX}{inner or 'eager'}"
            functions.register(name, _routed_implementation(str(inner or "eager"), functions))
            config._experts_implementation_internal = name
            self._changed.append((config, inner))

    def remove(self) -> None:
        for config, inner in self._changed:
            if str(config._experts_implementation).startswith(PREFIX):
                config._experts_implementation_internal = inner
        self._changed.clear()


def is_dispatched(module: nn.Module) -> bool:
    """True if the module's class is decorated with `use_experts_implementation`."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed")) and hasattr(
        type(module).forward, "__wrapped__"
    )


def _routed_implementation(inner: str, functions: Any) -> Callable[..., torch.Tensor]:
    def routed(
        self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        own: Any = type(self).forward
        compute = functions.get_interface(inner, own.__wrapped__)
        # dict.items, not module.weight: reading the attribute would fetch the whole parameter.
        parameters = {name: p for name, p in self._parameters.items() if p is not None}
        lender = _row_fetcher_of(parameters)
        fetched = {name: p for name, p in parameters.items() if lender is not None and lender.can_fetch(p)}
        if lender is None or not fetched:
            result: torch.Tensor = compute(self, hidden_states, top_k_index, top_k_weights)
            return result
        count = packed_experts(self)
        chosen: torch.Tensor = top_k_index.unique()  # type: ignore[no-untyped-call]
        rows = tuple(chosen[chosen < count].tolist()) or (0,)  # numbers past the last expert mean "elsewhere"
        numbers = torch.tensor(rows, device=top_k_index.device)
        place = torch.full((count + 1,), len(rows), dtype=top_k_index.dtype, device=top_k_index.device)
        place[numbers] = torch.arange(len(rows), dtype=place.dtype, device=place.device)

        def with_rows(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            always = {name: getattr(self, name)[numbers] for name in parameters.keys() - fetched.keys()}
            experts = RoutedExperts(self, {**always, **tensors}, len(rows))
            output: torch.Tensor = compute(experts, hidden_states, place[top_k_index.clamp(max=count)], top_k_weights)
            return output

        return lender.run_with_rows(fetched, rows, with_rows)  # type: ignore[no-any-return]

    return routed


def _row_fetcher_of(parameters: dict[str, nn.Parameter]) -> ExpertRowFetcher | None:
    """The engine's lender of these parameters' rows; None outside an engine."""
    for parameter in parameters.values():
        store = store_of(parameter) if is_managed(parameter) else None
        if isinstance(store, EngineParameterStore):
            return store.rows
    return None
