"""An optimizer for models without an engine: its states are in host memory or on NVMe, everything else is torch's.

Weights stay where they are, gradients in `.grad`, as in plain torch, DDP and FSDP2 (the local shards of DTensors).
There are no hooks, and ranks exchange nothing: each rank updates the elements that it has.

[Note: a step] First the options of the param groups are fixed for every parameter that has a gradient. Then the states
of sub-groups are read, updated with weights and gradients in place, and written, a few at a time. When `step()`
returns, all weights are new and all states are stored.

[Note: a step that fails] If a read or a write fails, some weights are new and others are not. The step is counted, and
the next call of `step()` finishes it with the same gradients. If these have changed meanwhile, the step cannot be
finished: load weights and states, or end the training.

[Note: 16-bit parameters] The states include the difference between a bf16 or fp16 weight and its fp32 value, so an
update loses nothing by rounding; `state_dict` has the fp32 value as `master`. An edit of a weight between steps also
edits its master.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from offload.errors import BudgetError, ConfigError, StateError
from offload.sizes import format_bytes
from zero.config import Config, load_config
from zero.config.sources import check_depth
from zero.ops.adam import KernelAdam
from zero.optim.make_rule import rule_for, rule_of_object
from zero.optim.optimizer import STATE_BYTES, ExternalStateOptimizer, LiveStates
from zero.optim.parameter_states import MASTER, ParameterStates, local_of
from zero.optim.rules import AdamRule, Rule, Rules, TrainedParameters
from zero.optim.sub_group_pipeline import StepArguments
from zero.plan.machine import read_machine
from zero.plan.plan import Plan
from zero.store.storage import Storage

logger = logging.getLogger("zero")

# Keys of `zero_optimization.offload_optimizer`.
OFFLOAD_KEYS = ("device", "nvme_path", "pin_memory", "buffer_count", "state_dtype")
MORE_KEYS = ("sub_group_size", "aio")  # A key of `zero_optimization`, and a block of its own.


class OffloadOptimizer(ExternalStateOptimizer):
    """A torch optimizer whose states live in host memory or on NVMe.

    Args:
        params: as of any torch optimizer; on their device, in their dtype and sharded already.
        optimizer_class: an element-wise one, whose own step updates the parameters; with
            `zero.ops.adam.DeepSpeedCPUAdam` or `FusedAdam` our kernel does, which is faster and rounds otherwise.
        offload: `device` ("cpu" or "nvme"), `nvme_path`, `pin_memory`, `buffer_count` and `state_dtype` as in the
            block `offload_optimizer`, `sub_group_size`, and the block `aio`.
        options: of the class: lr, weight_decay, ...

    Raises:
        ConfigError: an option or a parameter is not supported; names it.
        BudgetError: the host has no room for the states.
        StorageError: the disk has no room for them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        offload: Mapping[str, Any],
        **options: Any,
    ) -> None:
        self._parameter_states: list[ParameterStates] = []
        self._index_of: dict[int, int] = {}
        self._unfinished_gradients: dict[int, tuple[Tensor, tuple[int, int]]] = {}
        self._read_ahead: dict[int, dict[str, Tensor]] = {}
        self._finalizers: list[weakref.finalize[Any, Any]] = []
        self._is_built = False
        self._is_closed = False
        self._is_half_loaded = False  # The disk failed while states were loaded.
        self._pid = os.getpid()
        self._config = _config_of(offload)
        placeholder, members = _placeholder_optimizer(params, optimizer_class, options)
        rule = _rule_of(placeholder, self._config)
        self._initial = next((dict(state) for state in placeholder.state.values()), {})
        for group, parameters in zip(placeholder.param_groups, members, strict=True):
            group["params"] = parameters
            if "decoupled_weight_decay" in group:  # torch's own key has the same meaning
                group.pop("decoupled", None)
        super().__init__(TrainedParameters(placeholder.param_groups, Rules((rule,))))
        self.defaults = dict(placeholder.defaults)
        like = next(
            (member for group in members for member in group), torch.zeros(1, device="cpu", dtype=torch.float32)
        )
        self.counts_steps = _counts_steps(optimizer_class, options, _one_element_parameter(like))
        self.state = LiveStates(self, self)
        self._state_access = self
        try:
            self._allocate_new_states()
        except BaseException:
            self.close()
            raise
        self._is_built = True

    # ---- parameters ----------------------------------------------------------------------------

    @property
    def plans(self) -> tuple[Plan, ...]:
        """What goes where, in bytes: of the parameters of each device, and of each group that was added later."""
        return tuple(states.plan for states in self._parameter_states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the states of the new parameters have a place of their own. Raises as the constructor.

        Raises ConfigError: a parameter is there twice, which torch updates twice.
        """
        parameters = param_group.get("params", ())
        if isinstance(parameters, list | tuple) and len({*map(id, parameters)}) < len(parameters):
            raise ConfigError("OffloadOptimizer: expected each parameter once in a group, got one twice; leave it out")
        if self._is_built:
            self.check_open("add_param_group")
            rule = self.rules.each[0]
            if isinstance(rule, AdamRule) and "decoupled_weight_decay" not in param_group:
                param_group.setdefault("decoupled", rule.defaults["decoupled"])
        super().add_param_group(param_group)
        if self._is_built:
            try:
                self._allocate_new_states()
            except BaseException:
                self.param_groups.pop()
                raise

    def _allocate_new_states(self, loaded: Container[int] = ()) -> None:
        """Make room for the states of parameters that have none and need some, device by device.

        `loaded`: ids of frozen parameters that need states too.
        """
        by_device: dict[torch.device, list[tuple[int, str, Tensor]]] = {}
        for group in self.param_groups:
            names = group.get("param_names") or [None] * len(group["params"])
            for name, parameter in zip(names, group["params"], strict=True):
                needs_states = parameter.requires_grad or id(parameter) in loaded
                if needs_states and id(parameter) not in self._index_of:
                    index = len(self._index_of)
                    self._index_of[id(parameter)] = index
                    label = name or f"parameter {index} of shape {tuple(parameter.shape)}"
                    by_device.setdefault(local_of(parameter).device, []).append((index, label, parameter))
        allocated: list[ParameterStates] = []
        try:
            for parameters in by_device.values():
                allocated.append(ParameterStates(parameters, self.rules, self._config))
        except BaseException:
            for states in allocated:
                states.close()
            for parameters in by_device.values():
                for _, _, parameter in parameters:
                    del self._index_of[id(parameter)]
            raise
        for states in allocated:
            logger.info("%s", states.plan.table())
            self._parameter_states.append(states)
            # An optimizer that is garbage-collected must free its files and threads too.
            self._finalizers.append(weakref.finalize(self, Storage.abandon, states.storage))

    # ---- steps ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; a closure is called first, and its result returned.

        Raises:
            ConfigError: param groups have options that the class's rule does not support; nothing has changed.
            StateError: a parameter or gradient does not fit its states any more; nothing has changed. Or the last step
                has failed, and cannot be finished any more.
            StorageError: some weights are updated and others are not; the next call continues.
        """
        self.check_open("step")
        self._check_loaded("step")
        if any(states.unfinished_step for states in self._parameter_states):
            self._check_same_gradients()
            self._finish_step()
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._allocate_new_states({id(p) for p, _ in self._gradients()})
        gradients = {self._index_of[id(p)]: _reshard_like(gradient, p) for p, gradient in self._gradients()}
        values = self.step_values(self._index_of, gradients)
        # The rounding of bf16 moments depends on the step's number: a resumed run continues with the same number.
        number = 1 + max(self.step_counts.values(), default=0)
        arguments = StepArguments(values, 1.0, number)
        work = [(states, states.prepare_step(arguments, gradients)) for states in self._parameter_states]
        # From here on the step counts as taken, even if something fails.
        self._unfinished_gradients = {
            self._index_of[id(p)]: (gradient, _version(gradient)) for p, gradient in self._gradients()
        }
        self.count_step(self._index_of, values)
        for states, remaining in work:
            states.unfinished_step = remaining
        self._finish_step()
        return loss

    def _gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(p, p.grad) for p in self._parameters() if p.grad is not None]

    def _finish_step(self) -> None:
        for states in self._parameter_states:
            states.finish_step()
        self._unfinished_gradients = {}

    def _check_same_gradients(self) -> None:
        """Raise StateError unless the gradients are the same as when the unfinished step began."""
        current = {self._index_of[id(p)]: gradient for p, gradient in self._gradients()}
        are_same = current.keys() == self._unfinished_gradients.keys() and all(
            current[index] is gradient and _version(gradient) == version
            for index, (gradient, version) in self._unfinished_gradients.items()
        )
        is_broken = any(states.is_broken for states in self._parameter_states)
        if is_broken or not are_same:
            why = "an update stopped in the middle of its elements" if is_broken else "its gradients no longer exist"
            raise StateError(
                f"step: the last step failed after it had updated some weights and not others, and {why}, so it "
                "cannot be finished; load weights and states from a checkpoint (load_state_dict of model and "
                "optimizer), and after a failure call step() again before anything else"
            )

    # ---- states --------------------------------------------------------------------------------

    def read_states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Copies of a parameter's states on the host, in its form. Raises StorageError, StateError."""
        index = self._index_of[id(parameter)]
        if index in self._read_ahead:
            return self._read_ahead.pop(index)
        self._check_step_finished("optimizer.state")
        return next(dict(states) for _, states in list(self._states_of(index).read_states([index])))

    def write_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Not used: states are written together, see `replace_all_states`."""
        self.replace_all_states([(parameter, {**self.state[parameter], key: value})])

    def check_room(self, nbytes: int) -> None:
        free = read_machine(torch.device("cpu")).available_bytes
        if nbytes > free:
            raise BudgetError(
                f"optimizer.state_dict: the states of this rank take {format_bytes(nbytes)}, and {format_bytes(free)} "
                "of host memory are free; shard the model over more ranks, or read optimizer.state[parameter] one by "
                "one"
            )

    def allocate_states(self, parameter: nn.Parameter | None = None) -> None:
        """Does nothing: `add_param_group` makes the room."""

    def visible_states(self, key: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `ExternalStateOptimizer`; the master always."""
        states = {name: tensor for name, tensor in tensors.items() if name != MASTER}
        return {**super().visible_states(key, states), **{name: tensors[name] for name in tensors if name == MASTER}}

    def state_dict(self) -> dict[str, Any]:
        """As torch's of the class: copies on the host, of a DTensor's states DTensors.

        16-bit parameters have fp32 states, and `master`, their fp32 value. It is not collective.

        Raises:
            BudgetError: the host has no room for that much.
            StateError: the last step has failed, and is not finished.
            StorageError: a state could not be read.
        """
        self.check_open("state_dict")
        self._check_step_finished("state_dict")
        trained = {self._index_of[id(p)] for p in self.state}
        self._check_room_for_states()
        try:
            for states in self._parameter_states:
                self._read_ahead.update(states.read_states([index for index in states.parameters if index in trained]))
            state_dict = super(ExternalStateOptimizer, self).state_dict()
        finally:
            self._read_ahead = {}
        for group in state_dict["param_groups"]:
            group.pop("decoupled", None)
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        state_of = {
            place: state_dict["state"].get(place) or self._initial_state_of(parameter)
            for place, parameter in zip(places, self._parameters(), strict=True)
        }
        state_dict["state"] = {place: state for place, state in state_of.items() if state}
        return state_dict

    def _initial_state_of(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter before its first step: empty, unless the class's constructor makes states."""
        return {
            name: torch.full_like(parameter.detach(), value.item(), dtype=torch.float32, device="cpu")
            if isinstance(value, Tensor) and value.dim()
            else copy(value)
            for name, value in self._initial.items()
        }

    def _check_room_for_states(self) -> None:
        """Check room for the local shards only, because only these are read."""
        numels = [
            local_of(p).numel() * (len(self.rules.each[0].states) + (p.dtype != torch.float32)) for p in self.state
        ]
        self.check_room(STATE_BYTES * sum(numels))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class, or of the torch optimizer of the class. Weights do not change.

        Raises ConfigError: it has other groups, or states of another class or shape; nothing has changed. Raises
        StorageError: states could not be stored; load them again.
        """
        super().load_state_dict(state_dict)

    def replace_all_states(self, pairs: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        """Replace the states of these parameters, together: the state of each sub-group is written once."""
        self.check_open("load_state_dict")
        self._allocate_new_states({id(parameter) for parameter, states in pairs if states})
        for parameter, states in pairs:
            index = self._index_of.get(id(parameter), -1)
            for name in (*self.rules.each[0].states, MASTER):
                if states.get(name) is not None:
                    self._states_of(index).check_state(index, name, states[name])
        tensors_of: dict[int, dict[str, Tensor]] = {}
        for parameter, states in pairs:
            key = id(parameter)
            has_state = bool(self.step_counts.get(key))
            if states or has_state:  # without either there is no state to replace
                tensors = self.replace_numbers(parameter, _without_master(states))
                if states.get(MASTER) is not None and parameter.dtype != torch.float32:
                    tensors[MASTER] = states[MASTER]
                tensors_of[self._index_of[key]] = tensors
        for parameter_states in self._parameter_states:
            parameter_states.drop_step()
        self._unfinished_gradients, self._is_half_loaded = {}, True
        for parameter_states in self._parameter_states:
            parameters = parameter_states.parameters
            parameter_states.write_states({i: tensors for i, tensors in tensors_of.items() if i in parameters})
        self._is_half_loaded = False

    def check_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """See `ExternalStateOptimizer`; a master is no state of the class."""
        super().check_states(map(_without_master, states))

    def _states_of(self, index: int) -> ParameterStates:
        return next(states for states in self._parameter_states if index in states.parameters)

    def _check_loaded(self, what: str) -> None:
        if self._is_half_loaded:
            raise StateError(
                f"{what}: the disk failed and only a part of the states was loaded; call load_state_dict again"
            )

    def _check_step_finished(self, what: str) -> None:
        self._check_loaded(what)
        if any(states.unfinished_step for states in self._parameter_states):
            raise StateError(
                f"{what}: the last step failed after it had updated some states and not others; call step() again to "
                "finish it, or load weights and states from a checkpoint"
            )

    # ---- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Free memory, threads and disk space; the states no longer exist. Idempotent."""
        if self._pid != os.getpid():
            return
        self._is_closed = True
        for finalizer in self._finalizers:
            finalizer.detach()
        self._finalizers = []
        self.drop_states()
        self.step_counts, self.progress = {}, {}
        parameter_states, self._parameter_states = self._parameter_states, []
        for states in parameter_states:
            states.close()

    def __enter__(self) -> OffloadOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_open(self, what: str) -> None:
        if self._pid != os.getpid():
            raise StateError(
                f"OffloadOptimizer.{what}: this process ({os.getpid()}) was forked from the one that has the states "
                f"({self._pid}); use the optimizer in that process"
            )
        if self._is_closed:
            raise StateError(f"OffloadOptimizer.{what}: the optimizer is closed, and its states no longer exist")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            "OffloadOptimizer: it cannot be copied or pickled: its states are in files and memory of this process; "
            "save its state_dict(), and load it into another optimizer"
        )


