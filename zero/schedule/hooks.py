"""Hooks that turn module calls and autograd events into uses of units.

[Note: what a use is] In forward, a use of a unit lasts from the outermost call of a module that owns
one of its parameters to that call's return. In backward it lasts from the first gradient that
reaches an output of that call to the moment the gradients of its inputs are ready; a call whose
inputs need no gradient ends when the unit's own gradients have all arrived, and at the latest with
the backward itself. A forward inside a backward (recomputation) never ends a use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.schedule.coordinator import Coordinator


class BackwardEvents(Protocol):
    """What the engine wants to know about backward."""

    def before_backward(self, generation: int) -> None:
        """Gradients reach a graph made in step `generation`; raises if it is stale."""

    def unit_passed(self, index: int) -> None:
        """Gradients have passed through every input of a call that uses the unit."""

    generation: int


def in_backward() -> bool:
    """True inside an autograd backward, so also in the forward of a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


class _InputGate(torch.autograd.Function):
    """Identity on a call's inputs whose backward says that the call's own backward is done."""

    @staticmethod
    def forward(ctx: Any, passed: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pass the inputs on; detached ones share memory and may be modified in place."""
        ctx.passed = passed
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of all inputs are known."""
        ctx.passed()
        return (None, *gradients)


class ModuleHooks:
    """Installs and removes the hooks of one model.

    Args:
        root: the model; its forward bounds the trace.
        scopes: module -> indices of the units its calls use.
    """

    def __init__(
        self, root: nn.Module, scopes: dict[nn.Module, list[int]], coordinator: Coordinator, events: BackwardEvents
    ) -> None:
        self._coordinator, self._events = coordinator, events
        self._open_calls: dict[int, list[list[int]]] = {}
        self._handles: list[RemovableHandle] = []
        self.closes_on_arrival: set[int] = set()
        """Units whose backward use ends when their gradients have arrived: no input needs a gradient."""
        self._root_depth = 0
        self._handles.append(root.register_forward_pre_hook(self._begin_root, prepend=True))
        for module, units in scopes.items():
            self._handles.append(
                module.register_forward_pre_hook(self._pre_forward(units), with_kwargs=True, prepend=module is not root)
            )
            self._handles.append(
                module.register_forward_hook(self._post_forward(units), with_kwargs=True, always_call=True)
            )
        self._handles.append(root.register_forward_hook(self._end_root, always_call=True))

    @property
    def in_forward(self) -> bool:
        """True while the root's forward runs."""
        return self._root_depth > 0

    def remove(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def register_output(self, indices: list[int], output: Any, *, gated: bool) -> None:
        """Open a backward use of the units when a gradient reaches any tensor in `output`."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not tensors:
            return
        events, coordinator, generation = self._events, self._coordinator, self._events.generation

        def reached(gradient: torch.Tensor) -> None:
            events.before_backward(generation)
            for index in indices:
                if not gated:
                    self.closes_on_arrival.add(index)
                coordinator.begin_backward_use(index)

        torch.autograd.graph.register_multi_grad_hook(tensors, reached, mode="any")

    def _begin_root(self, module: nn.Module, args: Any) -> None:
        if in_backward():
            return
        self._root_depth += 1
        if self._root_depth == 1:
            self._coordinator.trace.begin_forward("train" if module.training else "eval")

    def _end_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        self._root_depth = max(self._root_depth - 1, 0)
        if self._root_depth == 0:
            self._coordinator.end_forward()

    def _pre_forward(self, units: list[int]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            grad = torch.is_grad_enabled()
            recompute = in_backward()
            outermost: list[int] = []
            for index in units:
                if recompute:
                    self._coordinator.begin_recompute(index)
                elif self._coordinator.begin_forward_use(index, backward_follows=grad):
                    outermost.append(index)
            self._open_calls.setdefault(id(module), []).append(outermost)
            indices = units if recompute else outermost
            if not grad or not indices:
                return None
            return self._gate(indices, args, kwargs)

        return hook

    def _gate(self, indices: list[int], args: Any, kwargs: Any) -> Any:
        """Route the inputs that need gradients through the gate."""
        tensors = [t for t in tensors_in((args, kwargs)) if t.requires_grad and not isinstance(t, nn.Parameter)]
        if not tensors:
            return None

        def passed() -> None:
            for index in indices:
                self._events.unit_passed(index)

        gated = _InputGate.apply(passed, *tensors)  # type: ignore[no-untyped-call]
        replaced = {id(old): new for old, new in zip(tensors, gated, strict=True)}
        return _replace(args, replaced), _replace(kwargs, replaced)

    def _post_forward(self, units: list[int]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls = self._open_calls.get(id(module))
            outermost = calls.pop() if calls else []
            grad = torch.is_grad_enabled()
            recompute = in_backward()
            if recompute:
                if grad and output is not None:
                    self.register_output(units, output, gated=True)
                return
            for index in units:
                self._coordinator.end_forward_use(index, backward_follows=grad)
            if grad and outermost and output is not None:
                gated = any(t.grad_fn is not None and _is_gate(t) for t in tensors_in((args, kwargs)))
                self.register_output(outermost, output, gated=gated)

        return hook


def _is_gate(tensor: torch.Tensor) -> bool:
    return type(tensor.grad_fn).__name__.startswith("_InputGate")


def tensors_in(tree: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """Every tensor inside lists, mappings, dataclasses and plain objects such as caches."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif depth > 0:
        for value in _children(tree):
            yield from tensors_in(value, depth - 1)


def _children(tree: Any) -> Iterable[Any]:
    if tree is None or isinstance(tree, (str, bytes, int, float, bool, nn.Module, type)):
        return ()
    if isinstance(tree, dict):
        return tree.values()
    if isinstance(tree, (list, tuple, set, frozenset)):
        return tree
    if dataclasses.is_dataclass(tree):
        return (getattr(tree, field.name, None) for field in dataclasses.fields(tree))
    return vars(tree).values() if hasattr(tree, "__dict__") else ()


def _replace(tree: Any, replaced: dict[int, torch.Tensor]) -> Any:
    """`tree` with tensors exchanged; containers are rebuilt, other objects stay as they are."""
    if isinstance(tree, torch.Tensor):
        return replaced.get(id(tree), tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_replace(value, replaced) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_replace(value, replaced) for value in tree)
    if type(tree) is dict:
        return {key: _replace(value, replaced) for key, value in tree.items()}
    return tree
