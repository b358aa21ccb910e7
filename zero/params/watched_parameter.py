"""Detects writes through `.data`, which torch's version counters do not see.

A present parameter has a class whose `data` property copies the values at the first access. Before the values are
released, they are compared with this copy, so that a write is stored: both in memory that is used in place, and in a
copy that would otherwise be dropped.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from zero.params.managed_parameter import ClassMixin, ManagedParameter

_DATA: Any = torch._C.TensorBase.data
_DATA_COPY = "_zero_data_copy"
"""Attribute of a parameter: its values at the first access to `.data`, on the host."""


class WatchedParameter(ManagedParameter):
    """Mixed into the class of every present parameter."""

    @property
    def data(self) -> Tensor:
        """As in torch; keeps a copy of the values first."""
        save_data_copy(self)
        return cast("Tensor", _DATA.__get__(self))

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)


watch = ClassMixin(WatchedParameter, "Watched").mix_in


def save_data_copy(parameter: nn.Parameter) -> None:
    """Copy the values, unless a copy exists: the caller gets a tensor that can be written to unseen."""
    if _DATA_COPY not in parameter.__dict__:
        parameter.__dict__[_DATA_COPY] = _values_of(parameter).clone()


def is_data_written(parameter: nn.Parameter) -> bool:
    """True if any bit has changed since `save_data_copy`; False without a `save_data_copy`."""
    copy = parameter.__dict__.get(_DATA_COPY)
    return copy is not None and not torch.equal(_bits(copy), _bits(_values_of(parameter)))


def drop_data_copy(parameter: nn.Parameter) -> None:
    """Drop the copy of `save_data_copy`: the values are stored or released."""
    parameter.__dict__.pop(_DATA_COPY, None)


def _values_of(parameter: nn.Parameter) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return cast("Tensor", _DATA.__get__(parameter)).cpu()


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
