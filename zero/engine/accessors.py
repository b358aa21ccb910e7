"""What the engine answers about the values it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zero.assembly.assembly import Assembly
from zero.exchange.exchange import Exchange
from zero.params.released import name_of
from zero.values.access import EngineKeeper
from zero.values.parameters import ParameterValues


class ValueAccessors:
    """Mixed into the engine, which sets `_keeper` and `updater`."""

    _keeper: EngineKeeper
    _parts: Assembly
    exchange: Exchange
    updater: Any

    def current(self, what: str, units: Iterable[int] | None = None) -> None:
        """Wait until these units are as of the last step; the engine's."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Learning rate of each param group."""
        groups = self.updater.param_groups if self.updater is not None else []
        return [float(group["lr"]) for group in groups]

    def full_parameter(self, name: str) -> torch.Tensor:
        """A copy of one parameter's weights, in compute dtype, on the host."""
        self.current(f"reading {name}", self._keeper.units_named(name))
        return self._keeper.weights(name)

    def full_master(self, name: str) -> torch.Tensor:
        """A copy of one parameter's fp32 master, on the host."""
        self.current(f"reading {name}", self._keeper.units_named(name))
        return self._keeper.master(name)

    def full_state(self, name: str) -> dict[str, Any]:
        """Copies of one parameter's states (Adam: `exp_avg`, `exp_avg_sq`; fp32, host), and its `step` count.

        An optimizer that keeps further numbers of a parameter has them here too, under their names.
        """
        self.current(f"reading {name}", self._keeper.units_named(name))
        states: dict[str, Any] = dict(self._keeper.moments(name))
        if self.updater is None:
            return {**states, "step": 0}
        key = id(self._keeper.parameter(name))
        numbers = {what: scalar.value for what, scalar in self.updater.numbers(key).items()}
        return {**self.updater.made(key, states), **numbers, "step": self.updater.step_counts.get(key, 0)}

    def values_of(self, parameter: nn.Parameter, *, to_change: bool = False) -> ParameterValues:
        """A parameter's exact values, states and gradient as of the last step, for `zero.utils.safe_get_full_grad` etc.

        Args:
            parameter: of the model.
            to_change: they are going to be replaced: what was done ahead with them is void.

        Raises:
            StateError: the engine is closed, or a forward or backward runs.
            StorageError: the last step could not be completed.
        """
        units = self._keeper.units_named(name_of(parameter))
        self.current(f"values of {name_of(parameter)}", units)
        if to_change:
            self._keeper.before_change(units)
        return ParameterValues(self._parts, self.exchange, parameter)

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, copy of the weights) of every parameter; tied ones under each of their names."""
        self.current("reading parameters")
        return self._keeper.named_weights()
