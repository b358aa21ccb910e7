"""Parameters that a parameter store is responsible for: classes mixed into theirs, and what their `.grad` is.

An engine accumulates gradients elsewhere, so torch's own `.grad` of a parameter is empty after a backward. The class of
a managed parameter answers `p.grad` with a `LazyGradient` instead; what user code assigns is torch's own gradient
until the engine takes it over.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

STORE_ATTRIBUTE = "_zero_store"
_GRAD: Any = torch._C.TensorBase.grad


class AccumulatedGradient(Protocol):
    """The gradient of one parameter that an engine has accumulated since the last step, over all ranks.

    In the units of the loss: without the loss scale. Its methods are called on all ranks together.
    """

    @property
    def epoch(self) -> int:
        """Another number after a step, or after the gradients were dropped."""

    def read(self) -> Tensor | None:
        """All of it in fp32, in the parameter's shape and on its device; None if no rank has any."""

    def write(self, values: Tensor) -> None:
        """Replace it."""

    def scale(self, factor: float) -> None:
        """Multiply it, at the latest in the step."""

    def norm(self) -> float | None:
        """The 2-norm, from the sums that are stored for the step; None: it has to be read."""

    def clear(self) -> None:
        """The parameter has no gradient any more."""

    def lazy_gradient(self) -> Tensor:
        """What `p.grad` is: a tensor without memory."""


class ManagedParameter(nn.Parameter):
    """Mixed into the class of every parameter with a store."""

    @property
    def grad(self) -> Tensor | None:
        """A gradient that was assigned; else the one that the engine has accumulated; None in a backward or without."""
        assigned = torch_gradient(self)
        accumulated = None if assigned is not None else _accumulated_gradient(self)
        return assigned if accumulated is None else accumulated.lazy_gradient()

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        accumulated = _accumulated_gradient(self)
        lazy: Any = gradient if hasattr(gradient, "is_gradient_of") else None
        if lazy is not None and lazy.is_gradient_of(self):
            return  # `p.grad *= 2` has changed it in place
        gradient = gradient if lazy is None else lazy.clone()
        set_torch_gradient(self, gradient)
        if gradient is None and accumulated is not None:
            accumulated.clear()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy belongs to the caller: it has no store."""
        copied: nn.Parameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        MANAGED.remove(copied)
        return copied


def torch_gradient(parameter: Tensor) -> Tensor | None:
    """Torch's own `.grad`: from autograd in a backward, or assigned by user code."""
    with torch._C.DisableTorchFunctionSubclass():
        return cast("Tensor | None", _GRAD.__get__(parameter))


def set_torch_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Set torch's own `.grad`."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(parameter, gradient)


def _accumulated_gradient(parameter: Tensor) -> AccumulatedGradient | None:
    store = parameter.__dict__.get(STORE_ATTRIBUTE)
    in_backward = torch._C._current_graph_task_id() != -1
    gradient: AccumulatedGradient | None = (
        None if store is None or in_backward else store.accumulated_gradient(parameter)
    )
    return gradient


class ClassMixin:
    """Mixes a class into the classes of parameters, and takes it out again; a parameter has one mixin at a time.

    Args:
        mixed: the class for `nn.Parameter` itself; for other classes it is a base class.
        prefix: of the names of the mixed classes.
    """

    _original_class: ClassVar[dict[type, type]] = {}
    """Mixed class, of any mixin -> the class that the parameter had."""

    def __init__(self, mixed: type, prefix: str) -> None:
        self._mixed, self._prefix = mixed, prefix
        self._mixed_class: dict[type, type] = {nn.Parameter: mixed}
        self._original_class[mixed] = nn.Parameter

    def mix_in(self, parameter: nn.Parameter) -> None:
        """Mix it in; removes a mixin of another kind, but not one of a subclass of this one. Idempotent."""
        if issubclass(type(parameter), self._mixed):
            return
        original = self._original_class.get(type(parameter), type(parameter))
        if original not in self._mixed_class:
            self._mixed_class[original] = type(f"{self._prefix}{original.__name__}", (self._mixed, original), {})
            self._original_class[self._mixed_class[original]] = original
        parameter.__class__ = self._mixed_class[original]

    def remove(self, parameter: nn.Parameter) -> None:
        """Remove any mixin. Idempotent."""
        original = self._original_class.get(type(parameter))
        if original is not None:
            parameter.__class__ = original


MANAGED = ClassMixin(ManagedParameter, "Kept")


# ---- watched parameter ---------------------------------------------------------------------------------------------
# Detects writes through `.data`, which torch's version counters do not see.
#
# A present parameter has a class whose `data` property copies the values at the first access. Before the values are
# released, they are compared with this copy, so that a write is stored: both in memory that is used in place, and in a
# copy that would otherwise be dropped.


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
