"""An optimizer's states as torch's users know them: `optimizer.state[parameter]["exp_avg"]`, read on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import ConfigError

BYTES_PER_ELEMENT = 8
"""Of both moments in fp32, as they are given out."""


class KeptStates(Protocol):
    """Where the states of an engine's parameters are."""

    def read(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of the states, fp32 on the host, in the parameter's shape; on all ranks together."""

    def write(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace a state, on all ranks together."""

    def check_room(self, nbytes: int) -> None:
        """Raise BudgetError if the host has no room for so much."""


class LiveStates(Mapping[nn.Parameter, dict[str, Any]]):
    """`optimizer.state`: what each parameter has since its first step. Copies: change them with `safe_set_*`.

    Args:
        kept: reads them.
        counts: id(parameter) -> steps so far.
        groups: the optimizer's.
    """

    def __init__(self, kept: KeptStates, counts: dict[int, int], groups: list[dict[str, Any]]) -> None:
        self._kept, self._counts, self._groups = kept, counts, groups

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Copies of its states. Raises KeyError: it has not taken part in a step."""
        if not self._counts.get(id(parameter)):
            raise KeyError(parameter)
        return {"step": torch.tensor(float(self._counts[id(parameter)])), **self._kept.read(parameter)}

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Parameters that have states."""
        return (p for group in self._groups for p in group["params"] if self._counts.get(id(p)))

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
    state: Any
    _kept: KeptStates | None = None

    def keep_states_in(self, kept: KeptStates) -> None:
        """States are read there from now on."""
        self._kept = kept
        self.state = LiveStates(kept, self.step_counts, self.param_groups)

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
            self._kept.check_room(BYTES_PER_ELEMENT * sum(p.numel() for p in self.state))
        found: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up groups and states of a `state_dict`; groups stay the same objects. All ranks come here.

        Raises:
            ConfigError: it has other groups; nothing has changed.
        """
        given = state_dict["param_groups"]
        sizes, wanted = ([len(group["params"]) for group in groups] for groups in (given, self.param_groups))
        if sizes != wanted:
            raise ConfigError(f"optimizer.load_state_dict: expected groups of {wanted} parameters, got {sizes}")
        for group, options in zip(self.param_groups, given, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
        places = [place for group in given for place in group["params"]]
        for place, parameter in zip(places, self._parameters(), strict=True):
            states = dict(state_dict["state"].get(place, {}))
            self.step_counts.pop(id(parameter), None)
            if states and self._kept is not None:
                self.step_counts[id(parameter)] = int(states.pop("step"))
                for key, value in states.items():
                    self._kept.write(parameter, key, value)
