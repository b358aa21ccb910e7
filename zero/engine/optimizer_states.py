"""The states of an engine's parameters for its optimizer object, and this rank's part of the fp32 values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.errors import BudgetError
from offload.sizes import format_bytes
from zero.assembly.model_changes import ModelChanges
from zero.assembly.run import Run
from zero.assembly.steps import Steps
from zero.plan.machine import read_machine

# Stage -> DeepSpeed's name for each param group's part of the fp32 values.
MASTERS = {
    1: "single_partition_of_fp32_groups",
    2: "single_partition_of_fp32_groups",
    3: "fp32_partitioned_groups_flat",
}


class EngineStates:
    """See `zero.optim.optimizer.KeptStates`."""

    def __init__(self, run: Run, steps: Steps, changes: ModelChanges) -> None:
        self._values_of, self._device, self._check_open = steps.values_of, run.device, steps.check_open
        self._steps, self._changes = steps, changes

    def read(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of the states; all ranks call it together. Raises StorageError."""
        return self._values_of(parameter).states()

    def write(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
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
        """Raise StateError if the engine is closed or the planes of the states hold other values now."""
        self._check_open(f"optimizer.{what}")

    def follow_changes(self) -> None:
        """Apply pending changes of the model: parameters that have joined a group have places for states then."""
        self._steps.ready("following changes of the model")
        self._changes.follow()

    def masters_of(self, group: dict[str, Any]) -> torch.Tensor:
        """This rank's part of the fp32 values of a param group, 1-D, a copy."""
        parts = [self._values_of(parameter).own_master() for parameter in group["params"]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")
