"""How our hooks work when torch.compile compiles (parts of) the model, or a transform of torch.func runs it.

Units are fetched and evicted where the call of their root module begins and ends, so a compiled block is one graph
between these two places: `graph_break_hook` makes a hook at which Dynamo breaks its graph; Dynamo never traces into it.
Inside a root, modules that own a part of its unit have hooks too. They find the unit in use and do nothing that a graph
would need: `skip_when_compiling` makes a hook that disappears while Dynamo traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from offload.system.interrupts import atomic

Hook = TypeVar("Hook", bound=Callable[..., Any])


def is_in_transform() -> bool:
    """True inside `torch.func.grad`, `vmap` and similar transforms."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[bool]:
    """Inside this context tensors are plain: a transform would wrap the engine's own. Yields whether one runs.

    Nor does a dispatch mode of the user's see them: selective checkpointing would save what moves the weights.
    """
    return _without_transforms() if is_in_transform() or torch._C._len_torch_dispatch_stack() else _NO_TRANSFORM


_NO_TRANSFORM = nullcontext(False)


@contextmanager
def _without_transforms() -> Iterator[bool]:
    inside = is_in_transform()
    with temporarily_clear_interpreter_stack() if inside else nullcontext(), _disable_current_modes():
        yield inside


def graph_break_hook(hook: Hook) -> Hook:
    """A hook at which a compiled region ends: the hook and everything it calls run as plain Python.

    It runs to its end before any signal handler, because it changes which units are bound.
    """
    disabled: Hook = torch.compiler.disable(atomic(hook))  # type: ignore[no-untyped-call]
    return disabled


def skip_when_compiling(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that does nothing inside a compiled region."""
    plain = graph_break_hook(hook)

    def call(*arguments: Any) -> Any:
        return None if torch.compiler.is_compiling() else plain(*arguments)

    return call


def register_numbered(
    registration: Callable[..., RemovableHandle], hook: Callable[..., Any], number: int, **how: Any
) -> Any:
    """Register a hook under a number that equal modules share: graphs are guarded by the numbers of hooks.

    Blocks of one class then share one graph, as they do without hooks.

    Args:
        registration: `module.register_forward_hook`, say.
        number: taken from `RemovableHandle.next_id` once; used once for each kind of hook of a module.
    """
    following = max(RemovableHandle.next_id, number + 1)
    RemovableHandle.next_id = number
    try:
        return registration(hook, **how)
    finally:
        RemovableHandle.next_id = following
