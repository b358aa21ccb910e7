"""Parameters as views into the flat buffer of their unit, bound to memory while in use."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from offload.accelerator import HOST
from offload.array.saved_views import version_of
from offload.memory.flat_storage import FlatStorage, Poison
from zero.params.layout import Slot, Unit
from zero.params.managed_parameter import drop_data_copy, is_data_written, watch
from zero.params.released_parameter import ParameterStore, assign_store, set_present, set_released, set_shard_view


class UnitBinding:
    """One unit's parameters and the flat storage that they are views of.

    Args:
        parameters: the model's parameter objects, in the order of `unit.slots`.
    """

    def __init__(self, unit: Unit, parameters: list[nn.Parameter], poison: Poison, device: torch.device) -> None:
        self.unit, self.parameters, self.poison = unit, parameters, poison
        self._versions, self._has_replaced_data = 0, False
        self._storage = self._home = self._new_storage(device)

    def _new_storage(self, device: torch.device) -> FlatStorage:
        cuts = [(slot.offset_numel, slot.shape) for slot in self.unit.slots]
        return FlatStorage(self.unit.numel, self.unit.dtype, cuts, self.poison, device)

    @property
    def is_bound(self) -> bool:
        """True while the values are present."""
        return self._storage.is_bound

    @property
    def binds_copy(self) -> bool:
        """True if the parameters see a copy of the memory that is bound; see `FlatStorage`."""
        return self._storage.copies_on_bind

    @property
    def flat(self) -> torch.Tensor:
        """The flat buffer, 1-D, `unit.numel` elements; poison unless bound."""
        return self._storage.flat

    @property
    def flat_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat buffer that its parameters see, and the one that views from before `bind_private_copy` see."""
        return self._storage.flat, self._home.flat

    def contains(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is a view of this unit."""
        return self._storage.is_base_of(tensor) or self._home.is_base_of(tensor)

    def adopt(self, slot: Slot, store: ParameterStore) -> None:
        """Turn one parameter into a released view of this unit; its old memory is freed."""
        parameter = self.parameters[slot.position]
        self._set_view(parameter, self._storage.views[slot.position])
        assign_store(parameter, store, slot.name, persistent=self.unit.persistent)
        self._release_parameter(parameter)

    @staticmethod
    def _set_view(parameter: nn.Parameter, view: torch.Tensor) -> None:
        set_present(parameter)
        with torch.no_grad():
            parameter.data = view

    def _release_parameter(self, parameter: nn.Parameter) -> None:
        set_shard_view(parameter)
        set_released(parameter)

    def leave_device(self, poison: Poison) -> None:
        """Make the released parameters views of `poison` on the host, so that nothing here refers to device memory.

        A bound unit stays as it is, and so does a parameter that has got other memory, such as the model's own.
        """
        if not self.is_bound:
            self.poison = poison
            self._home = self._new_storage(HOST)
            for parameter in self._switch_storage(self._home):
                self._release_parameter(parameter)

    def _switch_storage(self, storage: FlatStorage) -> list[nn.Parameter]:
        """Make the parameters views of `storage`, present ones. Returns them, without those with other memory."""
        previous, self._storage = self._storage, storage
        pairs = [pair for pair in zip(self.parameters, storage.views, strict=True) if previous.is_base_of(pair[0])]
        for parameter, view in pairs:
            self._set_view(parameter, view)
        return [parameter for parameter, _ in pairs]

    def bind(self, data: torch.Tensor, *, for_edit: bool = False) -> None:
        """Make the values in `data` (uint8, `unit.nbytes` long) the parameters' values. See `mark_present`."""
        self._storage.bind(data)
        self._drop_data_copies()
        self.mark_present(for_edit=for_edit)
        self._versions = self._count_versions()
        self._has_replaced_data = False

    def bind_private_copy(self, data: torch.Tensor) -> None:
        """Bind values for an editor, in a storage of their own; tensors that share it keep it afterwards.

        Views from before, such as those that autograd saved, see these values until then: they may be used inside.
        """
        self._switch_storage(self._new_storage(self.flat.device))
        self.bind(data, for_edit=True)
        self._home.bind_same_memory(self._storage)

    def unbind_private_copy(self) -> None:
        """Release the parameters and end `bind_private_copy`."""
        self._drop_data_copies()
        self._home.unbind(modified=False)
        self._switch_storage(self._home)
        self.mark_released()

    def mark_present(self, *, for_edit: bool = False) -> None:
        """Mark the bound parameters as present: a module call or an editor uses them, so accesses do not ask the store.

        Args:
            for_edit: an editor has gathered them, and compares all values afterwards.
        """
        for parameter in self.parameters:
            set_present(parameter, for_edit=for_edit)
            # A persistent unit is its own home: writes to it are kept without a comparison.
            if not self.unit.persistent and not for_edit:
                watch(parameter)

    def mark_released(self) -> None:
        """Mark the parameters as released, but keep the values: an access asks the store, which then notes the use."""
        for parameter in self.parameters:
            set_released(parameter)

    @property
    def is_modified(self) -> bool:
        """True if a parameter was modified since `bind`, in place or (see `recapture`) by replacing its `.data`."""
        return (
            self._has_replaced_data
            or self._count_versions() != self._versions
            or any(map(is_data_written, self.parameters))
        )

    @property
    def has_changes(self) -> bool:
        """True if `is_modified` is, or would be after `recapture`."""
        in_place = map(self._is_in_place, self.parameters, self._storage.views)
        return self.is_modified or not all(in_place)

    def recapture(self) -> list[str]:
        """Make parameters whose `.data` was replaced views of this unit again, and copy their new values into it.

        Returns:
            Messages about values that cannot be kept, because their shape has changed.
        """
        return recapture_all([self])

    def take_replaced_data(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[str]]:
        """The first half of `recapture`: (view, its new values) of each replaced `.data`, and the messages."""
        replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        refused: list[str] = []
        for slot, parameter, view in zip(self.unit.slots, self.parameters, self._storage.views, strict=True):
            if self._is_in_place(parameter, view):
                continue
            values, parameter.data = parameter.data, view
            if values.shape == view.shape:
                replaced.append((view, values))
            else:
                refused.append(
                    f"parameter {slot.name} was given .data of shape {tuple(values.shape)}, expected "
                    f"{tuple(slot.shape)}: parameters of an engine cannot change their size; resize before "
                    "zero.initialize (also inside zero.Init), or close the engine and initialize again"
                )
        self._has_replaced_data = self._has_replaced_data or bool(replaced)
        return replaced, refused

    def _is_in_place(self, parameter: nn.Parameter, view: torch.Tensor) -> bool:
        return (
            parameter.shape == view.shape
            and self._storage.is_base_of(parameter)
            and parameter.storage_offset() == view.storage_offset()
            and parameter.stride() == view.stride()
            and parameter.dtype == view.dtype
        )

    def _drop_data_copies(self) -> None:
        for parameter in self.parameters:
            drop_data_copy(parameter)

    def _count_versions(self) -> int:
        return sum(version_of(parameter) for parameter in self.parameters)

    def unbind(self, *, modified: bool = True) -> torch.Tensor:
        """Release the parameters; returns the memory that was bound. `modified`: they were written to."""
        self.mark_released()
        self._drop_data_copies()
        return self._storage.unbind(modified=modified)


def recapture_all(units: Iterable[UnitBinding]) -> list[str]:
    """`UnitBinding.recapture` of several units, which may have exchanged the `.data` of their parameters."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # else released parameters would ask their store
        results = [unit.take_replaced_data() for unit in units]
        # Read all before the first write: the new `.data` of one parameter may be the memory of another.
        for view, values in [(view, values.clone()) for replaced, _ in results for view, values in replaced]:
            view.data.copy_(values)
    return [message for _, refused in results for message in refused]