def _config_of(offload: Mapping[str, Any]) -> Config:
    """The configuration of an engine with these offload options."""
    check_depth(offload, "offload")
    unknown = sorted(set(offload) - {*OFFLOAD_KEYS, *MORE_KEYS})
    if unknown:
        raise ConfigError(
            f"offload: expected keys among {', '.join((*OFFLOAD_KEYS, *MORE_KEYS))}, got {', '.join(unknown)}"
        )
    block = {key: offload[key] for key in OFFLOAD_KEYS if key in offload}
    if isinstance(block.get("nvme_path"), os.PathLike):
        block["nvme_path"] = os.fspath(block["nvme_path"])
    if block.get("device") not in ("cpu", "nvme"):
        raise ConfigError(
            f'offload: device: expected "cpu" or "nvme", got {block.get("device")!r}; without offloading the torch '
            "optimizer itself does it"
        )
    zero: dict[str, Any] = {"stage": 1, "offload_optimizer": block}
    if "sub_group_size" in offload:
        zero["sub_group_size"] = offload["sub_group_size"]
    source: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if "aio" in offload:
        source["aio"] = offload["aio"]
    return load_config(source, world_size=1)


def _without_master(states: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in states.items() if name != MASTER}


def _rule_of(optimizer: torch.optim.Optimizer, config: Config) -> Rule:
    """Our kernel's rule for our classes; any other class's own step runs over tiles, with the same bits as alone.

    Raises ConfigError: the class has states of another shape than the parameter's, or a state dtype that only the
    kernel supports.
    """
    state_dtype = config.zero_optimization.offload_optimizer.state_dtype
    if state_dtype == "8bit":
        raise ConfigError(
            "offload: state_dtype: expected fp32 or bf16, got 8bit, which needs blocks of 256 elements, and "
            "parameters in their own memory have any length; use zero.initialize for 8bit"
        )
    if isinstance(optimizer, KernelAdam):
        return rule_of_object(optimizer, config)
    if state_dtype != "fp32":
        raise ConfigError(
            f"offload: state_dtype: {state_dtype} is only available with zero.ops.adam.DeepSpeedCPUAdam and FusedAdam, "
            f"got {type(optimizer).__name__}; pass one of them as optimizer_class, or leave state_dtype out"
        )
    rule = rule_for(optimizer, optimizer.param_groups, torch_as_kernels=False)
    if rule.small:
        raise ConfigError(
            f"optimizer: {rule.name} is not available in OffloadOptimizer, because it keeps states that do not have "
            f"the parameter's shape ({', '.join(rule.small)}); use it with zero.initialize"
        )
    return rule


