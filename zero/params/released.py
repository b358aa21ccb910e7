"""The face of a parameter whose values are elsewhere.

A released parameter stays the same Python object with its shape, dtype and names; only its class
changes to a Parameter subclass with `__torch_function__`. Metadata and aliasing work and stay
released; anything that needs the values asks the parameter's keeper, which fetches them (inside a
forward or backward) or raises an error that names the parameter and the call to use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

KEEPER = "_zero_keeper"
NAME = "_zero_name"

_METADATA_WORDS = """
    size dim ndimension numel nelement stride storage_offset element_size is_contiguous is_floating_point is_complex
    is_signed is_set_to get_device detach view view_as reshape t transpose permute unsqueeze squeeze flatten narrow
    expand expand_as swapaxes requires_grad_ register_hook register_post_accumulate_grad_hook untyped_storage data_ptr
    is_pinned is_shared is_inference dim_order type_as __hash__ __len__ _is_view is_same_size
    _has_compatible_shallow_copy_type has_names _typed_storage is_sparse
"""
_METADATA_METHODS = frozenset(_METADATA_WORDS.split())


class Keeper(Protocol):
    """Knows where a released parameter's values are."""

    def touch(self, parameter: nn.Parameter) -> None:
        """Bring the values in for the present forward or backward, or raise StateError."""

    def touched(self, parameters: list[nn.Parameter], result: Any) -> None:
        """`result` was computed from parameters that `touch` brought in."""

    def open(self, parameters: list[nn.Parameter]) -> None:
        """Bring values in for `GatheredParameters`: private copies that may be edited."""

    def close(self, parameters: list[nn.Parameter]) -> None:
        """End `open`: keep what was edited and release."""


class ReleasedParameter(nn.Parameter):
    """Mixed into the class of every released parameter."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let metadata through; for anything else bring the values in first."""
        kwargs = kwargs or {}
        if _is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        released = [p for p in _tensors((args, kwargs)) if isinstance(p, ReleasedParameter)]
        keepers: dict[int, tuple[Keeper, list[nn.Parameter]]] = {}
        for parameter in released:
            keeper = keeper_of(parameter)
            keepers.setdefault(id(keeper), (keeper, []))[1].append(parameter)
            keeper.touch(parameter)
        result = func(*args, **kwargs)
        for keeper, parameters in keepers.values():
            keeper.touched(parameters, result)
        return result

    def __repr__(self) -> str:  # type: ignore[override]
        """Say that the values are elsewhere, without fetching them."""
        return f"Parameter(released, shape={tuple(self.shape)}, dtype={self.dtype}, name={name_of(self)!r})"


def keeper_of(parameter: nn.Parameter) -> Keeper:
    """The keeper that `mark` gave the parameter."""
    keeper: Keeper = parameter.__dict__[KEEPER]
    return keeper


def name_of(parameter: nn.Parameter) -> str:
    """The model's name for a parameter that has a keeper; "?" without."""
    return str(parameter.__dict__.get(NAME, "?"))


def mark(parameter: nn.Parameter, keeper: Keeper, name: str) -> None:
    """Make `keeper` responsible for the parameter's values."""
    parameter.__dict__[KEEPER] = keeper
    parameter.__dict__[NAME] = name


def unmark(parameter: nn.Parameter) -> None:
    """Make it an ordinary parameter again."""
    set_present(parameter)
    parameter.__dict__.pop(KEEPER, None)
    parameter.__dict__.pop(NAME, None)


def is_kept(parameter: torch.Tensor) -> bool:
    """True when some keeper is responsible for the values."""
    return KEEPER in getattr(parameter, "__dict__", {})


_released_class_of: dict[type, type] = {nn.Parameter: ReleasedParameter}
_present_class_of: dict[type, type] = {ReleasedParameter: nn.Parameter}


def set_released(parameter: nn.Parameter) -> None:
    """Change the face to released. Idempotent."""
    present = type(parameter)
    if issubclass(present, ReleasedParameter):
        return
    if present not in _released_class_of:
        released = type(f"Released{present.__name__}", (ReleasedParameter, present), {})
        _released_class_of[present], _present_class_of[released] = released, present
    parameter.__class__ = _released_class_of[present]


def set_present(parameter: nn.Parameter) -> None:
    """Change the face back to the parameter's own class. Idempotent."""
    present = _present_class_of.get(type(parameter))
    if present is not None:
        parameter.__class__ = present


def _is_metadata(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        # Replacing `.data` would cut the parameter out of its unit without anybody noticing.
        return not (name == "__set__" and attribute == "data")
    return name in _METADATA_METHODS


def _tensors(tree: Any) -> list[Any]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in _tensors(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _tensors(item)]
    return []
