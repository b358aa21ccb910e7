"""Detects writes through `.data`, which torch's version counters do not see.

A present parameter has a class whose `data` property copies the values at the first access. Before the values are
released, they are compared with this copy, so that a write is stored: both in memory that is used in place, and in a
copy that would otherwise be dropped.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from zero.params.kept import KeptParameter, Mixin

_DATA: Any = torch._C.TensorBase.data
_BEFORE = "_zero_before"
"""Attribute of a parameter: its values at the first access to `.data`, on the host."""


class WatchedParameter(KeptParameter):
    """Mixed into the class of every present parameter."""

    @property
    def data(self) -> Tensor:
        """As in torch; keeps a copy of the values first."""
        note(self)
        return cast("Tensor", _DATA.__get__(self))

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)


watch = Mixin(WatchedParameter, "Watched").put_on


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