def _placeholder_optimizer(
    params: Iterable[Any], kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer, list[list[Tensor]]]:
    """(the optimizer over one-element parameters with the same dimensions and groups, the members of each group).

    With the real parameters a class that makes its states in its constructor would make them in memory.
    """
    argument: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    groups: list[dict[str, Any]] = argument if argument and isinstance(argument[0], dict) else [{"params": argument}]
    members: list[list[Tensor]] = []
    placeholder_groups = []
    for group in groups:
        entries = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        has_names = bool(entries) and isinstance(entries[0], tuple)
        members.append([entry[1] for entry in entries] if has_names else entries)
        twins = [_one_element_parameter(member) for member in members[-1]]
        pairs = [(entry[0], twin) for entry, twin in zip(entries, twins, strict=True)] if has_names else twins
        placeholder_groups.append({**group, "params": pairs})
    return kind(placeholder_groups if argument else [], **options), members  # torch refuses an empty list


def _one_element_parameter(parameter: Tensor) -> nn.Parameter:
    """A parameter of one element with the same number of dimensions: some classes accept only matrices."""
    return nn.Parameter(torch.zeros((1,) * max(parameter.dim(), 1), device="cpu", dtype=torch.float32))


def _counts_steps(
    kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any], parameter: nn.Parameter
) -> bool:
    """True if the class keeps `step` for a parameter; then our states have it too."""
    optimizer = kind([parameter], **options)
    parameter.grad = torch.zeros_like(parameter)
    with suppress(Exception):  # for example options that only groups have
        optimizer.step()
        return "step" in optimizer.state[parameter]
    return True


def _reshard_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient; a DTensor is resharded like the parameter."""
    placements = getattr(parameter, "placements", None)
    if placements is None or getattr(gradient, "placements", None) in (None, placements):
        return gradient
    resharded: Tensor = gradient.redistribute(parameter.device_mesh, placements)  # type: ignore[attr-defined]
    return resharded


def _version(gradient: Tensor) -> tuple[int, int]:
    """Changes with every write to the gradient; for a DTensor also with writes to its local shard, as by FSDP2."""
    with torch.no_grad():
        local = getattr(gradient, "to_local", lambda: gradient)()
    return gradient._version, local._version
