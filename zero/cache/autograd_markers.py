"""Two marker nodes around one module call, in the autograd graph.

[Note: sentinel and join] A call's outputs pass through a join, the youngest node of the call. A sentinel is
made before the call; it is the oldest node, and an input of the join. Autograd runs younger nodes first. So
the join's backward means that gradients have reached the call. The sentinel's backward runs after all other
nodes of the call that can run, so it means that gradients have passed the call. Inputs get no node: it would make
their gradients add up in another order than in plain torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from offload.errors import StateError


class _Sentinel(torch.autograd.Function):
    """The oldest node of a call; its backward runs when gradients have passed the call."""

    @staticmethod
    def forward(ctx: Any, on_passed: Callable[[], None], token: torch.Tensor) -> torch.Tensor:
        """Return the token, an empty tensor on the compute device, so that all nodes are in one queue, in one order."""
        ctx.on_passed = on_passed
        return token.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        """Gradients have passed the call."""
        ctx.on_passed()
        return None, None


class _Join(torch.autograd.Function):
    """Identity on a call's outputs; its backward runs before all other nodes of the call."""

    @staticmethod
    def forward(
        ctx: Any, on_reached: Callable[[], None], sentinel: torch.Tensor, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Pass the outputs on; detached ones share memory and may be modified in place."""
        ctx.on_reached = on_reached
        ctx.set_materialize_grads(False)  # an unused output must pass no gradient on, not even zeros
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients have reached the call."""
        if torch.is_grad_enabled():
            raise StateError(
                "backward with create_graph=True: gradients of gradients are not available, because the first "
                "backward releases the weights that they need"
            )
        ctx.on_reached()
        return (None, None, *gradients)


def make_sentinel(on_passed: Callable[[], None], device: torch.device) -> torch.Tensor:
    """Make a call's sentinel; `on_passed` is called once the call's backward is over."""
    sentinel: torch.Tensor = _Sentinel.apply(on_passed, _shared_token(device))  # type: ignore[no-untyped-call]
    return sentinel


@functools.cache
def _shared_token(device: torch.device) -> torch.Tensor:
    """One for all calls: selective checkpointing counts operations, and a recompute has markers that its forward lacks.

    A unit that an outer call uses in forward is used by the inner calls in the recompute.
    """
    with torch._C._DisableTorchDispatch():  # also where the first marker is made in a recompute
        return torch.empty(0, device=device, requires_grad=True, dtype=torch.float32)


def join_outputs(sentinel: torch.Tensor, output: Any, on_reached: Callable[[], None]) -> Any:
    """Return `output` with its tensors joined; `on_reached` is called before the call's backward begins."""
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not tensors:
        return output
    joined = _Join.apply(on_reached, sentinel, *tensors)  # type: ignore[no-untyped-call]
    return replace_tensors(output, {id(old): new for old, new in zip(tensors, joined, strict=True)})


def tensors_in(tree: Any, depth: int = 6) -> list[torch.Tensor]:
    """Every tensor inside lists, mappings, dataclasses and plain objects such as caches, each once."""
    return list(_walk(tree, depth, {}))


def replace_tensors(tree: Any, new_of: dict[int, torch.Tensor], depth: int = 6) -> Any:
    """Return `tree` with tensors replaced by id. Lists, mappings and objects change in place; tuples are rebuilt."""
    if isinstance(tree, torch.Tensor):
        return new_of.get(id(tree), tree)
    if depth == 0 or _is_leaf(tree):
        return tree
    if isinstance(tree, tuple):
        values = [replace_tensors(value, new_of, depth - 1) for value in tree]
        if all(new is old for new, old in zip(values, tree, strict=True)):
            return tree
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if isinstance(tree, (set, frozenset)):
        return type(tree)(replace_tensors(value, new_of, depth - 1) for value in tree)
    for place, old in _items(tree):
        new = replace_tensors(old, new_of, depth - 1)
        if new is not old:
            _set_item(tree, place, new)
    return tree


def _items(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, MutableMapping):
        return list(tree.items())
    if isinstance(tree, list):
        return list(enumerate(tree))
    if dataclasses.is_dataclass(tree):
        return [(field.name, getattr(tree, field.name, None)) for field in dataclasses.fields(tree)]
    return list(vars(tree).items()) if hasattr(tree, "__dict__") else []


def _set_item(tree: Any, place: Any, value: Any) -> None:
    if isinstance(tree, (MutableMapping, list)):
        tree[place] = value
    else:
        object.__setattr__(tree, place, value)  # frozen dataclasses too: the object is the call's own result


def _is_leaf(tree: Any) -> bool:
    return tree is None or isinstance(tree, (str, bytes, int, float, bool, nn.Module, type))


def _walk(tree: Any, depth: int, visited: dict[int, Any]) -> Iterator[torch.Tensor]:
    if id(tree) in visited:
        return
    visited[id(tree)] = tree  # kept alive, so that no other object gets the same id during the walk
    if isinstance(tree, torch.Tensor):
        yield tree
    elif depth > 0 and not _is_leaf(tree):
        inside: Iterable[Any] = tree if isinstance(tree, (tuple, set, frozenset)) else [v for _, v in _items(tree)]
        for value in inside:
            yield from _walk(value, depth - 1, visited)
