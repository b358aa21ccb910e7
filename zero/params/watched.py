"""Detects writes through `.data`, which torch's version counters do not see.

A present parameter has a class whose `data` property copies the values at the first access. Before the values are
released, they are compared with this copy, so that a write is stored: both in memory that is used in place, and in a
copy that would otherwise be dropped.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

_DATA: Any = torch._C.TensorBase.data
_BEFORE = "_zero_before"
"""Attribute of a parameter: its values at the first access to `.data`, on the host."""


class WatchedParameter(nn.Parameter):
    """Mixed into the class of every present parameter."""

    @property
    def data(self) -> Tensor:
        """As in torch; keeps a copy of the values first."""
        note(self)
        return cast("Tensor", _DATA.__get__(self))

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy belongs to the caller, so it is not watched."""
        copied: nn.Parameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        unwatch(copied)
        return copied


class Mixin:
    """Mixes a class into the classes of parameters, and takes it out again.

    Args:
        mixed: the class for `nn.Parameter` itself; for other classes it is a base class.
        word: prefix for the names of the mixed classes.
        off_with: a mixin of a base class of `mixed`, whose `take_off` takes these classes out too.
    """

    def __init__(self, mixed: type, word: str, off_with: Mixin | None = None) -> None:
        self._mixed, self._word = mixed, word
        self._with: dict[type, type] = {nn.Parameter: mixed}
        self._own: dict[type, type] = {} if off_with is None else off_with._own
        self._own[mixed] = nn.Parameter

    def put_on(self, parameter: nn.Parameter) -> None:
        """Idempotent."""
        own = type(parameter)
        if issubclass(own, self._mixed):
            return
        if own not in self._with:
            self._with[own] = type(f"{self._word}{own.__name__}", (self._mixed, own), {})
            self._own[self._with[own]] = own
        parameter.__class__ = self._with[own]

    def take_off(self, parameter: nn.Parameter) -> None:
        """Idempotent."""
        own = self._own.get(type(parameter))
        if own is not None:
            parameter.__class__ = own


_WATCHED = Mixin(WatchedParameter, "Watched")
watch, unwatch = _WATCHED.put_on, _WATCHED.take_off


def note(parameter: nn.Parameter) -> None:
    """Copy the values, unless a copy exists: the caller gets a tensor that can be written to unseen."""
    if _BEFORE not in parameter.__dict__:
        parameter.__dict__[_BEFORE] = _values_of(parameter).clone()


def written(parameter: nn.Parameter) -> bool:
    """True if any bit has changed since `note`; False without a `note`."""
    before = parameter.__dict__.get(_BEFORE)
    return before is not None and not torch.equal(_bits(before), _bits(_values_of(parameter)))


def forget(parameter: nn.Parameter) -> None:
    """Drop the copy of `note`: the values are stored or released."""
    parameter.__dict__.pop(_BEFORE, None)


def _values_of(parameter: nn.Parameter) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return cast("Tensor", _DATA.__get__(parameter)).cpu()


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
