"""DeepSpeed's attributes on parameters that have a store, for libraries that read them.

The attributes only describe: a write to one changes what later readers see, but not what the engine does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import nn
from torch.utils.weak import TensorWeakRef

from zero.ranks import world


class ZeroParamStatus(Enum):
    """DeepSpeed's names for the state of a parameter's values."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
    """Not used here: values that are being fetched count as not available."""


AVAILABLE, NOT_AVAILABLE = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE

SHARD = "ds_tensor"
_STATE = "__getstate__"
_NUMEL = "partition_numel"
_DS_ATTRIBUTES = (
    "ds_id",
    "ds_shape",
    "ds_numel",
    "ds_persist",
    "ds_status",
    "ds_active_sub_modules",
    _NUMEL,
    SHARD,
    _STATE,
)
_numbers = itertools.count()


def has_ds_attributes(parameter: nn.Parameter) -> bool:
    """True if it has the attributes: clients check for `ds_id` to know whether a parameter has to be gathered."""
    return "ds_id" in parameter.__dict__


def set_ds_attributes(
    parameter: nn.Parameter, persistent: bool, private: tuple[str, ...], *, unsharded: bool = False
) -> None:
    """Set or update the attributes; `ds_id` stays.

    Args:
        parameter: a parameter store is responsible for it from now on.
        persistent: its values never leave the device.
        private: internal attributes, which are not pickled.
        unsharded: every rank has all of it (stages 0 to 2), so it gets none of the attributes.
    """
    attributes = parameter.__dict__
    if unsharded:
        remove_ds_attributes(parameter)
        attributes[_STATE] = _state_without(parameter, private)
        return
    attributes.setdefault("ds_id", next(_numbers))
    attributes["ds_shape"] = parameter.shape
    attributes["ds_numel"] = parameter.numel()
    attributes["ds_persist"] = persistent
    attributes["ds_status"] = AVAILABLE  # the class of a released parameter overrides it
    attributes["ds_active_sub_modules"] = set()
    attributes[_NUMEL] = functools.partial(_mean_shard_numel, parameter.numel())
    attributes[_STATE] = _state_without(parameter, (*_DS_ATTRIBUTES, *private))


def _mean_shard_numel(numel: int) -> int:
    """Elements of a parameter per rank on average, rounded up; the size of `ds_tensor` is exact for this rank."""
    return -(-numel // world.world_size())


def set_in_memory_init(parameter: nn.Parameter) -> None:
    """Set the attributes on a parameter whose values stay in memory until an engine adopts it."""
    set_ds_attributes(parameter, False, ())


def remove_ds_attributes(parameter: nn.Parameter) -> None:
    """Remove the attributes: it is an ordinary parameter again."""
    for name in _DS_ATTRIBUTES:
        parameter.__dict__.pop(name, None)


def _state_without(parameter: nn.Parameter, private: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    """A function for `__getstate__`: the attributes that `pickle` and `torch.save` write, without the private ones."""
    reference = TensorWeakRef(parameter)

    def get_state() -> dict[str, Any]:
        target = reference()
        attributes = {} if target is None else target.__dict__
        return {name: value for name, value in attributes.items() if name not in private}

    return get_state
