"""States of parameters whose memory belongs to user code: their tiered arrays, and the pipeline that updates them.

Optimizer states are in host memory or on NVMe, as an engine's are, and the same pipeline updates them. Only weights and
gradients have no homes of their own: during a job their arrays are views of the parameters' memory and of `.grad`.

[Note: a step that fails] The step counts as taken, even if something fails: the remaining work is kept, with the
gradients that the step began with. The only possible calls for these states are to finish the step or to load others.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from offload.array.tiered_array import Home, TieredArray
from offload.errors import ConfigError, StateError, StorageError, ZeroInfinityError
from offload.io.io_loop import IoFuture
from offload.kernels import masters
from offload.kernels.threads import kernel_threads, update_threads
from offload.streams import shares_host_memory
from zero.config import Config
from zero.optim.gradients import Gradients, StepGradient
from zero.optim.pending_updates import PendingUpdates
from zero.optim.rules import Rule, Rules, UpdateRun
from zero.optim.sub_group_pipeline import StepArguments, SubGroupPipeline
from zero.params.layout import Unit
from zero.plan.machine import machine_to_plan
from zero.plan.plan import Plan
from zero.plan.planner import lay_out_tensors, plan_states
from zero.store.collectives import Collectives
from zero.store.staging import StagedSubGroup
from zero.store.storage import Storage
from zero.store.stored_values import StoredValues

MASTER = "master"  # Name of the fp32 value among the states of a 16-bit parameter.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EDITS_NUMEL = 1 << 18  # Elements that are searched for edits at a time.


@dataclass(frozen=True, slots=True)
class UnfinishedStep:
    """The remaining work of a step."""

    updates: PendingUpdates
    gradients: Mapping[int, StepGradient]  # Index of the unit -> its gradient.


class _StepGradients:
    """The part of an engine's `Gradients` that the pipeline uses."""

    def __init__(self) -> None:
        self.by_unit: Mapping[int, StepGradient] = {}

    def step_gradient(self, index: int) -> StepGradient:
        return self.by_unit[index]


