"""The optimizer the user holds: live param groups in front, the sub-group pipeline behind.

It is a `torch.optim.Optimizer`, so learning-rate schedulers and clients that write into
`param_groups` work as they do with torch. What is read from the groups is read at `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from offload.errors import StateError
from zero.optim.loss_scale import HasLossScale
from zero.optim.rules import Progress, Scalar, Trained
from zero.optim.states import ABSENT, MISSING, NOTHING, HasStates
from zero.optim.step_hooks import CallsHooks

PROFILED = "Optimizer.step#ZeroOptimizer.step"
"""The name of a step in profiles, as torch makes it."""


class ZeroOptimizer(HasStates, HasLossScale, CallsHooks, torch.optim.Optimizer):
    """An update rule over states that live wherever the plan put them.

    Args:
        trained: param groups, which stay the ones that are read, and the rule.
        take_step: called by `step()`; the engine's boundary step.
        clear: called by `zero_grad()`.
    """

    def __init__(self, trained: Trained, take_step: Callable[[], None], clear: Callable[[], None]) -> None:
        super().__init__(trained.groups, dict(trained.rule.defaults))
        self.param_groups = trained.groups
        self.rule, self.given = trained.rule, trained.given
        self._take_step, self._clear = take_step, clear
        self.offloader: Any = None
        """The engine."""
        self.step_counts: dict[int, int] = {}
        """id(parameter) -> updates so far; torch counts per parameter too."""
        self.progress: dict[int, Progress] = {}
        """id(parameter) -> what else its state has besides planes, of rules that keep more."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the step that `engine.step()` takes on an accumulation boundary.

        Raises:
            StateError: a closure was given: it would run the model inside the step.
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

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """As `engine.offload_states`."""
        self._with_offloader().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """As `engine.reload_states`."""
        self._with_offloader().reload_states(non_blocking)

    @property
    def offloaded_states(self) -> set[Any]:
        """As `engine.offloaded_states`."""
        return set(self._with_offloader().offloaded_states)

    def _with_offloader(self) -> Any:
        if self.offloader is None:
            raise StateError("optimizer.offload_states: the optimizer belongs to no engine")
        return self.offloader

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that have been accumulated."""
        self._clear()

    def values(self, index_of: dict[int, int], contributed: Container[int]) -> dict[int, Any]:
        """What is fixed of every parameter that has a gradient in the step that would be taken now.

        Args:
            index_of: id(parameter) -> parameter index.
            contributed: indices of parameters with a gradient.

        Raises:
            ConfigError: param groups ask for what the rule cannot do.
        """
        self.rule.begin()
        values: dict[int, Any] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                key = id(parameter)
                index = index_of.get(key)
                if index is not None and index in contributed:
                    count = self.step_counts.get(key, 0) + 1
                    values[index] = self.rule.values(group, count, self.progress.get(key))
        return values

    def count_step(self, index_of: dict[int, int], values: Mapping[int, Any]) -> None:
        """A step is taken with these values: every parameter that has some counts it, as torch does."""
        for group in self.param_groups:
            changed: Mapping[str, Any] = {}
            for parameter in group["params"]:
                key = id(parameter)
                index = index_of.get(key, -1)
                if index in values:
                    self.step_counts[key] = self.step_counts.get(key, 0) + 1
                    progress, changed = self.rule.after(values[index])
                    if progress is not None:
                        self.progress[key] = progress
            group.update(changed)

    def numbers(self, key: int) -> dict[str, Scalar]:
        """What a parameter's state has besides planes, by torch's names; `step` always.

        Args:
            key: id(parameter).
        """
        progress = self.progress.get(key)
        more = {name: scalar for name, scalar in progress.scalars if scalar.value is not None} if progress else {}
        return {"step": Scalar(self.step_counts.get(key, 0)), **more}

    def saved_numbers(self, key: int) -> dict[str, Scalar]:
        """`numbers` for a checkpoint: they also say what no update of the parameter has made so far.

        Args:
            key: id(parameter).
        """
        progress, found = self.progress.get(key), self.numbers(key)
        if progress is None:
            return found
        named = {name for name, _ in progress.scalars}
        for name in self._state_names():
            if name not in progress.present and name not in found:
                found[ABSENT + name] = Scalar(NOTHING if name in named else MISSING)
        return found

    def number_names(self) -> list[str]:
        """All names that `saved_numbers` may have, besides `step`."""
        return [*self.rule.scalars, *(ABSENT + name for name in self._state_names())]

    def _state_names(self) -> list[str]:
        return [*self.rule.states, *self.rule.scalars]

    def made(self, key: int, planes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of a parameter's planes those that torch's optimizer would have; before the first update, as it makes them.

        Args:
            key: id(parameter).
            planes: by name, as they are stored.
        """
        progress, fills = self.progress.get(key), self.rule.fills
        if progress is not None:
            return {name: planes[name] for name in planes if name in progress.present}
        if self.step_counts.get(key, 0):
            return dict(planes)
        return {name: torch.full_like(plane, fills.get(name, 0.0)) for name, plane in planes.items()}

    def set_numbers(self, key: int, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `saved_numbers` has said of a parameter, and from its planes.

        Args:
            key: id(parameter).
            saved: of shape (); what is missing begins anew.
        """
        self.step_counts[key] = count = int(saved["step"].item()) if "step" in saved else 0
        self.progress.pop(key, None)
        absent = {name: int(saved[ABSENT + name].item()) for name in self._state_names() if ABSENT + name in saved}
        wanted = {name: like for name, like in self.rule.scalars.items() if name not in absent}
        if count and wanted.keys() <= saved.keys():
            scalars = [(name, like.like(saved[name])) for name, like in wanted.items()]
            scalars += [(name, Scalar(None)) for name, why in absent.items() if why == NOTHING]
            present = tuple(name for name in self.rule.states if name not in absent)
            self.progress[key] = Progress(tuple(scalars), present)

    def forget(self, key: int) -> None:
        """Nobody trains the parameter any more."""
        self.step_counts.pop(key, None)
        self.progress.pop(key, None)
