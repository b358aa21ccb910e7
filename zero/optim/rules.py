"""Update rules: the states that an optimizer keeps for each parameter, and its update of a run of elements.

[Note: a rule is data] A state with one value for each element of a parameter is an array state. The array states of a
rule have names (as in torch's state dict) and are adjacent in the state of a sub-group; plan, checkpoint and
`safe_get_*` use only the names. Other values of a parameter, mainly counts, are fixed by `step()` for every parameter.
The update of a sub-group is a function of these values and of its elements.

Our kernel updates Adam. Any other torch optimizer is a rule too: its own `step` runs over tiles, with its states bound
to our array states. For an element-wise optimizer a tile is some elements, for any other it is a whole parameter. An
optimizer may have two rules (Muon and Adam): each of its param groups is updated by one rule, and parameters of
different rules share no unit.

[Note: tiles] The optimizer that steps over a tile is a shallow copy of the user's, with one param group that has one
parameter: a flat fp32 tile. Its state is the parameter's state so far: array states cut to the tile, and numbers as
after the last step. So the class cannot distinguish a tile from a small parameter, and an element-wise class gives the
same bits as for the whole parameter. `zero/optim/make_rule.py` has the table of element-wise classes.

[Note: numbers] Every tile of a parameter starts from the same numbers and ends with the same numbers, which depend on
no element. When a step is fixed, a step over one element finds the numbers after it. States that depend on the gradient
and do not have the parameter's shape come out of the update itself; see `zero/optim/small_states.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.kernels import kernels, masters, tile_threads
from offload.kernels.moments import Moments
from zero.ops.adam import AdamValues
from zero.optim.small_states import Shapes, SmallTensors
from zero.params.layout import Layout
from zero.plan.sub_group_state import ADAM_STATES, States

# torch computes this many elements on one thread, without waking others; and they stay in the cache between operations.
TILE_NUMEL = 32768
TILE_NUMEL_GPU = 1 << 22
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)
# Attributes of an optimizer that the copy does not take: a scheduler may have wrapped `step`, and hooks are for whole
# steps.
NOT_COPIED = {"state", "param_groups", "step", *HOOKS}
# Options that compute the same in another way; they gain nothing on one flat tile, outside any graph.
PER_TENSOR = {"foreach": False, "fused": None, "capturable": False}


NO_SMALL: SmallTensors = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number in a parameter's state; immutable, so that an update can be repeated."""

    value: int | float | bool | None  # None: the state has the name, but no value yet.
    dtype: torch.dtype | None = None  # Of a tensor; None: a Python number.
    shape: tuple[int, ...] = ()

    @staticmethod
    def from_value(value: Any) -> Scalar:
        """From a Python number or a tensor of one element."""
        if isinstance(value, Tensor):
            return Scalar(value.item(), value.dtype, tuple(value.shape))
        return Scalar(value)

    def to_value(self) -> Any:
        """The number in its original form."""
        if self.dtype is None or self.value is None:
            return self.value
        return torch.full(self.shape, self.value, dtype=self.dtype, device="cpu")

    def to_tensor(self) -> Tensor:
        """For a checkpoint: the same number, of shape ()."""
        double = self.dtype is None and isinstance(self.value, float)  # torch would make it fp32
        return torch.tensor(self.value, dtype=torch.float64 if double else self.dtype, device="cpu")

    def convert(self, saved: Tensor) -> Scalar:
        """The saved number, in the form of this one."""
        value = saved.item()
        if self.dtype is None and self.value is not None:
            value = type(self.value)(value)
        return Scalar(value, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Progress:
    """The part of a parameter's state besides its array states, after some updates."""

    scalars: tuple[tuple[str, Scalar], ...] = ()
    # Names of the array states that exist; the next update makes the others.
    present: tuple[str, ...] = ()


class UpdateRun(NamedTuple):
    """A run of elements of one unit, to be updated in place. All tensors are flat and of the same length and device."""

    weight: Tensor  # fp32, bf16 or fp16.
    # The part of the fp32 masters that is not in the weights, see `offload.kernels.masters`; None: weights are masters.
    master: Tensor | None
    states: States
    gradient: Tensor  # As it was collected.
    segments: Sequence[tuple[int, int, Any]]  # (begin, end, values) of each parameter in the run that is updated.
    # The shape of each segment's parameter; rules that look at whole parameters read it.
    shapes: Sequence[tuple[int, ...]] = ()
    small: Sequence[SmallTensors] = ()  # The small states of each segment's parameter; they are not changed.


class Rule(ABC):
    """The update rule of one optimizer; this base class has no states besides array states.

    Attributes:
        name: for users.
        states: names of its array states.
        defaults: defaults of the options in param groups.
        scalars: other numbers of a parameter besides the number of updates, by name; the values are examples.
        fills: initial values of array states, where they are not 0.
        needs_whole_parameters: the rule needs whole parameters: a segment is never a part of one.
        small: names of its small states; parameters of some shapes may have only some of them.
    """

    name: str
    needs_whole_parameters = False
    states: tuple[str, ...]
    defaults: Mapping[str, Any]
    scalars: Mapping[str, Scalar] = MappingProxyType({})
    fills: Mapping[str, float] = MappingProxyType({})
    small: tuple[str, ...] = ()

    def on_step_begin(self) -> None:  # noqa: B027 - most keep nothing between parameters
        """A step is about to be fixed: `values` is called for each of its parameters."""

    @abstractmethod
    def values(self, group: Mapping[str, Any], count: int, progress: Progress | None) -> Any:
        """The values of one parameter that the present step fixes.

        Raises ConfigError: the group has options that the rule does not support.

        Args:
            group: its param group.
            count: number of updates, this one included.
            progress: after its last update; None before the first.
        """

    def after_update(self, values: Any) -> tuple[Progress | None, Mapping[str, Any]]:
        """The parameter's progress after an update with `values`, and the changes of its param group."""
        return None, {}

    @abstractmethod
    def update_run(self, run: UpdateRun, grad_scale: float, threads: int) -> Sequence[SmallTensors] | None:
        """Update the elements in place; the result depends only on the arguments.

        Returns the new small states of each segment; None if the rule has none.
        """

    def small_shapes(self, shape: tuple[int, ...]) -> Shapes:
        """The small states that a parameter of this shape has after an update.

        Raises ConfigError: such a parameter has states that those in the trial did not have.
        """
        return {}


class AdamRule(Rule):
    """Adam and AdamW, by our kernel.

    Args:
        decoupled: decay the weights (AdamW) and not the gradients.
        defaults: for param groups that are added later, where they differ from Adam's.
    """

    name, states = "Adam", ADAM_STATES

    def __init__(self, *, decoupled: bool = True, defaults: Mapping[str, Any] | None = None) -> None:
        adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        self.defaults: Mapping[str, Any] = {**adam, **(defaults or {}), "decoupled": decoupled}

    def values(self, group: Mapping[str, Any], count: int, progress: Progress | None) -> AdamValues:
        """As `AdamValues.from_group`, and our option `decoupled`.

        Raises ConfigError: the kernel cannot do an option.
        """
        for key in ("amsgrad", "maximize"):
            if group.get(key):
                raise ConfigError(
                    f"param_groups: {key}: it was changed to {group[key]} after zero.initialize; set it before"
                )
        decoupled = bool(group.get("decoupled", group.get("decoupled_weight_decay", self.defaults["decoupled"])))
        return AdamValues.from_group(group, count, decoupled=decoupled)

    def update_run(self, run: UpdateRun, grad_scale: float, threads: int) -> None:
        kernels.adamw(
            run.weight,
            run.master,
            run.states.moments or Moments(run.states.tensors[0], run.states.tensors[1]),
            run.gradient,
            [kernels.Segment(begin, end, **values._asdict()) for begin, end, values in run.segments],
            grad_scale=grad_scale,
            threads=threads,
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one optimizer: each of its param groups is updated by one of them."""

    each: tuple[Rule, ...]
    # If there are two: a key in param groups, true if the first rule updates the group, false if the second does.
    flag: str = ""
    # (name, parameter) -> the flag of a parameter for which the user has not set one.
    default: Callable[[str, Tensor], bool] = lambda name, parameter: True

    def number(self, group: Mapping[str, Any]) -> int:
        """Number of the rule that updates a param group."""
        return int(len(self.each) > 1 and not group.get(self.flag))

    def largest_small_bytes(self, layout: Layout) -> int:
        """Bytes of small states on the rank that has most; equal on all ranks, because their plans must be equal."""
        bytes_of_shards: dict[int, int] = {}
        for unit in layout.units:
            rule = self.each[unit.rule]
            for slot in unit.slots if unit.trainable and rule.small else ():
                shard = slot.offset_numel // unit.shard_numel
                shapes = rule.small_shapes(slot.shape).values()
                nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in shapes)
                bytes_of_shards[shard] = bytes_of_shards.get(shard, 0) + nbytes
        return max(bytes_of_shards.values(), default=0)

    def rule_of(self, group: Mapping[str, Any]) -> Rule:
        return self.each[self.number(group)]

    def numbers(self, groups: Iterable[Mapping[str, Any]]) -> dict[int, int]:
        """id(parameter) -> number of its rule."""
        return {id(p): number for group in groups for number in [self.number(group)] for p in group["params"]}

    @property
    def names(self) -> str:
        """For users."""
        return " and ".join(rule.name for rule in self.each)

    @property
    def states(self) -> tuple[tuple[str, ...], ...]:
        """Names of the array states of each rule."""
        return tuple(rule.states for rule in self.each)

    @property
    def whole_parameter_rules(self) -> frozenset[int]:
        """Numbers of the rules that need whole parameters."""
        return frozenset(number for number, rule in enumerate(self.each) if rule.needs_whole_parameters)


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """The trained parameters, and their rules."""

    groups: list[dict[str, Any]]  # Param groups, as torch's; live.
    rules: Rules
    user_optimizer: torch.optim.Optimizer | None = None  # The optimizer object that they come from, if any.
    frozen: Mapping[Tensor, int] = field(default_factory=dict)  # Parameter -> number of the group it may join later.


@dataclass(frozen=True, slots=True)
class TileValues:
    """The values of one parameter in one step."""

    options: Mapping[str, Any]  # The present options of its param group.
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class InitialState:
    """A parameter's state before its first step."""

    fills: Mapping[str, Scalar] = field(default_factory=dict)  # Array state -> the number that fills it.
    numbers: Mapping[str, Scalar] = field(default_factory=dict)


def for_each_tile(run: UpdateRun, work: Callable[[slice, Any], None], threads: int) -> None:
    """Call `work(tile, values)` for tiles of all segments; on the host with `threads`, if there is enough to do."""
    on_host = run.weight.device.type == "cpu"
    is_large = sum(end - begin for begin, end, _ in run.segments) >= tile_threads.WORTH_THREADS_NUMEL
    in_threads = on_host and is_large and tile_threads.has_tile_threads()
    numel = tile_threads.TILE_NUMEL if in_threads else TILE_NUMEL if on_host else TILE_NUMEL_GPU
    remaining = iter([(at, v) for begin, end, v in run.segments for at in tile_threads.tiles_of(begin, end, numel)])

    def work_on_remaining() -> None:
        for at, values in remaining:
            work(at, values)

    if in_threads:
        tile_threads.run_in_tile_threads(work_on_remaining, threads)
    else:
        work_on_remaining()


class TiledRule(Rule):
    """The rule of one optimizer object.

    Args:
        optimizer: an instance; neither its parameters nor its states are used.
        initial: the state that its constructor makes for a parameter; most classes make none.
        states: names of the array states.
        dtypes: dtypes of array states that the class does not keep in fp32.
        scalars: other numbers in a parameter's state; the values are examples.
        needs_whole_parameters: a tile is a whole parameter, with its shape.
        small: names of the small states, for a rule that needs whole parameters.
        tried_options: options of the param groups; the small states of a shape are found with all of them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial: InitialState | None = None,
        states: tuple[str, ...] = (),
        dtypes: Mapping[str, torch.dtype] | None = None,
        scalars: Mapping[str, Scalar] | None = None,
        *,
        needs_whole_parameters: bool = False,
        small: tuple[str, ...] = (),
        tried_options: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.name, self.needs_whole_parameters = type(optimizer).__name__, needs_whole_parameters
        self.probe_shape = (1, 1) if needs_whole_parameters else (1,)
        self.kind = type(optimizer)
        self.states: tuple[str, ...] = states
        self.scalars: Mapping[str, Scalar] = dict(scalars or {})  # On the CPU.
        self._initial, self._dtypes = initial or InitialState(), dict(dtypes or {})
        self.fills: Mapping[str, float] = {name: float(fill.value or 0) for name, fill in self._initial.fills.items()}
        self.defaults: Mapping[str, Any] = dict(optimizer.defaults)
        self.attributes = {key: value for key, value in vars(optimizer).items() if key not in NOT_COPIED}
        self.small, self._tried_options = small, tuple(tried_options)
        self._small_shapes: dict[tuple[int, ...], Shapes] = {}
        self._options: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        self._results: list[tuple[TileValues, tuple[Progress | None, Mapping[str, Any]]]] = []

    def on_step_begin(self) -> None:
        """Read the param groups anew in this step."""
        self._options, self._results = [], []

    def values(self, group: Mapping[str, Any], count: int, progress: Progress | None) -> TileValues:
        """All options of the group; raises ConfigError if they need an array state that was not planned."""
        options = next((known for known_group, known in self._options if known_group is group), None)
        if options is None:
            options = self.options_of(group)
            self._options.append((group, options))
        values = TileValues(options, progress if count > 1 else None)
        new_progress = self.after_update(values)[0]
        unplanned = set(new_progress.present if new_progress else ()) - set(self.states)
        if unplanned:
            raise ConfigError(
                f"param_groups: with these options {self.name} keeps {', '.join(sorted(unplanned))} for each "
                "parameter, but it did not in the dozen steps that zero.initialize tried, so there is no room for it. "
                "Give at least one param group such options before zero.initialize (SGD: a momentum above 0); states "
                "that appear only after more steps are not supported"
            )
        return values

    def options_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options that the class reads from a param group."""
        options = {key: _plain(value) for key, value in group.items() if key != "params"}
        return options | {key: value for key, value in PER_TENSOR.items() if key in options}

    def after_update(self, values: Any) -> tuple[Progress | None, Mapping[str, Any]]:
        """See `Rule`. A step over one element finds both."""
        for earlier, result in self._results:
            if earlier.options is values.options and earlier.progress == values.progress:
                return result
        small = self.probe_small(values.options) if values.progress is not None else {}
        state, options = self.step_one_element(values, small)
        changed = {key: value for key, value in options.items() if values.options.get(key) != value}
        result = self.progress_of(state), changed
        self._results.append((values, result))
        return result

    def probe_small(self, options: Mapping[str, Any]) -> SmallTensors:
        """The small states of one element; numbers do not depend on their values."""
        return self.small_states_of(self.step_one_element(TileValues(options, None), {})[0]) if self.small else {}

    def step_one_element(self, values: TileValues, small: SmallTensors) -> tuple[dict[str, Any], dict[str, Any]]:
        """As `step_tile`, over one element with value and gradient zero."""
        tile = torch.zeros(self.probe_shape, dtype=torch.float32, device="cpu")
        arrays = {name: torch.zeros_like(tile) for name in self.states}
        with tile.device:  # for states that the class makes on the default device
            return self.step_tile(tile, torch.zeros_like(tile), arrays, values, small)

    def update_run(self, run: UpdateRun, grad_scale: float, threads: int) -> Sequence[SmallTensors] | None:
        """Update tile by tile; on the host several tiles at a time, if the class is torch's or ours."""
        if self.needs_whole_parameters:
            return self._update_whole(run, grad_scale)
        # Any other class may have memory that two simultaneous steps would share.
        is_thread_safe = self.kind.__module__.startswith(("torch.optim.", "zero.ops."))

        def update(at: slice, values: TileValues) -> None:
            self._update_tile(run, at, values, grad_scale, (-1,))

        for_each_tile(run, update, threads if is_thread_safe else 1)
        return None

    def _update_whole(self, run: UpdateRun, grad_scale: float) -> Sequence[SmallTensors]:
        """Update parameter by parameter; torch uses its own threads for such large tensors."""
        small_states = []
        for (begin, end, values), parameter_shape, small in zip(run.segments, run.shapes, run.small, strict=True):
            shape = self.tile_shape(parameter_shape)
            for lo in range(begin, end, math.prod(shape)):
                small = self._update_tile(run, slice(lo, lo + math.prod(shape)), values, grad_scale, shape, small)
            small_states.append(small)
        return small_states

    def tile_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of a whole parameter that is updated at once; a parameter is one or more such parts."""
        return shape

    def small_shapes(self, shape: tuple[int, ...]) -> Shapes:
        """See `Rule`. Found by a first step over a parameter of that shape, without memory if the class allows it."""
        if not self.small or not math.prod(shape):
            return {}
        if shape not in self._small_shapes:
            shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
            for options in self._tried_options:
                shapes.update(self._first_states(options, shape))
            wrong = [name for name, (size, _) in shapes.items() if name in self.states and size != shape]
            unknown = shapes.keys() - {*self.states, *self.scalars, *self.small}
            if wrong or unknown:
                raise ConfigError(
                    f"optimizer: for a parameter of shape {tuple(shape)}, {self.name} keeps other states "
                    f"({', '.join(sorted({*wrong, *unknown}))}) than for the shapes that zero.initialize tried; use "
                    "another optimizer for such parameters"
                )
            self._small_shapes[shape] = {name: shapes[name] for name in self.small if name in shapes}
        return self._small_shapes[shape]

    def _first_states(self, options: Mapping[str, Any], shape: tuple[int, ...]) -> Shapes:
        """The states that a first step makes for a parameter of this shape."""
        states = self._make_states(options, shape, "meta")
        # On "meta" a step ends when it reads a value. Most classes have made all of their states by then.
        if states.keys() != self._make_states(options, (2,) * len(shape), "cpu").keys():
            states = self._make_states(options, shape, "cpu")
        return states

    def _make_states(self, options: Mapping[str, Any], shape: tuple[int, ...], device: str) -> Shapes:
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))
        parameter.grad = torch.zeros_like(parameter)
        twin = self.make_twin(parameter, options, self.fresh_state(parameter.detach()))
        try:
            with parameter.device:
                self.kind.step(twin)
        except Exception:
            if device != "meta":
                raise
        state = {name: value for name, value in twin.state.get(parameter, {}).items() if value is not None}
        # A state that is first a number and a tensor after the step (for example a norm) is small, too.
        tensors = {
            k: torch.zeros((), dtype=torch.float32, device="cpu") if k in self.small and _is_number(v) else v
            for k, v in state.items()
        }
        return {name: (value.shape, value.dtype) for name, value in tensors.items() if isinstance(value, Tensor)}

    def _update_tile(
        self,
        run: UpdateRun,
        at: slice,
        values: TileValues,
        grad_scale: float,
        shape: tuple[int, ...],
        small: SmallTensors = NO_SMALL,
    ) -> SmallTensors:
        named = zip(self.states, run.states.tensors, strict=True)
        weight, arrays = run.weight[at], {name: array[at].view(shape) for name, array in named}
        stored = None if run.master is None else run.master[at]
        tile = weight
        if stored is not None:
            tile = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            masters.join(tile, weight, stored)
        # A copy: the optimizer may change `grad`, and must not do it twice if the update is repeated.
        gradient = run.gradient[at].to(torch.float32, copy=True)
        if grad_scale != 1.0:
            gradient.mul_(grad_scale)
        state, _ = self.step_tile(tile.view(shape), gradient.view(shape), arrays, values, small)
        if stored is not None:
            masters.split(weight, stored, tile)
        return self.small_states_of(state)

    def step_tile(
        self,
        tile: Tensor,
        gradient: Tensor,
        arrays: Mapping[str, Tensor],
        values: TileValues,
        small: SmallTensors = NO_SMALL,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the class over one tile, in place: tile (N,) fp32, and its array states (N,) fp32; or all in the
        parameter's shape.

        Returns the state after the step, and the options of its param group.
        """
        parameter = torch.nn.Parameter(tile)
        parameter.grad = gradient
        progress = values.progress
        state = self.fresh_state(tile) if progress is None else self._bind_state(arrays, progress)
        if progress is not None:  # copies, which the class may change
            state.update({name: value.to(tile.device, copy=True) for name, value in small.items()})
        twin = self.make_twin(parameter, values.options, state)
        self.kind.step(twin)
        new_state = dict(twin.state.get(parameter, {}))
        for name, array in arrays.items():
            value = new_state.get(name)
            if value is not None and value is not array:
                array.copy_(value.detach().view(array.shape))
        if not parameter.detach().is_set_to(tile):
            tile.copy_(parameter.detach())
        return new_state, {key: value for key, value in twin.param_groups[0].items() if key != "params"}

    def make_twin(self, parameter: Tensor, options: Mapping[str, Any], state: dict[str, Any]) -> torch.optim.Optimizer:
        """A copy of the user's optimizer with this one parameter."""
        twin: torch.optim.Optimizer = object.__new__(self.kind)
        vars(twin).update(self.attributes)
        vars(twin).update({hooks: OrderedDict() for hooks in HOOKS})
        twin.param_groups = [{**options, "params": [parameter]}]
        twin.state = defaultdict(dict)
        if state:
            twin.state[parameter] = state
        return twin

    def fresh_state(self, tile: Tensor) -> dict[str, Any]:
        """A parameter's state before its first step."""
        fills = self._initial.fills.items()
        arrays = {name: torch.full_like(tile, scalar.value or 0, dtype=scalar.dtype) for name, scalar in fills}
        return {**arrays, **{name: scalar.to_value() for name, scalar in self._initial.numbers.items()}}

    def _bind_state(self, arrays: Mapping[str, Tensor], progress: Progress) -> dict[str, Any]:
        """A parameter's state as the class's last step left it."""
        state: dict[str, Any] = {name: scalar.to_value() for name, scalar in progress.scalars}
        for name in progress.present:
            state[name] = arrays[name].to(self._dtypes.get(name, torch.float32))
        return state

    def small_states_of(self, state: Mapping[str, Any]) -> SmallTensors:
        """Copies of the small states in a state."""
        small = {name: state[name] for name in self.small if isinstance(state.get(name), Tensor)}
        return {name: value.detach().clone() for name, value in small.items()}

    def progress_of(self, state: Mapping[str, Any]) -> Progress:
        """The part of a state besides the contents of array states and small states."""
        not_small = {k: v for k, v in state.items() if k not in self.small}
        numbers = {k: v for k, v in not_small.items() if k in self.scalars or _is_number(v)}
        numbers = {k: v for k, v in numbers.items() if v is None or k not in self.states}
        arrays = [name for name, value in not_small.items() if isinstance(value, Tensor) and name not in numbers]
        scalars = tuple((name, Scalar.from_value(value)) for name, value in numbers.items())
        return Progress(scalars, tuple(arrays))


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _plain(value: Any) -> Any:
    """The option; a tensor of one element as its number, so that it keeps its present value."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, list) else value