class _EditAwareRule:
    """A rule whose fp16 weights may have been edited since the last step: an edited weight becomes its own master.

    A bf16 weight and its remainder always make a master that rounds to the weight. For an fp16 weight the full master
    is stored, and would undo an edit.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.is_broken = False  # An update stopped amid its elements: the step can neither be finished nor repeated.

    def update_run(self, run: UpdateRun, grad_scale: float, threads: int) -> None:
        try:
            if run.master is not None and run.master.dtype == torch.float32:
                _apply_edits(run.weight, run.master)
            self._rule.update_run(run, grad_scale, threads)
        except BaseException:  # also if the error of another update hides this one
            self.is_broken = True
            raise


class ParameterStates:
    """The states of some parameters of one device.

    Raises ConfigError: a parameter cannot be updated here; names it. Raises BudgetError: the states have no room.
    Raises StorageError: the swap space cannot be reserved.

    Args:
        parameters: (index, name, parameter); the values of a step have the same indices.
        rules: exactly one rule, which updates them.
        config: its `offload_optimizer` and `aio` are used.
    """

    def __init__(self, parameters: Sequence[tuple[int, str, Tensor]], rules: Rules, config: Config) -> None:
        self.parameters = {index: parameter for index, _, parameter in parameters}
        (rule,) = rules.each
        local = [(index, name, _check_parameter(name, parameter, rule)) for index, name, parameter in parameters]
        self.device = local[0][2].device
        self.layout = lay_out_tensors(local, whole_parameters=rule.needs_whole_parameters)
        self.plan: Plan = plan_states(self.layout, config, machine_to_plan(self.device), self.device, rules.states)
        self.storage = Storage(self.layout, self.plan, config, self.device)
        self._units = {unit.slots[0].index: unit for unit in self.layout.units}
        self._memory_orders = {index: _memory_order(tensor) for index, _, tensor in local}
        self._gradients = _StepGradients()
        self._rule = _EditAwareRule(rule)
        self._pipeline = SubGroupPipeline(
            self.layout, self.storage, cast(Gradients, self._gradients), Rules((cast(Rule, self._rule),))
        )
        places = {id(self.parameters[unit.slots[0].index]): [(unit, unit.slots[0])] for unit in self.layout.units}
        self._stored_values = StoredValues(self.layout, self.storage, places)
        on_cpu = shares_host_memory(self.device)
        self._threads = update_threads(self.layout.numel, kernel_threads(on_cpu=on_cpu))
        self._future: IoFuture[Any] | None = None
        self.unfinished_step: UnfinishedStep | None = None  # The remaining work of a step that has failed.

    # ---- steps ---------------------------------------------------------------------------------

    def prepare_step(self, arguments: StepArguments, gradients: Mapping[int, Tensor]) -> UnfinishedStep:
        """The work of a step for these states; nothing has changed when this returns or raises.

        `arguments`: of the step; `gradients`: by the parameters' indices. Raises StateError: a gradient or a parameter
        does not fit the states that were made for it; names it.
        """
        self._weight_homes()
        homes: list[list[Home]] = [[] for _ in self.layout.spaces]
        for unit in self.layout.units:
            gradient = gradients.get(unit.slots[0].index)
            if gradient is not None:
                run = self._gradient_of(unit, local_of(gradient))
                homes[self.layout.space_of(unit)].append(Home(unit.begin, unit.end, run.view(torch.uint8)))
        arrays = self._arrays_over("gradients", homes)
        step_gradients = {
            unit.index: StepGradient(arrays[self.layout.space_of(unit)], unit.dtype) for unit in self.layout.units
        }
        due = [group for group in self.plan.sub_groups if self._pipeline.trained_units(group, arguments)]
        arguments = replace(arguments, event=self.storage.streams.record_event())
        updates = PendingUpdates(self.layout, self.storage, self._pipeline, Collectives(), self._threads)
        updates.begin_step(arguments, due)
        return UnfinishedStep(updates, step_gradients)

    @property
    def is_broken(self) -> bool:
        """The step cannot be finished any more."""
        return self.unfinished_step is not None and self._rule.is_broken

    def finish_step(self) -> None:
        """Do the remaining work of the step. Raises StorageError: a read or a write failed; work not done remains."""
        remaining = self.unfinished_step
        if remaining is None:
            return
        try:
            self._run_job("optimizer step", partial(self._finish_updates, remaining))
        finally:
            # So that autograd refuses a graph from before, whose weights are overwritten.
            for index in self._units.keys() & remaining.updates.arguments.values.keys():
                torch.autograd.graph.increment_version(local_of(self.parameters[index]))
        self.unfinished_step = None

    async def _finish_updates(self, remaining: UnfinishedStep) -> None:
        self._gradients.by_unit = remaining.gradients
        updates = remaining.updates
        try:
            await self.storage.retry_failed_writes()
        except StorageError as error:
            raise error.within(f"update of step {updates.arguments.number}") from error
        await updates.retry_writes()
        try:
            await updates.finish_groups(updates.groups_of(None))
        except ZeroInfinityError:  # a read or write failed, and can be repeated
            raise
        except BaseException:
            self._rule.is_broken = True
            raise

    def drop_step(self) -> None:
        """Weights and states are about to be replaced: nothing of the step remains."""
        self.unfinished_step = None
        self._rule.is_broken = False

    # ---- states --------------------------------------------------------------------------------

    def read_states(self, indices: Sequence[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """(index, copies of its states by name) for each parameter: fp32 on the host, else of the parameter's form.

        They come in storage order. Raises StorageError.
        """
        ordered = sorted(indices, key=self._storage_position)
        self._drop_views()
        self._view_weights()
        try:
            for index in ordered:
                yield index, self._read_parameter(index)
        finally:
            self._stored_values.close()
            self._drop_views()

    def _storage_position(self, index: int) -> tuple[int, int]:
        unit = self._units.get(index)
        return (-1, 0) if unit is None else (self.layout.space_of(unit), unit.begin)

    def _read_parameter(self, index: int) -> dict[str, Tensor]:
        parameter = self.parameters[index].detach()
        names = [*self.plan.states[0], *([MASTER] if parameter.dtype != torch.float32 else [])]
        states = {name: torch.empty_like(parameter, dtype=torch.float32, device="cpu") for name in names}
        unit = self._units.get(index)
        if unit is None:
            return states
        flat_states = {name: _require_flat_view(local_of(values)) for name, values in states.items()}
        for piece in self._stored_values.pieces_of_slot(unit, unit.slots[0], 0, unit.numel, True):
            part = slice(piece.first, piece.first + piece.weight.numel())
            for name, values in zip(self.plan.states[0], piece.states or (), strict=True):
                flat_states[name][part] = values
            if piece.remainder is not None:
                weight, remainder = piece.weight.cpu(), piece.remainder.cpu().clone()
                _apply_edits(weight, remainder)
                masters.join(flat_states[MASTER][part], weight, remainder)
        return states

    def write_states(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replace all states of parameters: index -> states by name, as from `read_states`; missing states become zero.

        Without a master the weight becomes its own master. The caller has called `check_state`.

        Raises StorageError: a read or a write failed; some states are new and others are not.
        """
        flat_states = {
            unit.index: {
                name: partial(self._elements_like, index, local_of(value)) for name, value in states[index].items()
            }
            for index, unit in self._units.items()
            if index in states
        }
        if flat_states:
            self._run_job("loading states", partial(self._write_groups, flat_states))

    async def _write_groups(self, flat_states: Mapping[int, Mapping[str, Callable[[], Tensor]]]) -> None:
        await self.storage.retry_failed_writes()
        for group in self.plan.sub_groups:
            units = [unit for unit in self.layout.units_in(group) if unit.index in flat_states]
            if not units:
                continue
            staged = StagedSubGroup(self.storage, self.layout, group, units=())
            async with staged.open("optimizer state"):
                for unit in units:
                    self._put_states(staged, unit, flat_states[unit.index])
                await staged.state.write()

    def _put_states(self, staged: StagedSubGroup, unit: Unit, flat_states: Mapping[str, Callable[[], Tensor]]) -> None:
        """Put the states of a part of a unit into the sub-group's optimizer state."""
        state, (begin, end) = staged.state_view(), staged.group.range_in(unit)
        at, part = begin - staged.group.begin, slice(begin - unit.begin, end - unit.begin)
        for which, name in enumerate(self.plan.states[0]):
            run = flat_states.get(name)
            values = (
                torch.zeros(end - begin, dtype=torch.float32, device="cpu")
                if run is None
                else run()[part].to("cpu", torch.float32)
            )
            state.states.write(which, at, values)
        if state.remainder is not None:
            run = flat_states.get(MASTER)
            weight = _require_flat_view(local_of(self.parameters[unit.slots[0].index]))
            master = (weight if run is None else run())[part].to("cpu", torch.float32)
            masters.split(torch.empty_like(master, dtype=unit.dtype), state.remainder[at : at + end - begin], master)

    def check_state(self, index: int, name: str, value: Tensor) -> None:
        """Raise ConfigError if a state is not of its parameter's shape, or not sharded as the parameter is."""
        parameter = self.parameters[index]
        local, own = local_of(value), local_of(parameter)
        if value.shape != parameter.shape or local.shape != own.shape:
            raise ConfigError(
                f"load_state_dict: {name} of {self._name_of(index)}: expected {tuple(parameter.shape)}, of which "
                f"{tuple(own.shape)} are here, got {tuple(value.shape)} and {tuple(local.shape)}; load sharded states "
                "with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )

    def _elements_like(self, index: int, value: Tensor) -> Tensor:
        """The elements of a local tensor in the memory order of the parameter's elements."""
        own = local_of(self.parameters[index])
        run = flat_view(value) if has_same_order(value, own) else None
        return (
            _require_flat_view(torch.empty_like(own, dtype=value.dtype, device="cpu").copy_(value))
            if run is None
            else run
        )

    # ---- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything. Idempotent."""
        self.drop_step()
        self._stored_values.close()
        self.storage.close()

    # ---- weights and gradients -----------------------------------------------------------------

    def _run_job(self, what: str, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._drop_views()
        self._view_weights()
        future = self._future = self.storage.io_loop.submit(what, job())
        try:
            future.result()
        finally:
            if future.done():  # else an interrupt ended the wait, and the job still runs
                self._drop_views()

    def _drop_views(self) -> None:
        """Wait for a job that an interrupt has left running, and drop the views of parameters and gradients."""
        future, self._future = self._future, None
        if future is not None:
            future.wait()  # its error was reported, or a later call raises it again
        self._gradients.by_unit = {}
        self.storage.weights[:] = self._arrays_over("weights", [[] for _ in self.layout.spaces])

    def _view_weights(self) -> None:
        """Until `_drop_views`, the arrays of weights are views of the parameters' present memory."""
        self.storage.weights[:] = self._arrays_over("weights", self._weight_homes())

    def _arrays_over(self, what: str, homes: Sequence[list[Home]]) -> list[TieredArray]:
        streams = self.storage.streams
        return [
            TieredArray(f"{what} ({space.dtype})", space.dtype.itemsize, space_homes, None, streams)
            for space, space_homes in zip(self.layout.spaces, homes, strict=True)
        ]

    def _weight_homes(self) -> list[list[Home]]:
        homes: list[list[Home]] = [[] for _ in self.layout.spaces]
        for unit in self.layout.units:
            weight = local_of(self.parameters[unit.slots[0].index])
            run = flat_view(weight)
            found = (weight.device, weight.dtype, weight.numel())
            expected = (self.device, unit.dtype, unit.numel)
            if found != expected or run is None:
                raise StateError(
                    f"{unit.name}: expected {_describe(*expected)} as when its states were made, got "
                    f"{_describe(*found)}; make the optimizer after the model has been moved to its device, cast to "
                    "its dtype and sharded"
                )
            expected_order, order = self._memory_orders[unit.slots[0].index], _memory_order(weight)
            if expected_order != order:
                raise StateError(
                    f"{unit.name}: expected shape and strides {expected_order} as when its states were made, got "
                    f"{order}: the order of its elements is no longer that of their states; change the memory format "
                    "before making the optimizer"
                )
            homes[self.layout.space_of(unit)].append(Home(unit.begin, unit.end, run.view(torch.uint8)))
        return homes

    def _gradient_of(self, unit: Unit, gradient: Tensor) -> Tensor:
        """The gradient's elements in the memory order of the weight's elements."""
        weight = local_of(self.parameters[unit.slots[0].index])
        found = (gradient.device, gradient.dtype, gradient.numel())
        expected = (self.device, unit.dtype, unit.numel)
        if found != expected or gradient.layout != torch.strided:
            raise StateError(
                f"gradient of {unit.name}: expected {_describe(*expected)}, got {_describe(*found)}, "
                f"{gradient.layout}; a gradient must be dense, and have the parameter's dtype and device"
            )
        run = flat_view(gradient) if has_same_order(gradient, weight) else None
        return _require_flat_view(torch.empty_like(weight).copy_(gradient)) if run is None else run

    def _name_of(self, index: int) -> str:
        unit = self._units.get(index)
        return f"parameter {index}" if unit is None else unit.name


def _apply_edits(weight: Tensor, master: Tensor) -> None:
    """Where an fp16 weight is not its rounded fp32 master, the weight counts. With bf16 this cannot happen."""
    if master.dtype != torch.float32:
        return
    for begin in range(0, weight.numel(), EDITS_NUMEL):
        part = slice(begin, begin + EDITS_NUMEL)
        edited = weight[part].view(torch.int16) != master[part].to(weight.dtype).view(torch.int16)
        if bool(edited.any()):
            masters.reset_remainder_where(edited, weight[part], master[part])


def _check_parameter(name: str, parameter: Tensor, rule: Rule) -> Tensor:
    """The local part of a parameter. Raises ConfigError: it cannot be updated where it is."""
    local, problem = local_of(parameter), ""
    if local.dtype not in DTYPES:
        problem = f"expected float32, bfloat16 or float16, got {local.dtype}; use a torch optimizer for this parameter"
    elif local.device.type == "meta":
        problem = "it is on the meta device; make the optimizer after the model has been materialised (model.to_empty)"
    elif local.layout != torch.strided or flat_view(local) is None:
        problem = "its memory has gaps or overlaps; make it contiguous before making the optimizer"
    elif rule.needs_whole_parameters and (local.shape != parameter.shape or not local.is_contiguous()):
        problem = (
            f"{rule.name} updates whole parameters: expected {tuple(parameter.shape)}, contiguous, in this process, "
            f"got {tuple(local.shape)} with strides {local.stride()}; for sharded parameters use an element-wise "
            f"optimizer such as torch.optim.AdamW, or zero.initialize; if {rule.name} is one, set "
            f"{rule.name}.is_element_wise = True"
        )
    if problem:
        raise ConfigError(f"OffloadOptimizer: {name}: {problem}")
    return local


def local_of(tensor: Tensor) -> Tensor:
    """The detached tensor; for a DTensor, this process's part. It shares the memory."""
    detached = tensor.detach()
    to_local = getattr(detached, "to_local", None)
    if to_local is None:
        return detached
    with torch.no_grad():
        local: Tensor = to_local()
    wait = getattr(local, "wait", None)  # a collective is still writing it
    if wait is not None:
        local = wait()
    return local


def flat_view(tensor: Tensor) -> Tensor | None:
    """(N,) all elements in memory order; None if the memory has gaps, or if two elements share a place."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def has_same_order(tensor: Tensor, like: Tensor) -> bool:
    """True if both tensors have the same memory order: equal positions in their flat views are the same element."""
    pairs = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    return all(stride == like_stride for size, stride, like_stride in pairs if size > 1)


def _require_flat_view(tensor: Tensor) -> Tensor:
    """As `flat_view`, for a tensor that must have one."""
    flat = flat_view(tensor)
    if flat is None:
        raise StateError(f"a tensor of {tuple(tensor.shape)} with strides {tensor.stride()} has gaps")
    return flat


def _describe(device: torch.device, dtype: torch.dtype, numel: int) -> str:
    return f"{numel:,} elements of {dtype} on {device}"


def _memory_order(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape, and the strides of dimensions with more than one element."""
    return tuple(tensor.shape), tuple(s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
