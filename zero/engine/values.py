"""The engine's methods that return copies of parameters, masters and states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zero.assembly.run import Run
from zero.assembly.steps import Steps
from zero.values.access import EngineKeeper
from zero.values.parameters import ParameterValues


class Values:
    def __init__(self, run: Run, steps: Steps) -> None:
        self._run, self._steps = run, steps

    def full_parameter(self, name: str) -> torch.Tensor:
        """A copy of one parameter's weights, in compute dtype, on the host."""
        return self._current(name).weights(name)

    def full_master(self, name: str) -> torch.Tensor:
        """A copy of one parameter's fp32 master, on the host."""
        return self._current(name).master(name)

    def full_state(self, name: str) -> dict[str, Any]:
        """Copies of one parameter's states (Adam: `exp_avg`, `exp_avg_sq`; fp32, host), and its `step` count.

        If the optimizer keeps further numbers of a parameter, they are included under their names.
        """
        keeper, updater = self._current(name), self._run.updater
        if updater is None:
            return {**keeper.moments(name), "step": 0}
        parts, parameter = self._run.parts, keeper.parameter(name)
        states: dict[str, Any] = dict(ParameterValues(parts, parts.exchange, parameter, updater).states())
        key = id(parameter)
        numbers = {what: scalar.value for what, scalar in updater.numbers(key).items()}
        return {**updater.made(key, states), **numbers, "step": updater.step_counts.get(key, 0)}

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, copy of the weights) of every parameter; a tied parameter occurs under each of its names."""
        self._steps.current("reading parameters")
        return self._run.parts.keeper.named_weights()

    def _current(self, name: str) -> EngineKeeper:
        """The keeper, after the parameter's update of the last step. Raises KeyError: no parameter has this name."""
        keeper = self._run.parts.keeper
        self._steps.current(f"reading {name}", keeper.units_named(name))
        return keeper
