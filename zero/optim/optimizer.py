"""The optimizer the user holds: live param groups in front, the sub-group pipeline behind.

It is a `torch.optim.Optimizer`, so learning-rate schedulers and clients that write into `param_groups` work as they do
with torch. What is read from the groups is read at `step()`. Its states are read when they are asked for:
`optimizer.state[parameter]["exp_avg"]` is a copy.

[Note: hooks] torch calls hooks where `optimizer.step()` is called: the engine's optimizer's, those of the one handed
over, and global ones. A step of the engine is the same step whoever asks for it, so they are called once each, however
it was asked for: the first before it is decided, with the gradients there to be read or replaced
(`safe_get_full_grad`), also where the step turns out to be skipped; the others after a step that was taken, and after
the schedule that the engine steps.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import optimizer as torchs

from offload.errors import ConfigError, StateError
from zero.optim.averages import EMA, innermost
from zero.optim.loss_scale import LossScaler
from zero.optim.rules import AdamRule, Progress, Rule, Scalar, Trained
from zero.optim.small_states import Shapes, Small, SmallStates

# Before the name of a state: a number in checkpoints that says that the parameter has not got it yet. Its state has no
# such key, or None.
ABSENT, MISSING, NOTHING = "no_", 1, 2
STATE_BYTES = 4  # Of an element of a state, fp32, as it is given out.
PRE, POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
# The name of a step in profiles, as torch makes it.
PROFILED = "Optimizer.step#ZeroOptimizer.step"


class KeptStates(Protocol):
    """Where the states of an engine's parameters are."""

    def read(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of the states, fp32 on the host, in the parameter's shape; on all ranks together."""

    def write(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace a state, on all ranks together."""

    def check_room(self, nbytes: int) -> None:
        """Raise BudgetError if the host has no room for so much."""

    def check_open(self, what: str) -> None:
        """Raise StateError if `what`, a method of the optimizer, must not be called now."""


class LiveStates(Mapping[nn.Parameter, dict[str, Any]]):
    """`optimizer.state`: what each parameter has since its first step. Copies: give them back to change them.

    `kept`: reads them; `optimizer`: whose they are.
    """

    def __init__(self, kept: KeptStates, optimizer: KeptOptimizer) -> None:
        self._kept, self._optimizer, self._counts = kept, optimizer, optimizer.step_counts

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Copies of its states. Raises KeyError: it has not taken part in a step."""
        if not self._counts.get(id(parameter)):
            raise KeyError(parameter)
        key = id(parameter)
        numbers = {name: scalar.make() for name, scalar in self._optimizer.numbers(key).items()}
        numbers["step"] = torch.tensor(float(self._counts[key]))
        if not self._optimizer.counts_steps:
            del numbers["step"]
        return {**numbers, **self._optimizer.made(key, self._kept.read(parameter))}

    def __setitem__(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        """Replace its states; all ranks come here. Raises as `load_state_dict`."""
        self._optimizer.check_states([states])
        self._optimizer.take_states(parameter, states)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (p for group in self._optimizer.param_groups for p in group["params"] if self._counts.get(id(p)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return bool(self._counts.get(id(parameter)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} parameters)"


class Groups(Sequence[torch.Tensor]):
    """One tensor for each param group, made when it is asked for.

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


class KeptOptimizer(torch.optim.Optimizer):
    """An update rule over states that are kept elsewhere: what it counts, and its states as torch's.

    `trained`: param groups, which stay the ones that are read, and the rule.

    Attributes:
        counts_steps: a state of the class has `step`.
    """

    state: Any
    counts_steps = True
    _kept: KeptStates | None = None

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained.groups, dict(trained.rules.each[-1].defaults))
        self.param_groups = trained.groups
        self.rules = trained.rules
        self.step_counts: dict[int, int] = {}  # id(parameter) -> updates so far; torch counts per parameter too.
        # id(parameter) -> what else its state has besides planes, of rules that keep more.
        self.progress: dict[int, Progress] = {}
        # id(parameter) -> its small states, as far as they are on this rank; of rules that keep some.
        self.small: dict[int, SmallStates] = {}
        self._numbers: dict[int, int] = {}  # id(parameter) -> number of its rule; made again when one is missing.

    def values(self, index_of: dict[int, int], contributed: Container[int]) -> dict[int, Any]:
        """What is fixed of every parameter that has a gradient in the step that is taken now.

        `index_of`: id(parameter) -> parameter index; `contributed`: indices of parameters with a gradient. Raises
        ConfigError: param groups ask for what the rule cannot do.
        """
        for rule in self.rules.each:
            rule.begin()
        values: dict[int, Any] = {}
        for group in self.param_groups:
            rule = self.rules.of(group)
            for parameter in group["params"]:
                key = id(parameter)
                index = index_of.get(key)
                if index is not None and index in contributed:
                    count = self.step_counts.get(key, 0) + 1
                    values[index] = rule.values(group, count, self.progress.get(key))
        return values

    def count_step(self, index_of: dict[int, int], values: Mapping[int, Any]) -> None:
        """A step is taken with these values: every parameter that has some counts it, as torch does."""
        for group in self.param_groups:
            changed: Mapping[str, Any] = {}
            rule = self.rules.of(group)
            for parameter in group["params"]:
                key = id(parameter)
                index = index_of.get(key, -1)
                if index in values:
                    self.step_counts[key] = self.step_counts.get(key, 0) + 1
                    progress, changed = rule.after(values[index])
                    if progress is not None:
                        self.progress[key] = progress
            group.update(changed)

    def small_states(self, index_of: Mapping[int, int], wanted: Container[int]) -> dict[int, SmallStates]:
        """Parameter index -> where an update finds small states and leaves them; empty if no rule keeps any."""
        if not self.keeps_small:
            return {}
        return {i: self.small.setdefault(key, SmallStates()) for key, i in index_of.items() if i in wanted}

    @property
    def keeps_small(self) -> bool:
        return any(rule.small for rule in self.rules.each)

    def small_shapes(self, parameter: torch.Tensor) -> Shapes:
        """Of the small states that a parameter has once it is updated."""
        rule = self._rule(id(parameter))
        return rule.small_shapes(parameter.shape) if rule.small else {}

    def named_small(self, names: Mapping[int, str]) -> dict[str, dict[str, torch.Tensor]]:
        """Copies on the host of all small states of this rank, by the parameters' names.

        `names`: id(parameter) -> its name; the others are left out.
        """
        held = {names[key]: small.on_host() for key, small in self.small.items() if key in names}
        return {name: tensors for name, tensors in held.items() if tensors}

    def take_small(self, named: Mapping[str, Small], names: Mapping[int, str]) -> None:
        """Of the parameters that have names: go on from what `named_small` has given, and from nothing else."""
        for key, name in names.items():
            self.small.pop(key, None)
            if name in named:
                self.small[key] = SmallStates(named[name])

    # ---- what a parameter's state has besides planes ---------------------------------------------------

    def numbers(self, key: int) -> dict[str, Scalar]:
        """What a parameter's state has besides planes, by torch's names; `step` always. `key`: id(parameter)."""
        progress = self.progress.get(key)
        more = {name: scalar for name, scalar in progress.scalars if scalar.value is not None} if progress else {}
        return {"step": Scalar(self.step_counts.get(key, 0)), **more}

    def saved_numbers(self, key: int) -> dict[str, Scalar]:
        """`numbers` for a checkpoint: they also say what no update of the parameter has made so far.

        `key`: id(parameter).
        """
        progress, found = self.progress.get(key), self.numbers(key)
        if progress is None:
            return found
        named = {name for name, _ in progress.scalars}
        for name in self._state_names(self._rule(key)):
            if name not in progress.present and name not in found:
                found[ABSENT + name] = Scalar(NOTHING if name in named else MISSING)
        return found

    def number_names(self) -> list[str]:
        """All names that `saved_numbers` may have, besides `step`."""
        every = (name for rule in self.rules.each for name in self._state_names(rule))
        numbers = (name for rule in self.rules.each for name in rule.scalars)
        return list(dict.fromkeys([*numbers, *(ABSENT + name for name in every)]))

    def _state_names(self, rule: Rule) -> list[str]:
        return [*rule.states, *rule.scalars]

    def _rule(self, key: int) -> Rule:
        """What updates a parameter."""
        if len(self.rules.each) == 1:
            return self.rules.each[0]
        if key not in self._numbers:
            self._numbers = self.rules.numbers(self.param_groups)
        return self.rules.each[self._numbers.get(key, 0)]

    def default_group(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        """The first param group whose rule such a parameter has if nobody says another."""
        flag = self.rules.default(name, parameter)
        alike = (group for group in self.param_groups if bool(group.get(self.rules.flag)) == flag)
        return next(alike, self.param_groups[0])

    def made(self, key: int, planes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of a parameter's planes those that torch's optimizer would have; before the first update, as it makes them.

        `key`: id(parameter); `planes`: by name, as they are stored.
        """
        progress, fills = self.progress.get(key), self._rule(key).fills
        if progress is not None:
            there = {*progress.present, *self._rule(key).small}
            return {name: planes[name] for name in planes if name in there}
        if self.step_counts.get(key, 0):
            return dict(planes)
        return {name: torch.full_like(plane, fills.get(name, 0.0)) for name, plane in planes.items()}

    def set_numbers(self, key: int, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `saved_numbers` has said of a parameter, and from its planes.

        `key`: id(parameter); `saved`: of shape (); what is missing begins anew.
        """
        self.step_counts[key] = count = int(saved["step"].item()) if "step" in saved else 0
        self.progress.pop(key, None)
        rule = self._rule(key)
        absent = {name: int(saved[ABSENT + name].item()) for name in self._state_names(rule) if ABSENT + name in saved}
        wanted = {name: like for name, like in rule.scalars.items() if name not in absent}
        if count and wanted.keys() <= saved.keys():
            scalars = [(name, like.like(saved[name])) for name, like in wanted.items()]
            scalars += [(name, Scalar(None)) for name, why in absent.items() if why == NOTHING]
            present = tuple(name for name in rule.states if name not in absent)
            self.progress[key] = Progress(tuple(scalars), present)

    def forget(self, key: int) -> None:
        """Nobody trains the parameter any more."""
        self.step_counts.pop(key, None)
        self.progress.pop(key, None)
        self.small.pop(key, None)

    # ---- states, whole ---------------------------------------------------------------------------------

    def keep_states_in(self, kept: KeptStates) -> None:
        """States are read there from now on."""
        self._kept = kept
        self.state = LiveStates(kept, self)

    def lose_states(self) -> None:
        """The engine is closed: nothing is left of them, and clients that tidy up find them empty."""
        self.__dict__["state"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises StateError: states are to be replaced by others, which nobody would train with."""
        if name == "state" and isinstance(self.__dict__.get(name), LiveStates) and not isinstance(value, LiveStates):
            raise StateError(
                f"optimizer.state: a {type(value).__name__} cannot take its place, states are kept elsewhere; give "
                "them back by load_state_dict, or make a new optimizer to begin without any"
            )
        super().__setattr__(name, value)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """torch's: groups, and copies of all states on the host, the same on every rank; all of them come here.

        Raises BudgetError: the host has no room for that much; `engine.save_checkpoint` needs none.
        """
        if self._kept is not None:
            if self.state:  # of an engine that is closed nothing is left
                self._kept.check_open("state_dict")
            elements = sum(p.numel() * len(self._rule(id(p)).states) for p in self.state)
            elements += sum(shape.numel() for p in self.state for shape, _ in self.small_shapes(p).values())
            self._kept.check_room(STATE_BYTES * elements)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up groups and states of a `state_dict`; groups stay the same objects. All ranks come here.

        Raises ConfigError: it has other groups; nothing has changed.
        """
        if self._kept is not None:
            self._kept.check_open("load_state_dict")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        given = state_dict["param_groups"]
        sizes, wanted = ([len(group["params"]) for group in groups] for groups in (given, self.param_groups))
        if sizes != wanted:
            raise ConfigError(f"optimizer.load_state_dict: expected groups of {wanted} parameters, got {sizes}")
        self.check_states(state_dict["state"].values())
        places = [place for group in given for place in group["params"]]
        states = [state_dict["state"].get(place, {}) for place in places]
        pairs = list(zip(self._parameters(), states, strict=True))
        for parameter, state in pairs:
            self._check_small(parameter, state)
        self.take_all(pairs)
        for group, options in zip(self.param_groups, given, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def take_all(self, given: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        for parameter, states in given:
            self.take_states(parameter, states)

    def take_states(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        """Replace the states of one parameter; empty: it has none, as before its first step."""
        if self._kept is None:
            self.forget(id(parameter))
            return
        self._check_small(parameter, states)
        updated = bool(self.step_counts.get(id(parameter)))
        planes = self.take_numbers(parameter, states)
        if updated and not states:  # the first update goes on from what is stored
            held, names = self._kept.read(parameter), self._rule(id(parameter)).states
            planes = {name: torch.zeros_like(held[name]) for name in names}
        for name, value in planes.items():
            self._kept.write(parameter, name, value)

    def take_numbers(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """As `take_states`, but for what goes into planes: returns that, by name."""
        self.forget(id(parameter))
        if not states:
            return {}
        rule = self._rule(id(parameter))
        names = (*rule.states, *rule.small)
        planes = {name: states[name] for name in names if states.get(name) is not None}
        self.set_numbers(id(parameter), self._numbers_in(rule, states, planes))
        return planes

    def _numbers_in(
        self, rule: Rule, states: Mapping[str, Any], planes: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What `set_numbers` takes, of a parameter's states in a `state_dict`."""
        numbers = {
            name: Scalar.of(value).tensor()
            for name, value in states.items()
            if isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            if name not in planes
        }
        if planes:  # a class that does not count its steps has made some
            numbers.setdefault("step", torch.tensor(1, device="cpu"))
        for name in rule.states:
            if name not in planes:
                numbers[ABSENT + name] = torch.tensor(NOTHING if name in states else MISSING, device="cpu")
        return numbers

    def _check_small(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:
        """Raise ConfigError if a parameter's states lack small ones, or have them in another shape."""
        for name, (shape, _) in (self.small_shapes(parameter) if states else {}).items():
            found = tuple(states[name].shape) if isinstance(states.get(name), torch.Tensor) else "none"
            if found != tuple(shape):
                raise ConfigError(
                    f"optimizer.load_state_dict: {name} of a parameter of shape {tuple(parameter.shape)}: expected "
                    f"a tensor of shape {tuple(shape)}, got {found}; load what was saved of the same model"
                )

    def check_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Raise ConfigError if they, one for each parameter, are those of another optimizer.

        Averages (`ema`) are no optimizer's: they may come beside any, and be missing beside any.
        """
        known = {name for rule in self.rules.each for name in (*self._state_names(rule), *rule.small)}
        for state in states:
            wide = {name for name, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
            shaped = wide - {EMA}
            fits = (
                shaped & {*self._state_names(rule), *rule.small}
                and set(rule.states if isinstance(rule, AdamRule) else rule.scalars) <= state.keys()
                for rule in map(innermost, self.rules.each)
            )
            if shaped and not any(fits):
                raise ConfigError(
                    f"optimizer.load_state_dict: {self.rules.names} keeps {', '.join(sorted(known)) or 'nothing'} of "
                    f"each parameter, got {', '.join(sorted(state))}; load it into the optimizer that was saved"
                )


class ZeroOptimizer(KeptOptimizer):
    """An engine's: over states that live wherever the plan put them.

    Args:
        trained: param groups, which stay the ones that are read, and the rule.
        take_step: called by `step()`; the engine's boundary step.
        clear: called by `zero_grad()`.
        loss_scaler: the engine's.

    Attributes:
        given: the optimizer object that was handed over, if one was.
        overflow: the last step was skipped.
        _global_grad_norm: as `engine.get_global_grad_norm()`, where scripts look for it.
    """

    overflow = False
    _global_grad_norm: float | None = None

    def __init__(
        self, trained: Trained, take_step: Callable[[], None], clear: Callable[[], None], loss_scaler: LossScaler
    ) -> None:
        super().__init__(trained)
        self.given = trained.given
        self._take_step, self._clear, self.loss_scaler = take_step, clear, loss_scaler
        self.offloader: Any = None  # The engine.

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the step that `engine.step()` takes on an accumulation boundary.

        Raises StateError: a closure was given: it would run the model inside the step.
        """
        if closure is not None:
            raise StateError(
                "optimizer.step(closure): closures are not supported; run forward and backward before step()"
            )
        with torch.autograd.profiler.record_function(PROFILED):
            self._take_step()

    step.hooked = True  # type: ignore[attr-defined] # torch would wrap it, to call the hooks that the engine calls

    def mark_stepped(self) -> None:
        """Tell torch's schedulers that a step was taken before theirs, or they warn of a wrong order."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._clear()

    # ---- hooks of torch's optimizers -------------------------------------------------------------------

    def before_step(self) -> None:
        """A step was asked for; what hooks change in param groups and gradients counts."""
        self._call([(self, hook) for hook in torchs._global_optimizer_pre_hooks.values()] + self._hooks(PRE))

    def after_step(self) -> None:
        self._call(self._hooks(POST) + [(self, hook) for hook in torchs._global_optimizer_post_hooks.values()])

    def _hooks(self, kind: str) -> list[tuple[Any, Any]]:
        optimizers = [self] if self.given is None else [self, self.given]
        return [(each, hook) for each in optimizers for hook in getattr(each, kind, {}).values()]

    def _call(self, hooks: list[tuple[Any, Any]]) -> None:
        for optimizer, hook in hooks:
            hook(optimizer, (), {})

    # ---- names of DeepSpeed ----------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """DeepSpeed wraps another optimizer; this is its own."""
        return self

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        self._with_offloader().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        self._with_offloader().reload_states(non_blocking)

    @property
    def offloaded_states(self) -> set[Any]:
        return set(self._with_offloader().offloaded_states)

    def _with_offloader(self) -> Any:
        if self.offloader is None:
            raise StateError("optimizer.offload_states: the optimizer belongs to no engine")
        return self.offloader

    # What the next loss is multiplied by; does it follow the overflows; and steps so far, skipped ones too, as far as
    # a dynamic scale counts them.
    cur_scale = loss_scale = property(
        lambda self: self.loss_scaler.cur_scale,
        lambda self, value: setattr(self.loss_scaler, "cur_scale", float(value)),
    )
    dynamic_loss_scale = property(lambda self: self.loss_scaler.dynamic)
    cur_iter = property(lambda self: self.loss_scaler.cur_iter)

    @property
    def loss_scale_config(self) -> LossScaler:
        """Where DeepSpeed's optimizer of stage 0 has the scale, and how it moves."""
        return self.loss_scaler

    def override_loss_scale(self, loss_scale: float) -> None:
        """From here on the scale is this one, and static. Between steps only, as with every change of it."""
        self.loss_scaler.dynamic = False
        self.cur_scale = loss_scale

    def needs_scaler(self) -> bool:
        """True: a loss has to be scaled before its backward."""
        return self.loss_scaler.is_needed


def learning_rates(optimizer: ZeroOptimizer | None) -> list[float]:
    """Of each param group; 0 where the class finds it by itself and the group has none."""
    return [float(group["lr"] or 0.0) for group in optimizer.param_groups] if optimizer is not None else []


def momentum_of(optimizer: ZeroOptimizer | None) -> list[Any]:
    """Of each param group its betas, or its momentum."""
    groups = optimizer.param_groups if optimizer is not None else []
    return [group.get("betas", group.get("momentum", 0.0)) for group in groups]
