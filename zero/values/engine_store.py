"""The engine's parameter store: it handles access to values that are not present."""

from __future__ import annotations

import functools
import logging
from collections.abc import Container, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import StateError
from offload.system.interrupts import atomic
from zero.cache.coordinator import Coordinator
from zero.cache.expert_rows import ExpertRowFetcher
from zero.cache.hooks import ModuleHooks, in_backward
from zero.optim.gradients import Gradients
from zero.params.binding import UnitBinding
from zero.params.initial_store import InitialParameterStore
from zero.params.layout import Slot
from zero.params.quantized_weights import is_wrapper
from zero.params.released_parameter import LazyGradient, is_managed, name_of, remove_store
from zero.params.tiles import engine_store_of
from zero.values.parameter_values import ParameterValues
from zero.values.reader import ValueReader, shard_runs
from zero.values.unit_editor import UnitEditor

logger = logging.getLogger("zero")


@functools.cache
def warn_of_hidden_gradients() -> None:
    logger.warning(
        "p.grad is None in a pipeline, so torch.nn.utils.clip_grad_norm_ and the like do nothing: set "
        "gradient_clipping in the configuration, and read gradients with zero.utils.safe_get_full_grad"
    )


class EngineOwner(Protocol):
    """The engine itself."""

    def close(self) -> None: ...


class StoreCalls(Protocol):
    """What the engine does before the values of its parameters are read or changed."""

    @property
    def owner(self) -> EngineOwner: ...

    def make_ready_to_run(self, what: str) -> None:
        """Raise StateError if the engine is closed; on return weights are there and persistent units are bound."""

    def complete_updates(self, what: str, units: Iterable[int] | None = None) -> None:
        """Raise StateError if the engine is closed; else these units (None: all) have the last step's values."""

    def has_offloaded_states(self) -> bool:
        """`offload_states` has moved something away; no update is due."""

    def values_of(self, parameter: nn.Parameter, *, to_change: bool = False) -> ParameterValues:
        """A parameter's exact values."""

    def get_gradients(self) -> Gradients:
        """Those of the model as it is: it may change."""

    def loss_scale(self) -> float: ...


class EngineGradient:
    """See `AccumulatedGradient`.

    `index`: of the parameter in the layout; `device`: where its values are used.
    """

    def __init__(self, events: StoreCalls, parameter: nn.Parameter, index: int, device: torch.device) -> None:
        self._events, self._parameter, self._index = events, parameter, index
        self._device, self._is_missing = device, False  # `_is_missing`: no rank has a gradient.

    @property
    def epoch(self) -> int:
        return self._events.get_gradients().epoch

    def read(self) -> torch.Tensor | None:
        gradient = self._events.values_of(self._parameter).gradient()
        self._is_missing = gradient is None
        return None if gradient is None else (gradient / self._events.loss_scale()).to(self._device)

    def write(self, values: torch.Tensor) -> None:
        if self._is_missing and not values.any():
            return  # other parameters of the unit have gradients: this one stays without
        parameter_values = self._events.values_of(self._parameter, to_change=True)
        parameter_values.set_gradient(values.reshape(self._parameter.shape).float() * self._events.loss_scale())

    def scale(self, factor: float) -> None:
        factors = self._events.get_gradients().factors
        previous = factors.get(self._index, 1.0)
        factors[self._index] = factor if previous is None else previous * factor

    def norm(self) -> float | None:
        norm = self._events.values_of(self._parameter).gradient_norm()
        return None if norm is None else norm / self._events.loss_scale()

    def clear(self) -> None:
        self._events.get_gradients().factors[self._index] = None

    def lazy_gradient(self) -> torch.Tensor:
        return LazyGradient.for_parameter(self._parameter, self, self._device)


