"""Read and replace one parameter's exact values, optimizer states and gradient, whole or this rank's part.

Whole values are the same on all ranks, and all ranks call these methods together. This rank's own part is 1-D: the
elements in its shards of the parameter's units. It may be empty, since units are sharded, not parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from offload.errors import StateError
from offload.files.archives import bytes_of, bytes_tensor
from offload.kernels import masters
from zero.optim.gradients import Gradients
from zero.optim.optimizer import ExternalStateOptimizer
from zero.optim.small_states import SmallStates, gather_small_states
from zero.params.gathering import GatheredParameters
from zero.params.layout import Slot, Unit
from zero.params.released_parameter import name_of
from zero.plan.plan import Plan
from zero.plan.sub_group_state import SubGroupState
from zero.store.collectives import Collectives
from zero.store.stored_values import ParameterSlots
from zero.values.gradient_values import GradientValues
from zero.values.reader import ValueReader, join_runs, shard_runs
from zero.values.unit_editor import StateWriter, UnitEditor


class SlotRun(NamedTuple):
    """A part of a parameter that is in this rank's shard of one unit."""

    unit: Unit
    slot: Slot
    begin: int  # First element, counted from the slot's first.
    end: int


class StoredParameters(Protocol):
    """The engine's parameter store."""

    @property
    def slots(self) -> ParameterSlots: ...

    @property
    def reader(self) -> ValueReader: ...

    @property
    def editor(self) -> UnitEditor: ...

    def master(self, name: str) -> torch.Tensor: ...

    def moments(self, name: str) -> dict[str, torch.Tensor]: ...


class ValueParts(Protocol):
    """The parts of an engine that have values."""

    @property
    def parameter_store(self) -> StoredParameters: ...

    @property
    def gradients(self) -> Gradients: ...

    @property
    def plan(self) -> Plan: ...

    def small_states(self, names: Mapping[int, str]) -> dict[str, dict[str, torch.Tensor]]: ...


