"""Any element-wise torch optimizer as a rule: its own `step` runs over tiles, with its states bound to our planes.

[Note: how] An optimizer of the user's class is a shallow copy of the user's, with one param group that holds one
parameter: a flat fp32 tile. Its state is what the class has made of that parameter so far, planes cut to the tile,
numbers as they were after the last step. So the class cannot tell a tile from a small parameter, and what is
element-wise gives the bits that it gives for the whole. `zero/optim/probe_optimizer.py` finds out whether a class is.

[Note: numbers] Every tile of a parameter starts from the same numbers and ends with the same ones, which depend on no
element. What they are after a step is found by a step over one element, when the step is fixed.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.kernels import masters
from zero.optim.rules import Progress, Run, Scalar

TILE_NUMEL = 32768
"""torch computes so many elements on one thread, without asking others; and they stay in the cache between operations.
"""
TILE_NUMEL_GPU = 1 << 22
HOOKS = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
)
NOT_OF_THE_CLASS = {"state", "param_groups", "step", *HOOKS}
"""Attributes of an optimizer that are made anew: a scheduler has wrapped `step`, and hooks are of whole steps."""
PER_TENSOR = {"foreach": False, "fused": None, "capturable": False}
"""They would compute the same in another way; on one flat tile, outside any graph, there is nothing to win."""


@dataclass(frozen=True, slots=True)
class TileValues:
    """Of one parameter in one step."""

    options: Mapping[str, Any]
    """Of its param group, as they are now."""
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class Initial:
    """A parameter's state before its first step."""

    fills: Mapping[str, Scalar] = field(default_factory=dict)
    """Planes, by the number that they are full of."""
    numbers: Mapping[str, Scalar] = field(default_factory=dict)


