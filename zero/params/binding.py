"""Parameters as views into flat units, bound to memory while in use."""

from __future__ import annotations

import torch
from torch import nn

from offload.binding import FlatStorage, Poison
from zero.params.layout import Slot, Unit
from zero.params.released import Keeper, mark, set_present, set_released


class BoundUnit:
    """One unit's parameters and the flat storage they look into.

    Args:
        parameters: the model's parameter objects, in the order of `unit.slots`.
    """

    def __init__(self, unit: Unit, parameters: list[nn.Parameter], poison: Poison, device: torch.device) -> None:
        self.unit, self.parameters = unit, parameters
        self._versions = 0
        cuts = [(slot.offset_numel, slot.shape) for slot in unit.slots]
        self._storage = FlatStorage(unit.numel, unit.dtype, cuts, poison, device)

    @property
    def bound(self) -> bool:
        """True while the values are present."""
        return self._storage.bound

    @property
    def flat(self) -> torch.Tensor:
        """The flat unit, 1-D, `unit.numel` elements; poison unless bound."""
        return self._storage.flat

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is a view of this unit."""
        return self._storage.holds(tensor)

    def adopt(self, slot: Slot, keeper: Keeper) -> None:
        """Turn one parameter into a released view of this unit; its old memory is let go."""
        position = self.unit.slots.index(slot)
        parameter = self.parameters[position]
        set_present(parameter)
        with torch.no_grad():
            parameter.data = self._storage.views[position]
        mark(parameter, keeper, slot.name)
        set_released(parameter)

    def bind(self, data: torch.Tensor) -> None:
        """Make the values in `data` (uint8, `unit.nbytes` long) the parameters' values."""
        self._storage.bind(data)
        for parameter in self.parameters:
            set_present(parameter)
        self._versions = self._count_versions()

    @property
    def modified(self) -> bool:
        """True if somebody has modified a parameter in place since `bind`."""
        return self._count_versions() != self._versions

    def _count_versions(self) -> int:
        return sum(parameter._version for parameter in self.parameters)

    def unbind(self) -> torch.Tensor:
        """Release the parameters; returns the memory that was bound."""
        for parameter in self.parameters:
            set_released(parameter)
        return self._storage.unbind()
