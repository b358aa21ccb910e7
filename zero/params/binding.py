"""Parameters as views into flat units, bound to memory while in use."""

from __future__ import annotations

import torch
from torch import nn

from offload.accelerator import HOST
from offload.memory.flat_storage import FlatStorage, Poison
from offload.saved.saved_views import version_of
from zero.params.layout import Slot, Unit
from zero.params.released import Keeper, mark, set_present, set_released, show_shard
from zero.params.watched import forget, watch, written


class BoundUnit:
    """One unit's parameters and the flat storage they look into.

    Args:
        parameters: the model's parameter objects, in the order of `unit.slots`.
    """

    def __init__(self, unit: Unit, parameters: list[nn.Parameter], poison: Poison, device: torch.device) -> None:
        self.unit, self.parameters, self.poison = unit, parameters, poison
        self._versions, self._replaced = 0, False
        self._storage = self._look_at(poison, device)

    def _look_at(self, poison: Poison, device: torch.device) -> FlatStorage:
        cuts = [(slot.offset_numel, slot.shape) for slot in self.unit.slots]
        return FlatStorage(self.unit.numel, self.unit.dtype, cuts, poison, device)

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
        parameter = self.parameters[slot.position]
        self._turn(parameter, self._storage.views[slot.position])
        mark(parameter, keeper, slot.name, persistent=self.unit.persistent)
        self._hide(parameter)

    @staticmethod
    def _turn(parameter: nn.Parameter, view: torch.Tensor) -> None:
        set_present(parameter)
        with torch.no_grad():
            parameter.data = view

    def _hide(self, parameter: nn.Parameter) -> None:
        with self._storage.viewable():
            show_shard(parameter)
        set_released(parameter)

    def leave_device(self, poison: Poison) -> None:
        """Released parameters look at `poison` of the host from now on, and nothing here looks at the device any more.

        What was given another memory, such as the model's own, is left alone, and so is a unit that is bound.
        """
        if not self.bound:
            self.poison = poison
            self._look_elsewhere(HOST)

    def _look_elsewhere(self, device: torch.device) -> None:
        left, self._storage = self._storage, self._look_at(self.poison, device)
        for parameter, view in zip(self.parameters, self._storage.views, strict=True):
            if left.holds(parameter):
                self._turn(parameter, view)
                self._hide(parameter)

    def bind(self, data: torch.Tensor, *, edited: bool = False) -> None:
        """Make the values in `data` (uint8, `unit.nbytes` long) the parameters' values. See `show`."""
        self._storage.bind(data)
        self._forget_values()
        self.show(edited=edited)
        self._versions = self._count_versions()
        self._replaced = False

    def show(self, *, edited: bool = False) -> None:
        """The values are present, and a module that owns them is called, or an editor has them: no keeper is asked.

        Args:
            edited: by somebody who compares all values afterwards.
        """
        for parameter in self.parameters:
            set_present(parameter)
            # What is written to a persistent unit is where it stays.
            if not self.unit.persistent and not edited:
                watch(parameter)

    def hide(self) -> None:
        """The values are present by chance: whoever looks at them asks the keeper, so that the use is known."""
        for parameter in self.parameters:
            set_released(parameter)

    @property
    def modified(self) -> bool:
        """True if somebody has modified a parameter since `bind`, in place or (see `recapture`) its `.data`."""
        return self._replaced or self._count_versions() != self._versions or any(map(written, self.parameters))

    @property
    def differs(self) -> bool:
        """True if it is `modified`, or would be after `recapture`."""
        in_place = map(self._in_place, self.parameters, self._storage.views)
        return self.modified or not all(in_place)

    def recapture(self) -> list[str]:
        """Make parameters whose `.data` was replaced views of this unit again, with the values they were given.

        Returns:
            What cannot be kept, in words: another shape has no room here.
        """
        with torch._C.DisableTorchFunctionSubclass():  # no question to the keeper, if they are hidden
            return self._recapture()

    def _recapture(self) -> list[str]:
        given: list[tuple[torch.Tensor, torch.Tensor]] = []
        refused: list[str] = []
        for slot, parameter, view in zip(self.unit.slots, self.parameters, self._storage.views, strict=True):
            if self._in_place(parameter, view):
                continue
            values, parameter.data = parameter.data, view
            if values.shape == view.shape:
                given.append((view, values))
            else:
                refused.append(
                    f"parameter {slot.name} was given .data of shape {tuple(values.shape)}, expected "
                    f"{tuple(slot.shape)}: an engine's parameters keep their size; resize before zero.initialize "
                    "(inside zero.Init too), or close the engine and initialize again"
                )
        # All are read before the first is written: what one was given may be another's memory.
        copies = [(view, values.clone()) for view, values in given]
        with torch.no_grad():
            for view, values in copies:
                view.data.copy_(values)
        self._replaced = self._replaced or bool(copies)
        return refused

    def _in_place(self, parameter: nn.Parameter, view: torch.Tensor) -> bool:
        return (
            parameter.shape == view.shape
            and self._storage.holds(parameter)
            and parameter.storage_offset() == view.storage_offset()
            and parameter.stride() == view.stride()
            and parameter.dtype == view.dtype
        )

    def _forget_values(self) -> None:
        for parameter in self.parameters:
            forget(parameter)

    def _count_versions(self) -> int:
        return sum(version_of(parameter) for parameter in self.parameters)

    @property
    def lookers(self) -> int:
        """How many tensors look into the unit's memory, its own among them."""
        return int(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata))

    def leave_values(self) -> None:
        """Release the parameters, which look into another storage from now on: who else looks at the values has them.

        The memory that was bound is theirs.
        """
        self._forget_values()
        self._look_elsewhere(self.flat.device)

    def unbind(self) -> torch.Tensor:
        """Release the parameters; returns the memory that was bound."""
        self.hide()
        self._forget_values()
        return self._storage.unbind()
