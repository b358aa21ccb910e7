"""The user's optimizer: it has live param groups, and the sub-group pipeline does its updates.

It is a `torch.optim.Optimizer`, so learning-rate schedulers and clients that write into `param_groups` work as they do
with torch. The groups are read at `step()`. States are read on request: `optimizer.state[parameter]["exp_avg"]` is a
copy. A state is an array state (a value for each element), a number, or a small state; see `zero/optim/rules.py`.

[Note: hooks] torch calls hooks in `optimizer.step()`: hooks of the engine's optimizer, of the optimizer that the user
passed, and global ones. `engine.step()` and `optimizer.step()` are the same step, so each hook is called once for
either. Pre-hooks are called before the step is decided, even if it is then skipped; gradients can be read or replaced
there (`safe_get_full_grad`). Post-hooks are called after a step that was taken, and after the scheduler that the engine
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import optimizer as torchs

from offload.errors import ConfigError, StateError
from zero.optim.averages import EMA, inner_rule
from zero.optim.loss_scale import LossScaler
from zero.optim.rules import AdamRule, Progress, Rule, Scalar, TrainedParameters
from zero.optim.small_states import Shapes, SmallStates, SmallTensors

# ABSENT is a prefix of a state's name. Such a number in a checkpoint means that the parameter does not have the state
# yet: its state dict lacks the key (MISSING), or has None there (NOTHING).
ABSENT, MISSING, NOTHING = "no_", 1, 2
STATE_BYTES = 4  # Bytes of an element of a state as the user gets it: fp32.
PRE, POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
# The name of a step in profiles, formed as torch does.
PROFILED = "Optimizer.step#ZeroOptimizer.step"


class StateAccess(Protocol):
    """Access to the states of an engine's parameters."""

    def read_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of the states, fp32 on the host, in the parameter's shape; on all ranks together."""

    def write_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace a state, on all ranks together."""

    def check_room(self, nbytes: int) -> None:
        """Raise BudgetError if the host has no room for `nbytes`."""

    def check_open(self, what: str) -> None:
        """Raise StateError if the optimizer's method `what` must not be called now."""

    def allocate_states(self, parameter: nn.Parameter | None = None) -> None:
        """Make room for states of a parameter, or of all (None) that are in the groups now; on all ranks together."""


