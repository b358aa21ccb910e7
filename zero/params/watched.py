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


class Mixin:
    """A class that is mixed into that of parameters, whatever it is, and taken out again.

    Args:
        mixed: for `nn.Parameter` itself; mixed into the others.
        word: their names begin with it.
    """

    def __init__(self, mixed: type, word: str) -> None:
        self._mixed, self._word = mixed, word
        self._with: dict[type, type] = {nn.Parameter: mixed}
        self._own: dict[type, type] = {mixed: nn.Parameter}

    def add(self, mixed: type, own: type) -> None:
        """A class like it that somebody else puts on is taken out too."""
        self._own[mixed] = own

    def put_on(self, parameter: nn.Parameter) -> None:
        """Idempotent."""
        own = type(parameter)
        if issubclass(own, self._mixed):
            return
        if own not in self._with:
            self._with[own] = type(f"{self._word}{own.__name__}", (self._mixed, own), {})
            self.add(self._with[own], own)
        parameter.__class__ = self._with[own]

    def take_off(self, parameter: nn.Parameter) -> None:
        """Idempotent."""
        own = self._own.get(type(parameter))
        if own is not None:
            parameter.__class__ = own


_WATCHED = Mixin(WatchedParameter, "Watched")
watch, unwatch = _WATCHED.put_on, _WATCHED.take_off


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
