"""An optimizer's states as torch's users know them: `optimizer.state[parameter]["exp_avg"]`, read on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import ConfigError
from zero.optim.rules import AdamRule, Rule, Scalar

ABSENT, MISSING, NOTHING = "no_", 1, 2
"""Before the name of a state: a number in checkpoints that says that the parameter has not got it yet. Its state has no
such key, or None.
"""
STATE_BYTES = 4
"""Of an element of a state, fp32, as it is given out."""


class KeptStates(Protocol):
    """Where the states of an engine's parameters are."""

    def read(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of the states, fp32 on the host, in the parameter's shape; on all ranks together."""

    def write(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace a state, on all ranks together."""

    def check_room(self, nbytes: int) -> None:
        """Raise BudgetError if the host has no room for so much."""


class LiveStates(Mapping[nn.Parameter, dict[str, Any]]):
    """`optimizer.state`: what each parameter has since its first step. Copies: give them back to change them.

    Args:
        kept: reads them.
        optimizer: whose they are.
    """

    def __init__(self, kept: KeptStates, optimizer: HasStates) -> None:
        self._kept, self._optimizer, self._counts = kept, optimizer, optimizer.step_counts

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Copies of its states. Raises KeyError: it has not taken part in a step."""
        if not self._counts.get(id(parameter)):
            raise KeyError(parameter)
        key = id(parameter)
        numbers = {name: scalar.make() for name, scalar in self._optimizer.numbers(key).items()}
        planes = self._optimizer.made(key, self._kept.read(parameter))
        return {**numbers, "step": torch.tensor(float(self._counts[key])), **planes}

    def __setitem__(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        """Replace its states; all ranks come here. Raises as `load_state_dict`."""
        self._optimizer.check_states([states])
        self._optimizer.take_states(parameter, states)

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Parameters that have states."""
        return (p for group in self._optimizer.param_groups for p in group["params"] if self._counts.get(id(p)))

    def __len__(self) -> int:
        """How many have."""
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        """True for one that has."""
        return bool(self._counts.get(id(parameter)))

    def __repr__(self) -> str:
        """Without reading any."""
        return f"{type(self).__name__}({len(self)} parameters)"


class Groups(Sequence[torch.Tensor]):
    """One tensor for each param group, made when it is asked for.

    Args:
        groups: the optimizer's.
        read: group -> tensor.
    """

    def __init__(self, groups: list[dict[str, Any]], read: Any) -> None:
        self._groups, self._read = groups, read

    def __len__(self) -> int:
        """Of the groups."""
        return len(self._groups)

    def __getitem__(self, number: Any) -> Any:
        """Of a group. Raises IndexError."""
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        return self._read(self._groups[number])


class HasStates:
    """Mixed into the optimizer; `keep_states_in` is called once the engine is there."""

    param_groups: list[dict[str, Any]]
    step_counts: dict[int, int]
    rule: Rule
    state: Any
    _optimizer_load_state_dict_pre_hooks: Any
    _optimizer_load_state_dict_post_hooks: Any
    _kept: KeptStates | None = None

    def keep_states_in(self, kept: KeptStates) -> None:
        """States are read there from now on."""
        self._kept = kept
        self.state = LiveStates(kept, self)

    def lose_states(self) -> None:
        """The engine is closed: nothing is left of them, and clients that tidy up find them empty."""
        self.state = {}

    def numbers(self, key: int) -> dict[str, Scalar]:
        """The optimizer's."""
        raise NotImplementedError

    def made(self, key: int, planes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The optimizer's."""
        raise NotImplementedError

    def set_numbers(self, key: int, saved: Mapping[str, torch.Tensor]) -> None:
        """The optimizer's."""
        raise NotImplementedError

    def forget(self, key: int) -> None:
        """The optimizer's."""
        raise NotImplementedError

    @property
    def optimizer(self) -> Any:
        """DeepSpeed wraps another optimizer; this is its own."""
        return self

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """torch's: groups, and copies of all states on the host, the same on every rank; all of them come here.

        Raises:
            BudgetError: the host has no room for that much; `engine.save_checkpoint` needs none.
        """
        if self._kept is not None:
            numel = sum(p.numel() for p in self.state)
            self._kept.check_room(STATE_BYTES * len(self.rule.states) * numel)
        found: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up groups and states of a `state_dict`; groups stay the same objects. All ranks come here.

        Raises:
            ConfigError: it has other groups; nothing has changed.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        given = state_dict["param_groups"]
        sizes, wanted = ([len(group["params"]) for group in groups] for groups in (given, self.param_groups))
        if sizes != wanted:
            raise ConfigError(f"optimizer.load_state_dict: expected groups of {wanted} parameters, got {sizes}")
        self.check_states(state_dict["state"].values())
        for group, options in zip(self.param_groups, given, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
        places = [place for group in given for place in group["params"]]
        for place, parameter in zip(places, self._parameters(), strict=True):
            self.take_states(parameter, state_dict["state"].get(place, {}))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def take_states(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        """Replace the states of one parameter; empty: it has none, as before its first step."""
        self.forget(id(parameter))
        if states and self._kept is not None:
            planes = {name: states[name] for name in self.rule.states if states.get(name) is not None}
            self.set_numbers(id(parameter), self._numbers_in(states, planes))
            for name, value in planes.items():
                self._kept.write(parameter, name, value)

    def _numbers_in(self, states: Mapping[str, Any], planes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `set_numbers` takes, of a parameter's states in a `state_dict`."""
        numbers = {
            name: Scalar.of(value).tensor()
            for name, value in states.items()
            if isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            if name not in planes
        }
        if planes:  # a class that does not count its steps has made some
            numbers.setdefault("step", torch.tensor(1, device="cpu"))
        for name in self.rule.states:
            if name not in planes:
                numbers[ABSENT + name] = torch.tensor(NOTHING if name in states else MISSING, device="cpu")
        return numbers

    def check_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Raise ConfigError if they, one for each parameter, are those of another optimizer."""
        known = {*self.rule.states, *self.rule.scalars}
        for state in states:
            shaped = {name for name, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
            needed = set(self.rule.states if isinstance(self.rule, AdamRule) else self.rule.scalars)
            if shaped and not (shaped & known and needed <= state.keys()):
                raise ConfigError(
                    f"optimizer.load_state_dict: {self.rule.name} keeps {', '.join(sorted(known)) or 'nothing'} of "
                    f"each parameter, got {', '.join(sorted(state))}; load it into the optimizer that was saved"
                )