class LiveStates(MutableMapping[nn.Parameter, dict[str, Any]]):
    """`optimizer.state`: the states of each parameter since its first step, as copies. Assign them to change them.

    `state[p] = {**state[p], "exp_avg": value}`; what changes a copy is lost. A parameter without states begins anew.

    `state_access`: reads them; `optimizer`: their optimizer.
    """

    def __init__(self, state_access: StateAccess, optimizer: ExternalStateOptimizer) -> None:
        self._state_access, self._optimizer, self._counts = state_access, optimizer, optimizer.step_counts

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Copies of its states. Raises KeyError: it has not taken part in a step."""
        if not self._counts.get(id(parameter)):
            raise KeyError(parameter)
        key = id(parameter)
        numbers = {name: scalar.to_value() for name, scalar in self._optimizer.numbers(key).items()}
        numbers["step"] = torch.tensor(float(self._counts[key]), dtype=torch.float32, device="cpu")
        if not self._optimizer.counts_steps:
            del numbers["step"]
        return {**numbers, **self._optimizer.visible_states(key, self._state_access.read_states(parameter))}

    def __setitem__(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        """Replace its states; collective. Raises the errors of `load_state_dict`."""
        self._state_access.check_open("state")  # before numbers are replaced: array states may be refused after them
        self._optimizer.check_states([states])
        self._state_access.allocate_states(parameter)
        self._optimizer.replace_all_states([(parameter, states)])

    def __delitem__(self, parameter: nn.Parameter) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        self[parameter] = {}

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (p for group in self._optimizer.param_groups for p in group["params"] if self._counts.get(id(p)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return bool(self._counts.get(id(parameter)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} parameters)"


class GroupTensors(Sequence[torch.Tensor]):
    """One tensor for each param group, made on access.

    `groups`: the optimizer's; `read`: group -> tensor.
    """

    def __init__(self, groups: list[dict[str, Any]], read: Any) -> None:
        self._groups, self._read = groups, read

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        return self._read(self._groups[number])


class ExternalStateOptimizer(torch.optim.Optimizer):
    """An update rule over states that are stored elsewhere: it counts updates, and shows its states as torch does.

    `trained`: the rule, and the param groups, which stay live.

    Attributes:
        counts_steps: a parameter's state has `step`.
    """

    state: Any
    counts_steps = True
    _state_access: StateAccess | None = None

    def __init__(self, trained: TrainedParameters) -> None:
        self.rules, self.frozen = trained.rules, trained.frozen
        # With two rules each group has the options of its own: `betas` in a group of Muon would look like Adam's.
        super().__init__(trained.groups, dict(trained.rules.each[0].defaults) if len(trained.rules.each) == 1 else {})
        self.param_groups = trained.groups
        self.step_counts: dict[int, int] = {}  # id(parameter) -> updates so far; torch counts per parameter too.
        # id(parameter) -> its state besides array states, for rules that have more.
        self.progress: dict[int, Progress] = {}
        # id(parameter) -> its small states that are on this rank, for rules that have some.
        self.small: dict[int, SmallStates] = {}
        self._numbers = self.rules.numbers(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, with the default options of the rule that will update the group."""
        for key, value in self.rules.rule_of(param_group).defaults.items() if len(self.rules.each) > 1 else ():
            param_group.setdefault(key, value)
        super().add_param_group(param_group)

    def step_values(self, index_of: dict[int, int], contributed: Container[int]) -> dict[int, Any]:
        """The fixed values, in the step that is taken now, of every parameter that has a gradient.

        `index_of`: id(parameter) -> parameter index; `contributed`: indices of parameters with a gradient. Raises
        ConfigError: param groups have options that the rule does not support.
        """
        for rule in self.rules.each:
            rule.on_step_begin()
        values: dict[int, Any] = {}
        for group in self.param_groups:
            rule = self.rules.rule_of(group)
            for parameter in group["params"]:
                key = id(parameter)
                index = index_of.get(key)
                if index is not None and index in contributed:
                    self._check_rule(parameter, rule)
                    count = self.step_counts.get(key, 0) + 1
                    values[index] = rule.values(group, count, self.progress.get(key))
        return values

    def count_step(self, index_of: dict[int, int], values: Mapping[int, Any]) -> None:
        """A step is taken with these values: it is counted for every parameter that has some, as in torch."""
        for group in self.param_groups:
            changed: Mapping[str, Any] = {}
            rule = self.rules.rule_of(group)
            for parameter in group["params"]:
                key = id(parameter)
                index = index_of.get(key, -1)
                if index in values:
                    self.step_counts[key] = self.step_counts.get(key, 0) + 1
                    progress, changed = rule.after_update(values[index])
                    if progress is not None:
                        self.progress[key] = progress
            group.update(changed)

    def small_states(self, index_of: Mapping[int, int], wanted: Container[int]) -> dict[int, SmallStates]:
        """Parameter index -> the object with its small states, for an update; empty if no rule has any."""
        if not self.has_small_states:
            return {}
        return {i: self.small.setdefault(key, SmallStates()) for key, i in index_of.items() if i in wanted}

    @property
    def has_small_states(self) -> bool:
        return any(rule.small for rule in self.rules.each)

    def small_shapes(self, parameter: torch.Tensor) -> Shapes:
        """Shapes of the small states that a parameter has after its first update."""
        rule = self._rule(id(parameter))
        return rule.small_shapes(parameter.shape) if rule.small else {}

    def named_small(self, names: Mapping[int, str]) -> dict[str, dict[str, torch.Tensor]]:
        """Copies on the host of all small states of this rank, by the parameters' names.

        `names`: id(parameter) -> its name; other parameters are left out.
        """
        copies = {names[key]: small.to_host() for key, small in self.small.items() if key in names}
        return {name: tensors for name, tensors in copies.items() if tensors}

    def load_small(self, named: Mapping[str, SmallTensors], names: Mapping[int, str]) -> None:
        """Replace the small states of all parameters in `names` by those that `named_small` returned, or by none."""
        for key, name in names.items():
            self.small.pop(key, None)
            if name in named:
                self.small[key] = SmallStates(named[name])

    # ---- the numbers in the state of a parameter -------------------------------------------------------

    def numbers(self, key: int) -> dict[str, Scalar]:
        """Numbers in a parameter's state, by torch's names; always with `step`. `key`: id(parameter)."""
        progress = self.progress.get(key)
        scalars = {name: scalar for name, scalar in progress.scalars if scalar.value is not None} if progress else {}
        return {"step": Scalar(self.step_counts.get(key, 0)), **scalars}

    def saved_numbers(self, key: int) -> dict[str, Scalar]:
        """`numbers` for a checkpoint: also marks states that no update of the parameter has made so far.

        `key`: id(parameter).
        """
        progress, numbers = self.progress.get(key), self.numbers(key)
        if progress is None:
            return numbers
        scalar_names = {name for name, _ in progress.scalars}
        for name in self._state_names(self._rule(key)):
            if name not in progress.present and name not in numbers:
                numbers[ABSENT + name] = Scalar(NOTHING if name in scalar_names else MISSING)
        return numbers

    def number_names(self) -> list[str]:
        """All names that `saved_numbers` may have, besides `step`."""
        states = (name for rule in self.rules.each for name in self._state_names(rule))
        numbers = (name for rule in self.rules.each for name in rule.scalars)
        return list(dict.fromkeys([*numbers, *(ABSENT + name for name in states)]))

    def _state_names(self, rule: Rule) -> list[str]:
        return [*rule.states, *rule.scalars]

    def _rule(self, key: int) -> Rule:
        """The rule that updates a parameter."""
        if len(self.rules.each) == 1:
            return self.rules.each[0]
        numbers = self._numbers if key in self._numbers else self.rule_numbers()
        return self.rules.each[numbers.get(key, 0)]

    def rule_numbers(self) -> dict[int, int]:
        """id(parameter) -> number of the rule whose states it has; a new parameter's is its group's."""
        numbers = self.rules.numbers(self.param_groups)
        self._numbers = {key: self._numbers.get(key, number) for key, number in numbers.items()}
        return self._numbers

    def _check_rule(self, parameter: torch.Tensor, rule: Rule) -> None:
        """Raise ConfigError if the parameter's states are of another rule than its group's."""
        state_rule = self._rule(id(parameter))
        if state_rule is not rule:
            raise ConfigError(
                f"param_groups: a parameter of shape {tuple(parameter.shape)} is in a group of {rule.name}, but its "
                f"states are of {state_rule.name}, whose group it was in when it was first planned; put it back, or "
                f"set {self.rules.flag} before zero.initialize"
            )

    def default_group(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        """The first param group with the default rule of such a parameter."""
        flag = self.rules.default(name, parameter)
        matching = (group for group in self.param_groups if bool(group.get(self.rules.flag)) == flag)
        return next(matching, self.param_groups[0])

    def visible_states(self, key: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that torch's optimizer would have for a parameter; before the first update, its initial values.

        `key`: id(parameter); `tensors`: by name, as they are stored.
        """
        progress, fills = self.progress.get(key), self._rule(key).fills
        if progress is not None:
            present = {*progress.present, *self._rule(key).small}
            return {name: tensors[name] for name in tensors if name in present}
        if self.step_counts.get(key, 0):
            return dict(tensors)
        return {name: torch.full_like(tensor, fills.get(name, 0.0)) for name, tensor in tensors.items()}

    def set_numbers(self, key: int, saved: Mapping[str, torch.Tensor]) -> None:
        """Continue a parameter from the values of `saved_numbers`, and from its array states.

        `key`: id(parameter); `saved`: of shape (); missing numbers begin anew.
        """
        self.step_counts[key] = count = int(saved["step"].item()) if "step" in saved else 0
        self.progress.pop(key, None)
        rule = self._rule(key)
        absent = {name: int(saved[ABSENT + name].item()) for name in self._state_names(rule) if ABSENT + name in saved}
        examples = {name: example for name, example in rule.scalars.items() if name not in absent}
        if count and examples.keys() <= saved.keys():
            scalars = [(name, example.convert(saved[name])) for name, example in examples.items()]
            scalars += [(name, Scalar(None)) for name, why in absent.items() if why == NOTHING]
            present = tuple(name for name in rule.states if name not in absent)
            self.progress[key] = Progress(tuple(scalars), present)

    def numbers_missing(self, key: int, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """Numbers that an updated parameter must have and `saved` lacks: `saved` is of another optimizer."""
        if "step" not in saved or not int(saved["step"].item()):
            return []
        return [name for name in self._rule(key).scalars if name not in saved and ABSENT + name not in saved]

    def forget_parameter(self, key: int) -> None:
        """Drop the numbers and small states of a parameter that is not trained any more."""
        self.step_counts.pop(key, None)
        self.progress.pop(key, None)
        self.small.pop(key, None)

    # ---- all states ------------------------------------------------------------------------------------

    def set_state_access(self, state_access: StateAccess) -> None:
        """Read and write states through `state_access` from now on."""
        self._state_access = state_access
        self.state = LiveStates(state_access, self)

    def drop_states(self) -> None:
        """The engine is closed: the states are gone, and clients that clean up see an empty dict."""
        self.__dict__["state"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises StateError: `state` would be replaced by an object that training does not use."""
        if name == "state" and isinstance(self.__dict__.get(name), LiveStates) and not isinstance(value, LiveStates):
            raise StateError(
                f"optimizer.state: it cannot be replaced by a {type(value).__name__}, because the states are kept "
                "elsewhere; load states with load_state_dict, or make a new optimizer to start without any"
            )
        super().__setattr__(name, value)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """As torch's: groups, and copies of all states on the host, the same on every rank; collective.

        Raises BudgetError: the host has no room for the states; `engine.save_checkpoint` needs none.
        """
        if self._state_access is not None:
            if self.state:  # a closed engine has no states
                self._state_access.check_open("state_dict")
            elements = sum(p.numel() * len(self._rule(id(p)).states) for p in self.state)
            elements += sum(shape.numel() for p in self.state for shape, _ in self.small_shapes(p).values())
            self._state_access.check_room(STATE_BYTES * elements)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and states of a `state_dict`; groups stay the same objects. Collective.

        Raises ConfigError: it has other groups; nothing has changed.
        """
        if self._state_access is not None:
            self._state_access.check_open("load_state_dict")
            self._state_access.allocate_states()  # parameters may join the groups by it
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        saved_groups = state_dict["param_groups"]
        sizes, expected = ([len(group["params"]) for group in groups] for groups in (saved_groups, self.param_groups))
        if sizes != expected:
            raise ConfigError(f"optimizer.load_state_dict: expected groups of {expected} parameters, got {sizes}")
        check_flags(self, saved_groups, "optimizer.load_state_dict", "the given state")
        self.check_states(state_dict["state"].values())
        places = [place for group in saved_groups for place in group["params"]]
        states = [state_dict["state"].get(place, {}) for place in places]
        self.replace_all_states(list(zip(self._parameters(), states, strict=True)))
        for group, options in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def replace_all_states(self, pairs: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        """Replace the states of these parameters; empty states: it has none, as before its first step."""
        for parameter, states in pairs:
            self._check_small(parameter, states)
        for parameter, states in pairs:
            if self._state_access is None:
                self.forget_parameter(id(parameter))
                continue
            updated = bool(self.step_counts.get(id(parameter)))
            tensors = self.replace_numbers(parameter, states)
            if updated and not states:  # the next first update starts from the stored array states, so clear them
                stored, names = self._state_access.read_states(parameter), self._rule(id(parameter)).states
                tensors = {name: torch.zeros_like(stored[name]) for name in names}
            for name, value in tensors.items():
                self._state_access.write_state(parameter, name, value)

    def replace_numbers(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Replace the numbers of a parameter, and return the values of its tensors, by name."""
        self.forget_parameter(id(parameter))
        if not states:
            return {}
        rule = self._rule(id(parameter))
        names = (*rule.states, *rule.small)
        tensors = {name: states[name] for name in names if states.get(name) is not None}
        self.set_numbers(id(parameter), self._numbers_in(rule, states, tensors))
        return tensors

    def _numbers_in(
        self, rule: Rule, states: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The argument of `set_numbers`, from a parameter's states in a `state_dict`."""
        numbers = {
            name: Scalar.from_value(value).to_tensor()
            for name, value in states.items()
            if isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            if name not in tensors
        }
        if tensors:  # a class that does not count steps has taken at least one
            numbers.setdefault("step", torch.tensor(1, device="cpu"))
        for name in rule.states:
            if name not in tensors:
                numbers[ABSENT + name] = torch.tensor(NOTHING if name in states else MISSING, device="cpu")
        return numbers

    def _check_small(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:
        """Raise ConfigError if a parameter's states lack small ones, or have them in another shape."""
        for name, (shape, _) in (self.small_shapes(parameter) if states else {}).items():
            found = tuple(states[name].shape) if isinstance(states.get(name), torch.Tensor) else "none"
            if found != tuple(shape):
                raise ConfigError(
                    f"optimizer.load_state_dict: {name} of a parameter of shape {tuple(parameter.shape)}: expected a "
                    f"tensor of shape {tuple(shape)}, got {found}; load a state dict that was saved from the same "
                    "model"
                )

    def check_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Raise ConfigError if `states`, one for each parameter, are from another kind of optimizer.

        Averages (`ema`) are ignored: the states of any optimizer may have them or lack them.
        """
        names = {name for rule in self.rules.each for name in (*self._state_names(rule), *rule.small)}
        for state in states:
            wide = {name for name, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
            shaped = wide - {EMA}
            fits = (
                shaped & {*self._state_names(rule), *rule.small}
                and set(rule.states if isinstance(rule, AdamRule) else rule.scalars) <= state.keys()
                for rule in map(inner_rule, self.rules.each)
            )
            if shaped and not any(fits):
                raise ConfigError(
                    f"optimizer.load_state_dict: {self.rules.names} keeps {', '.join(sorted(names)) or 'nothing'} for "
                    f"each parameter, got {', '.join(sorted(state))}; load it into the kind of optimizer that was "
                    "saved"
                )


def check_flags(optimizer: ExternalStateOptimizer, saved: Sequence[Mapping[str, Any]], what: str, source: str) -> None:
    """Raise ConfigError if a saved group has another update rule than the present one of its number.

    `what`: the call; `source`: where the saved groups are.
    """
    flag = optimizer.rules.flag
    for number, (group, options) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        if flag and flag in options and bool(group.get(flag)) != bool(options[flag]):
            raise ConfigError(
                f"{what}: param group {number}: expected {flag} {options[flag]} as in {source}, got {group.get(flag)}; "
                "set it in the group when the engine is made, or do not load optimizer states"
            )


class ZeroOptimizer(ExternalStateOptimizer):
    """The optimizer of an engine; its states are where the plan has put them.

    Args:
        trained: the rule, and the param groups, which stay live.
        take_step: called by `step()`; the engine's boundary step.
        clear: called by `zero_grad()`.
        loss_scaler: the engine's.

    Attributes:
        user_optimizer: the optimizer object that the user passed, if any.
        overflow: the last step was skipped.
        _global_grad_norm: as `engine.get_global_grad_norm()`; scripts look for it here.
    """

    overflow = False
    _global_grad_norm: float | None = None

    def __init__(
        self,
        trained: TrainedParameters,
        take_step: Callable[[], None],
        clear: Callable[[], None],
        loss_scaler: LossScaler,
    ) -> None:
        super().__init__(trained)
        self.user_optimizer = trained.user_optimizer
        self._take_step, self._clear, self.loss_scaler = take_step, clear, loss_scaler
        self.offloader: Any = None  # The engine.

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the step that `engine.step()` takes on an accumulation boundary.

        Raises StateError: a closure was passed: it would run the model inside the step.
        """
        if closure is not None:
            raise StateError(
                "optimizer.step(closure): closures are not supported; run forward and backward before step()"
            )
        with torch.autograd.profiler.record_function(PROFILED):
            self._take_step()

    step.hooked = True  # type: ignore[attr-defined] # else torch wraps it and calls the hooks a second time

    def set_step_called(self) -> None:
        """Mark that a step was taken before the scheduler's; otherwise torch's schedulers warn of a wrong order."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._clear()

    # ---- hooks of torch's optimizers -------------------------------------------------------------------

    def call_pre_hooks(self) -> None:
        """Call the pre-hooks of a requested step; the step uses their changes of param groups and gradients."""
        self._call_hooks([(self, hook) for hook in torchs._global_optimizer_pre_hooks.values()] + self._hooks(PRE))

    def call_post_hooks(self) -> None:
        self._call_hooks(self._hooks(POST) + [(self, hook) for hook in torchs._global_optimizer_post_hooks.values()])

    def _hooks(self, kind: str) -> list[tuple[Any, Any]]:
        optimizers = [self] if self.user_optimizer is None else [self, self.user_optimizer]
        return [(optimizer, hook) for optimizer in optimizers for hook in getattr(optimizer, kind, {}).values()]

    def _call_hooks(self, hooks: list[tuple[Any, Any]]) -> None:
        for optimizer, hook in hooks:
            hook(optimizer, (), {})

    # ---- names of DeepSpeed ----------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizers wrap another one; here it is the same object."""
        return self

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        self._require_offloader().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        self._require_offloader().reload_states(non_blocking)

    @property
    def offloaded_states(self) -> set[Any]:
        return set(self._require_offloader().offloaded_states)

    def _require_offloader(self) -> Any:
        if self.offloader is None:
            raise StateError("optimizer.offload_states: the optimizer does not belong to an engine")
        return self.offloader

    # The loss scale; whether overflows change it; and the number of steps, skipped ones too, which only a dynamic scale
    # counts.
    cur_scale = loss_scale = property(
        lambda self: self.loss_scaler.cur_scale,
        lambda self, value: setattr(self.loss_scaler, "cur_scale", float(value)),
    )
    dynamic_loss_scale = property(lambda self: self.loss_scaler.dynamic)
    cur_iter = property(lambda self: self.loss_scaler.cur_iter)

    @property
    def loss_scale_config(self) -> LossScaler:
        """The scale and its rule, under the name in DeepSpeed's optimizer of stage 0."""
        return self.loss_scaler

    def override_loss_scale(self, loss_scale: float) -> None:
        """Set a static scale. Allowed only between steps, like every change of the scale."""
        self.loss_scaler.dynamic = False
        self.cur_scale = loss_scale

    def needs_scaler(self) -> bool:
        """True: a loss has to be scaled before its backward."""
        return self.loss_scaler.is_needed


def learning_rates(optimizer: ZeroOptimizer | None) -> list[float]:
    """The learning rate of each param group; 0 if the group has none because the class finds it itself."""
    return [float(group["lr"] or 0.0) for group in optimizer.param_groups] if optimizer is not None else []


def momentum_of(optimizer: ZeroOptimizer | None) -> list[Any]:
    """The betas of each param group, or its momentum."""
    groups = optimizer.param_groups if optimizer is not None else []
    return [group.get("betas", group.get("momentum", 0.0)) for group in groups]
