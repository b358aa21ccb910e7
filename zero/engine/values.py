"""What an engine's users and its optimizer read of parameters: copies of weights, masters and states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offload.errors import BudgetError
from offload.sizes import format_bytes
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.model_changes import ModelChanges
from zero.assembly.run import Run
from zero.plan.machine import read_machine
from zero.values.engine_store import EngineParameterStore
from zero.values.parameter_values import ParameterValues

# Stage -> DeepSpeed's name for each param group's part of the fp32 values.
MASTERS = {
    1: "single_partition_of_fp32_groups",
    2: "single_partition_of_fp32_groups",
    3: "fp32_partitioned_groups_flat",
}


class Values:
    def __init__(self, run: Run, steps: EngineSteps) -> None:
        self._run, self._steps = run, steps

    def full_parameter(self, name: str) -> torch.Tensor:
        """See `ZeroEngine.full_parameter`."""
        return self._store_after_update(name).weights(name)

    def full_master(self, name: str) -> torch.Tensor:
        """See `ZeroEngine.full_master`."""
        return self._store_after_update(name).master(name)

    def full_state(self, name: str) -> dict[str, Any]:
        """See `ZeroEngine.full_state`."""
        store, updater = self._store_after_update(name), self._run.updater
        if updater is None:
            return {**store.moments(name), "step": 0}
        parts, parameter = self._run.parts, store.parameter(name)
        states: dict[str, Any] = dict(ParameterValues(parts, parts.collectives, parameter, updater).states())
        key = id(parameter)
        numbers = {what: scalar.value for what, scalar in updater.numbers(key).items()}
        return {**updater.visible_states(key, states), **numbers, "step": updater.step_counts.get(key, 0)}

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ZeroEngine.named_full_parameters`."""
        self._steps.complete_updates("reading parameters")
        return self._run.parts.parameter_store.named_weights()

    def _store_after_update(self, name: str) -> EngineParameterStore:
        """The store, after the parameter's update of the last step. Raises KeyError: no parameter has this name."""
        store = self._run.parts.parameter_store
        self._steps.complete_updates(f"reading {name}", store.units_of(name))
        return store


class EngineStates:
    """See `zero.optim.optimizer.KeptStates`."""

    def __init__(self, run: Run, steps: EngineSteps, changes: ModelChanges) -> None:
        self._values_of, self._device, self._check_open = steps.values_of, run.device, steps.check_open
        self._run, self._steps, self._changes = run, steps, changes

    def read_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of the states; all ranks call it together. Raises StorageError."""
        return self._values_of(parameter).states()

    def write_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace a state. Raises StorageError, StateError: there is no such state."""
        self._values_of(parameter, to_change=True).set_state(key, value)

    def check_room(self, nbytes: int) -> None:
        """Raise BudgetError if the host has fewer free bytes."""
        free = read_machine(self._device).available_bytes
        if nbytes > free:
            raise BudgetError(
                f"optimizer.state_dict: all optimizer states take {format_bytes(nbytes)}, and {format_bytes(free)} "
                "are free; save them with engine.save_checkpoint, which needs no copy, or read "
                "optimizer.state[parameter] one by one"
            )

    def check_open(self, what: str) -> None:
        """Raise StateError if the engine is closed or the arrays of the states hold other values now."""
        self._check_open(f"optimizer.{what}")

    def allocate_states(self, parameter: nn.Parameter | None = None) -> None:
        """Apply pending changes of the model: parameters that have joined a group have places for states then.

        Does not look for any if `parameter` has its places: to look for them is to walk through the whole model.
        """
        self._steps.make_ready("following changes of the model")
        places = [] if parameter is None else self._run.parts.parameter_store.slots.get(id(parameter), [])
        if not any(unit.trainable for unit, _ in places):
            self._changes.apply_pending()

    def masters_of(self, group: dict[str, Any]) -> torch.Tensor:
        """This rank's part of the fp32 values of a param group, 1-D, a copy."""
        parts = [self._values_of(parameter).master_shard() for parameter in group["params"]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")