class EngineParameterStore:
    """Knows every parameter's unit and fetches its values.

    `rows`: fetches rows of packed experts; `partitions`: weights are sharded, see `ParameterStore.partitions`.

    Attributes:
        slots: of the model's parameters, one for each tile.
    """

    def __init__(
        self,
        events: StoreCalls,
        bindings: list[UnitBinding],
        coordinator: Coordinator,
        hooks: ModuleHooks,
        reader: ValueReader,
        editor: UnitEditor,
        rows: ExpertRowFetcher,
        *,
        partitions: bool = True,
    ) -> None:
        self.events, self.rows, self.partitions = events, rows, partitions
        self.reader, self.editor = reader, editor
        self._bindings = bindings
        self._coordinator = coordinator
        self._hooks = hooks
        # id(parameter, or weight of a tile) -> where it is bound.
        self._binding_of_id = {id(p): (b, s) for b in bindings for p, s in zip(b.parameters, b.unit.slots, strict=True)}
        self._parameters = parameters = reader.parameters
        self._dtype_of = {id(p): p.dtype for p in parameters}
        self.slots = reader.slots
        self._by_name: dict[str, nn.Parameter] = {}
        for binding in bindings:
            for slot in binding.unit.slots:
                self._by_name.update(dict.fromkeys(slot.names, parameters[slot.index]))

    @property
    def device(self) -> torch.device:
        return self._coordinator.device

    def copy_dtypes_from(self, other: EngineParameterStore) -> None:
        """Take over from `other` the dtypes that parameters originally had in the model."""
        self._dtype_of.update((key, dtype) for key, dtype in other._dtype_of.items() if key in self._dtype_of)

    def exact_values(self, name: str) -> torch.Tensor:
        """A copy of one parameter's values in its original dtype: if that was fp32, the fp32 master."""
        is_fp32 = self._dtype_of[id(self.parameter(name))] == torch.float32
        return self.master(name) if is_fp32 else self.weights(name)

    @property
    def keeps_saved_tensors(self) -> bool:
        """True inside a module's call or a backward, since the call's backward fetches the values again."""
        return in_backward() or self._hooks.in_call

    def binding_of(self, parameter: nn.Parameter) -> tuple[UnitBinding, Slot] | None:
        """Where the parameter is bound; None: it is in tiles, or it is not the engine's."""
        return self._binding_of_id.get(id(parameter))

    @atomic
    def fetch(self, parameter: nn.Parameter) -> None:
        """Fetch the values inside forward or backward; elsewhere raise an error with advice.

        Raises StateError: neither a forward nor a backward is running, or the engine is closed.
        """
        index = self._binding_of_id[id(parameter)][0].unit.index
        self.events.make_ready_to_run(f"parameter {name_of(parameter)}")
        if self.keeps_saved_tensors:
            self._hooks.begin_operation(index)
            return
        if not self._coordinator.is_bound(index):
            raise StateError(
                f"parameter {name_of(parameter)} (shape {tuple(parameter.shape)}) is released: its values are not on "
                "the device outside forward and backward; wrap the access in zero.GatheredParameters([parameter])"
            )
        self._coordinator.note_read(index)

    def accumulated_gradient(self, parameter: nn.Parameter) -> EngineGradient | None:
        """See `ParameterStore`. None in a stage of a pipeline, which has only some parameters; that is logged once."""
        slots, gradients = self.slots.get(id(parameter), []), self.events.get_gradients()
        if not any(gradients.has_gradient(unit, slot) for unit, slot in slots):
            return None
        if self.editor.is_stage:
            warn_of_hidden_gradients()
            return None
        return EngineGradient(self.events, parameter, slots[0][1].index, self.device)

    def on_operation_end(self, parameters: list[nn.Parameter], tensors: list[Any], result: Any) -> Any:
        """End the use that `fetch` began, unless more than the operation's result needs the values."""
        return self._hooks.end_operation(tensors, result)

    def shard_range(self, parameter: nn.Parameter) -> slice:
        """The part of the parameter in this rank's shard of its unit; it may be empty."""
        (binding, slot), placement = self._binding_of_id[id(parameter)], self.editor.placement
        runs = shard_runs(placement, binding.unit, slot, slot.first_numel, slot.first_numel + slot.numel)
        return runs[placement.shard_index]

    def shares_memory(self, parameter: nn.Parameter, tensor: torch.Tensor) -> bool:
        """True if `tensor` is a view of the parameter's unit."""
        return self._binding_of_id[id(parameter)][0].contains(tensor)

    @atomic
    def begin_gather(self, parameters: list[nn.Parameter]) -> None:
        """`GatheredParameters` begins."""
        units = self._units_of(parameters)
        self.events.complete_updates("GatheredParameters", units)
        self.editor.begin_edit(units)

    @atomic
    def end_gather(self, parameters: list[nn.Parameter], modifier_rank: int | None = None) -> None:
        """`GatheredParameters` ends."""
        self.editor.end_edit(self._units_of(parameters), modifier_rank)

    def unwrap_model(self, initial_store: InitialParameterStore | None = None) -> None:
        """Make every parameter an ordinary one with its values, and close the engine.

        `initial_store`: it gets the values instead, as if the model had just been built under `Init`.

        Raises StateError: the engine is closed already; the values are lost.
        """
        if not self.events.has_offloaded_states():  # else values can be read where they are, and no update is due
            self.events.complete_updates("taking the model back from the engine that keeps its values")
        self.restore_parameters(initial_store, closes=True)

    def warn_of_other_parameters(self, shared: nn.Parameter, wrapped: Container[int]) -> None:
        """Log that the engine ends though its model is not the one that is wrapped again."""
        other = next((name for name, p in self._by_name.items() if id(p) not in wrapped), None)
        if other is not None:
            logger.warning(
                "the engine of %s and %s closes, because another model with %s gets an engine; models that share "
                "parameters need one engine: put them into one module",
                name_of(shared),
                other,
                name_of(shared),
            )

    def restore_parameters(self, initial_store: InitialParameterStore | None = None, *, closes: bool = False) -> None:
        """Read the stored values, then close the engine if `closes`, then remove the parameters from this store.

        They become ordinary ones, or those of `initial_store`. A parameter that was fp32 in the model gets its fp32
        master, so nothing is rounded.
        """
        values: list[tuple[nn.Parameter, torch.Tensor]] = []
        stored: list[tuple[nn.Parameter, InitialParameterStore]] = []
        for slot in (slot for binding in self._bindings for slot in binding.unit.slots if slot.first_numel == 0):
            parameter = self._parameters[slot.index]
            if is_managed(parameter) and engine_store_of(parameter) is self:
                if initial_store is None or is_wrapper(parameter):
                    values.append((parameter, self.exact_values(slot.name)))
                else:
                    initial_store.store(parameter, self.exact_values(slot.name))
                    stored.append((parameter, initial_store))
        if closes:
            self.events.owner.close()
        for parameter, value in values:
            self.restore_parameter(parameter, value)
        for parameter, store in stored:
            remove_store(parameter)
            store.take_over(parameter)

    def restore_parameter(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Make it an ordinary parameter with these values."""
        remove_store(parameter)
        with torch.no_grad():
            parameter.data = value

    def parameter(self, name: str) -> nn.Parameter:
        """Raises KeyError: the model has none of this name."""
        if name not in self._by_name:
            raise KeyError(f"the model has no parameter named {name!r}")
        return self._by_name[name]

    def units_of(self, name: str) -> list[int]:
        """The unit of a parameter, or the units of its tiles. Raises KeyError."""
        return [unit.index for unit, _ in self.slots[id(self.parameter(name))]]

    def weights(self, name: str) -> torch.Tensor:
        """A copy of one parameter's weights, in compute dtype, on the host."""
        return self.reader.weights(self.parameter(name))

    def master(self, name: str) -> torch.Tensor:
        """A copy of one parameter's fp32 master, on the host."""
        return self.reader.master(self.parameter(name))

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """Copies of one parameter's states by name. Raises StateError: it is not trained."""
        parameter = self.parameter(name)
        if not self.slots[id(parameter)][0][0].trainable:
            raise StateError(f"parameter {name} is not trained by this engine, so it has no optimizer state")
        return self.reader.states(parameter)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, copy of the weights); one unit or tiled parameter in memory at a time; tied ones under each name."""
        for binding in self._bindings:
            flat = self.reader.read_unit(binding.unit).view(binding.unit.dtype)
            for slot in binding.unit.slots:
                tiled = len(self.slots[id(self._parameters[slot.index])]) > 1
                if tiled and slot.first_numel:
                    continue  # the first tile has yielded the whole parameter
                for name in slot.names:
                    yield name, self.weights(name) if tiled else self._slot_values(flat, slot)

    def _slot_values(self, flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        return flat[slot.offset_numel : slot.end_numel].clone().view(slot.shape)

    def _units_of(self, parameters: list[nn.Parameter]) -> list[int]:
        return sorted({self._binding_of_id[id(p)][0].unit.index for p in parameters})


def unwrap_parameters(parameters: Iterable[nn.Parameter], except_store: EngineParameterStore | None = None) -> None:
    """Before a model is wrapped again: unwrap the models whose engines have some of its parameters.

    `except_store`: its parameters stay in it.
    """
    wrapped = {id(parameter): parameter for parameter in parameters}
    for parameter in wrapped.values():
        if is_managed(parameter):
            store = engine_store_of(parameter)
            if isinstance(store, EngineParameterStore) and store is not except_store:
                store.warn_of_other_parameters(parameter, wrapped)
                store.unwrap_model()