class ParameterValues:
    """Values of one parameter that an engine trains.

    `parts`: the engine's parts; every update of the last step is complete. `parameter`: managed by the engine.
    `optimizer`: has the small states; None: there are none.
    """

    def __init__(
        self,
        parts: ValueParts,
        collectives: Collectives,
        parameter: nn.Parameter,
        optimizer: ExternalStateOptimizer | None,
    ) -> None:
        self._parts, self._collectives, self._parameter = parts, collectives, parameter
        self._small_states = {} if optimizer is None else optimizer.small
        self._small_shapes = {} if optimizer is None else optimizer.small_shapes(parameter)
        self._name = name_of(parameter)
        self._slots = parts.parameter_store.slots[id(parameter)]
        self._gradients = GradientValues(parts.gradients, collectives)

    @property
    def is_trained(self) -> bool:
        return self._slots[0][0].trainable

    def master(self) -> torch.Tensor:
        """The whole fp32 value, on the host."""
        return self._parts.parameter_store.master(self._name)

    def states(self) -> dict[str, torch.Tensor]:
        """All whole optimizer states, on the host: in fp32, small ones in their own dtype."""
        if not self._small_shapes:
            return self._parts.parameter_store.moments(self._name)
        local_states = self._parts.small_states({id(self._parameter): self._name})
        small = gather_small_states(self._collectives, local_states).get(self._name, {})
        return {**self._parts.parameter_store.moments(self._name), **small}

    def state(self, key: str) -> torch.Tensor:
        """A whole optimizer state, fp32 on the host. Raises StateError: no state has this name."""
        states = self.states()
        if key not in states:
            raise self._unknown_state(key, states)
        return states[key]

    def master_shard(self) -> torch.Tensor:
        """This rank's part of the fp32 value, 1-D."""
        return self._read_shard(None)

    def state_shard(self, key: str) -> torch.Tensor:
        """This rank's part of an optimizer state, 1-D fp32. Raises StateError: no state has this name."""
        if key in self._small_shapes:
            local_states = self._parts.small_states({id(self._parameter): self._name})
            empty = torch.empty(0, dtype=torch.float32, device="cpu")
            return local_states.get(self._name, {}).get(key, empty).reshape(-1)
        return self._read_shard(self._state_number(key))

    def _state_number(self, key: str) -> int:
        names = self._parts.plan.states_of(self._slots[0][0])
        if key not in names:
            raise self._unknown_state(key, (*names, *self._small_shapes))
        return names.index(key)

    def _unknown_state(self, key: str, available: Iterable[str]) -> StateError:
        known = ", ".join(available)
        return StateError(f"parameter {self._name}: there is no optimizer state {key!r}; available: {known}")

    def _read_shard(self, state: int | None) -> torch.Tensor:
        """This rank's part of a state, by its number, or of the fp32 value (None)."""
        reader, runs = self._parts.parameter_store.reader.open_stored(reads_few=True), list(self._runs())
        parts = [torch.empty(run.end - run.begin, dtype=torch.float32, device="cpu") for run in runs]
        try:
            for run, part in zip(runs, parts, strict=True):
                begin, end = run.slot.first_numel + run.begin, run.slot.first_numel + run.end
                for piece in reader.pieces_of_slot(run.unit, run.slot, begin, end, True):
                    piece.copy_into(part, begin, state)
        finally:
            reader.close()
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")

    def _runs(self) -> Iterator[SlotRun]:
        placement = self._collectives.placement
        for unit, slot in self._slots:
            runs = shard_runs(placement, unit, slot, slot.first_numel, slot.first_numel + slot.numel)
            run = runs[placement.shard_index]
            if run.start < run.stop:
                yield SlotRun(unit, slot, run.start, run.stop)

    def gather_whole(self, part: torch.Tensor) -> torch.Tensor:
        """Join the parts of all ranks to the whole value. All ranks call this together."""
        out = torch.empty(self._parameter.shape, dtype=torch.float32, device="cpu")
        flat, placement = out.view(-1), self._collectives.placement
        message = bytes_of(part.detach().float().cpu().contiguous().view(torch.uint8))
        payloads = [bytes_tensor(payload) for payload in self._collectives.all_gather_bytes("own parts", message)]
        for unit, slot in self._slots:
            runs = shard_runs(placement, unit, slot, slot.first_numel, slot.first_numel + slot.numel)
            join_runs(placement, runs, payloads, [flat[slot.first_numel : slot.first_numel + slot.numel]])
        return out

    def gradient(self) -> torch.Tensor | None:
        """The whole gradient accumulated since the last step, the mean over ranks, fp32; None if there is none."""
        self._gradients.wait_in_flight()
        parts = [self._gradients.read(unit, slot) for unit, slot in self._slots]
        flat = _join(parts, [slot.numel for _, slot in self._slots])
        return None if flat is None else flat.view(self._parameter.shape)

    def gradient_norm(self) -> float | None:
        """The 2-norm of `gradient()`; None: it has to be read for that. All ranks call this together."""
        self._gradients.wait_in_flight()
        total = self._gradients.square_sum(self._slots)
        if total is None or total.nonfinite:  # torch tells inf from NaN
            return None
        return total.norm() * abs(self._gradients.factor_of(self._slots[0][1]))

    def apply_factor(self) -> None:
        """Multiply what this rank has accumulated by the factor that user code has applied to `.grad`."""
        self._gradients.wait_in_flight()
        for unit, slot in self._slots:
            self._gradients.apply_factor(unit, slot)
        self._gradients.drop_factor(self._slots[0][1])

    def gradient_shard(self) -> torch.Tensor | None:
        """This rank's part of the gradient, 1-D fp32; None if there is none."""
        self._gradients.wait_in_flight()
        runs = list(self._runs())
        parts = [self._gradients.read_shard(r.unit, r.slot, r.begin, r.end) for r in runs]
        return _join(parts, [run.end - run.begin for run in runs])

    def set_master(self, value: torch.Tensor) -> None:
        """Replace the value: the weights that forward uses, and the fp32 master. All ranks call this together."""
        flat, unit = self._check_shape(value).reshape(-1), self._slots[0][0]
        weights = torch.empty(flat.numel(), dtype=unit.dtype, device="cpu")
        remainders = None if unit.remainder is None else torch.empty(flat.numel(), dtype=unit.remainder, device="cpu")
        masters.split(weights, remainders, flat)
        with GatheredParameters([self._parameter], modifier_rank=0), torch.no_grad():
            self._parameter.copy_(weights.view(self._parameter.shape))
        if remainders is not None:
            self._rewrite_states(remainders, _write_remainder)

    def set_state(self, key: str, value: torch.Tensor) -> None:
        """Replace an optimizer state; `value` is whole or this rank's part."""
        if key in self._small_shapes:
            self._set_small_state(key, value)
            return
        number = self._state_number(key)

        def write(state: SubGroupState, lo: int, values: torch.Tensor) -> None:
            state.states.write(number, lo, values)

        self._rewrite_states(value.detach().float().cpu().reshape(-1), write)

    def _set_small_state(self, key: str, value: torch.Tensor) -> None:
        """Replace it on the ranks that have a part of the parameter; the others do not store it."""
        shape, dtype = self._small_shapes[key]
        has_part = any(True for _ in self._runs())
        if value.numel() != shape.numel() and (has_part or value.numel()):  # so that no rank goes on alone
            raise StateError(f"parameter {self._name}: {key}: expected shape {tuple(shape)}, got {tuple(value.shape)}")
        if not has_part:
            return
        small_states = self._small_states.setdefault(id(self._parameter), SmallStates())
        tensor = value.detach().to("cpu", dtype, copy=True).reshape(shape)
        small_states.tensors = {**small_states.tensors, key: tensor}

    def set_gradient(self, value: torch.Tensor) -> None:
        """Replace the gradient; `value` is whole or this rank's part, and is rounded to the gradients' dtype.

        All ranks call this together.
        """
        self._gradients.wait_in_flight()
        for unit, slot in self._slots:  # a rank may have accumulated gradients of another rank's shard
            self._gradients.drop_unreduced(unit, slot)
        for run, part in self._split_by_run(value):
            self._gradients.write_shard(run.unit, run.slot, run.begin, part)
        self._gradients.drop_factor(self._slots[0][1])

    def _rewrite_states(self, value: torch.Tensor, write: StateWriter) -> None:
        """Let `write` change this rank's optimizer states; `value` is whole or this rank's part."""
        for run, part in self._split_by_run(value):
            self._parts.parameter_store.editor.rewrite_states(run.unit, run.slot.offset_numel + run.begin, part, write)

    def _split_by_run(self, value: torch.Tensor) -> list[tuple[SlotRun, torch.Tensor]]:
        """(run, its part of `value`) for each run of this rank; `value` is whole or this rank's part."""
        if value.ndim > 1 and value.shape != self._parameter.shape:
            self._check_shape(value)
        flat, runs = value.detach().cpu().reshape(-1), list(self._runs())
        own_numel = sum(run.end - run.begin for run in runs)
        if flat.numel() == self._parameter.numel():
            return [(r, flat[r.slot.first_numel + r.begin : r.slot.first_numel + r.end]) for r in runs]
        if flat.numel() != own_numel:
            raise StateError(
                f"parameter {self._name}: expected {self._parameter.numel()} elements, or {own_numel} of this rank's "
                f"part, got {flat.numel()}"
            )
        return list(zip(runs, torch.split(flat, [run.end - run.begin for run in runs]), strict=True))

    def _check_shape(self, value: torch.Tensor) -> torch.Tensor:
        """`value` in fp32 on the host. Raises StateError: its shape is not the parameter's."""
        if value.shape != self._parameter.shape:
            raise StateError(
                f"parameter {self._name}: expected a value of shape {tuple(self._parameter.shape)}, got "
                f"{tuple(value.shape)}"
            )
        return value.detach().to("cpu", torch.float32).contiguous()


def _join(parts: Sequence[torch.Tensor | None], numels: Sequence[int]) -> torch.Tensor | None:
    """Parts of a gradient, one after the other, with zeros for those that are None; None if all of them are."""
    if parts and all(part is None for part in parts):
        return None
    zeros = (torch.zeros(numel, dtype=torch.float32, device="cpu") for numel in (0, *numels))
    return torch.cat([zero if part is None else part for zero, part in zip(zeros, (None, *parts), strict=True)])


def _write_remainder(state: SubGroupState, lo: int, values: torch.Tensor) -> None:
    if state.remainder is not None:
        state.remainder[lo : lo + values.numel()].copy_(values)
