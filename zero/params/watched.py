"""Writes through `.data`, which torch's version counters do not see.

A parameter that shows its values is of a class whose `data` keeps a copy of them when it is first asked for. Whoever
lets the values go compares, and so a write is kept wherever the values live: in memory that is used in place, and in
a copy that would be dropped.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

_DATA: Any = torch._C.TensorBase.data
_BEFORE = "_zero_before"
"""Attribute of a parameter: its values when `.data` was first asked for, on the host."""


class WatchedParameter(nn.Parameter):
    """Mixed into the class of every parameter that shows its values."""

    @property
    def data(self) -> Tensor:
        """As torch's."""
        note(self)
        return cast("Tensor", _DATA.__get__(self))

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is nobody's but the caller's."""
        copied: nn.Parameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        unwatch(copied)
        return copied


_watched_class_of: dict[type, type] = {nn.Parameter: WatchedParameter}
_own_class_of: dict[type, type] = {WatchedParameter: nn.Parameter}


def watch(parameter: nn.Parameter) -> None:
    """Change its own class to the watched one. Idempotent."""
    own = type(parameter)
    if issubclass(own, WatchedParameter):
        return
    if own not in _watched_class_of:
        watched = type(f"Watched{own.__name__}", (WatchedParameter, own), {})
        _watched_class_of[own], _own_class_of[watched] = watched, own
    parameter.__class__ = _watched_class_of[own]


def unwatch(parameter: nn.Parameter) -> None:
    """Change its class back to its own. Idempotent."""
    own = _own_class_of.get(type(parameter))
    if own is not None:
        parameter.__class__ = own


def note(parameter: nn.Parameter) -> None:
    """Somebody gets what may be written to unseen: keep the values as they are, unless they are kept already."""
    if _BEFORE not in parameter.__dict__:
        parameter.__dict__[_BEFORE] = _values_of(parameter).clone()


def written(parameter: nn.Parameter) -> bool:
    """True if a bit has changed since `note`, however; False without it."""
    before = parameter.__dict__.get(_BEFORE)
    return before is not None and not torch.equal(_bits(before), _bits(_values_of(parameter)))


def forget(parameter: nn.Parameter) -> None:
    """What was noted is stored, or let go."""
    parameter.__dict__.pop(_BEFORE, None)


def _values_of(parameter: nn.Parameter) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return cast("Tensor", _DATA.__get__(parameter)).cpu()


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