class TiledRule:
    """The rule of one optimizer object.

    Args:
        optimizer: an instance; neither its parameters nor its states are used.
        initial: what its constructor makes of a parameter's state; most make nothing.
        states: names of the planes.
        dtypes: of planes that the class keeps in another dtype than fp32.
        scalars: what else a parameter's state has; the values are examples.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial: Initial | None = None,
        states: tuple[str, ...] = (),
        dtypes: Mapping[str, torch.dtype] | None = None,
        scalars: Mapping[str, Scalar] | None = None,
    ) -> None:
        self.name = type(optimizer).__name__
        self.kind = type(optimizer)
        self.states: tuple[str, ...] = states
        self.scalars: Mapping[str, Scalar] = dict(scalars or {})
        self._initial, self._dtypes = initial or Initial(), dict(dtypes or {})
        self.fills: Mapping[str, float] = {name: float(fill.value or 0) for name, fill in self._initial.fills.items()}
        self.defaults: Mapping[str, Any] = dict(optimizer.defaults)
        self.attributes = {key: value for key, value in vars(optimizer).items() if key not in NOT_OF_THE_CLASS}
        self._options: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        self._known: list[tuple[TileValues, tuple[Progress | None, Mapping[str, Any]]]] = []

    def begin(self) -> None:
        """Param groups are read anew."""
        self._options, self._known = [], []

    def values(self, group: Mapping[str, Any], count: int, progress: Progress | None) -> TileValues:
        """The group's options, all of them; raises ConfigError if they need a state that there is no plane for."""
        options = next((known for held, known in self._options if held is group), None)
        if options is None:
            options = self.options_of(group)
            self._options.append((group, options))
        values = TileValues(options, progress if count > 1 else None)
        made = self.after(values)[0]
        more = set(made.present if made else ()) - set(self.states)
        if more:
            raise ConfigError(
                f"param_groups: with these options {self.name} keeps {', '.join(sorted(more))} of each parameter; when "
                "zero.initialize tried a dozen steps it did not, and there is no room for it. Give any param group "
                "such options then (SGD: a momentum above 0); what is made after more steps cannot be kept"
            )
        return values

    def options_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What the class reads from a param group."""
        options = {key: _plain(value) for key, value in group.items() if key != "params"}
        return options | {key: value for key, value in PER_TENSOR.items() if key in options}

    def after(self, values: Any) -> tuple[Progress | None, Mapping[str, Any]]:
        """A step over one element tells."""
        for known, result in self._known:
            if known.options is values.options and known.progress == values.progress:
                return result
        tile = torch.zeros(1, dtype=torch.float32, device="cpu")
        planes = {name: torch.zeros_like(tile) for name in self.states}
        state, options = self.step(tile, torch.zeros_like(tile), planes, values)
        changed = {key: value for key, value in options.items() if values.options.get(key) != value}
        result = self.progress_of(state), changed
        self._known.append((values, result))
        return result

    def update(self, run: Run, grad_scale: float, threads: int) -> None:
        """Tile by tile; `threads` has no effect, torch uses one for so few elements."""
        numel = TILE_NUMEL if run.weight.device.type == "cpu" else TILE_NUMEL_GPU
        for begin, end, values in run.segments:
            for lo in range(begin, end, numel):
                self._update_tile(run, slice(lo, min(lo + numel, end)), values, grad_scale)

    def _update_tile(self, run: Run, at: slice, values: TileValues, grad_scale: float) -> None:
        weight, planes = run.weight[at], {n: p[at] for n, p in zip(self.states, run.states.planes, strict=True)}
        stored = None if run.master is None else run.master[at]
        tile = weight
        if stored is not None:
            tile = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            masters.whole(tile, weight, stored)
        # A copy: what an optimizer does to `grad` must not be done twice if the update is made again.
        gradient = run.gradient[at].to(torch.float32, copy=True)
        if grad_scale != 1.0:
            gradient.mul_(grad_scale)
        self.step(tile, gradient, planes, values)
        if stored is not None:
            masters.part(weight, stored, tile)

    def step(
        self, tile: Tensor, gradient: Tensor, planes: Mapping[str, Tensor], values: TileValues
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the class over one tile, in place: tile (N,) fp32, and its planes (N,) fp32.

        Returns:
            The state it leaves, and the options of its param group.
        """
        parameter = torch.nn.Parameter(tile)
        parameter.grad = gradient
        known = values.progress
        twin = self.twin(parameter, values.options, self.fresh(tile) if known is None else self._bound(planes, known))
        self.kind.step(twin)
        left = dict(twin.state.get(parameter, {}))
        for name, plane in planes.items():
            made = left.get(name)
            if made is not None and made is not plane:
                plane.copy_(made.detach().view(-1))
        if not parameter.detach().is_set_to(tile):
            tile.copy_(parameter.detach())
        return left, {key: value for key, value in twin.param_groups[0].items() if key != "params"}

    def twin(self, parameter: Tensor, options: Mapping[str, Any], state: dict[str, Any]) -> torch.optim.Optimizer:
        """An optimizer like the user's with this one parameter."""
        twin: torch.optim.Optimizer = object.__new__(self.kind)
        vars(twin).update(self.attributes)
        vars(twin).update({hooks: OrderedDict() for hooks in HOOKS})
        twin.param_groups = [{**options, "params": [parameter]}]
        twin.state = defaultdict(dict)
        if state:
            twin.state[parameter] = state
        return twin

    def fresh(self, tile: Tensor) -> dict[str, Any]:
        """A parameter's state before its first step."""
        fills = self._initial.fills.items()
        planes = {name: torch.full_like(tile, scalar.value or 0, dtype=scalar.dtype) for name, scalar in fills}
        return {**planes, **{name: scalar.make() for name, scalar in self._initial.numbers.items()}}

    def _bound(self, planes: Mapping[str, Tensor], progress: Progress) -> dict[str, Any]:
        """A parameter's state as the class has left it."""
        state: dict[str, Any] = {name: scalar.make() for name, scalar in progress.scalars}
        for name in progress.present:
            state[name] = planes[name].to(self._dtypes.get(name, torch.float32))
        return state

    def progress_of(self, state: Mapping[str, Any]) -> Progress:
        """What a state is besides its planes."""
        numbers = {k: v for k, v in state.items() if k in self.scalars or _is_number(v)}
        numbers = {k: v for k, v in numbers.items() if v is None or k not in self.states}
        planes = [name for name, value in state.items() if isinstance(value, Tensor) and name not in numbers]
        scalars = tuple((name, Scalar.of(value)) for name, value in numbers.items())
        return Progress(scalars, tuple(planes))


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _plain(value: Any) -> Any:
    """The option; a tensor of one element as its number, so that it stays what it is now."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, list) else value
