"""DeepSpeed's attributes on parameters whose values somebody keeps, for the libraries that look at them.

They say what is so and steer nothing: whoever writes to one changes what the next reader sees, not the engine.
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
    """DeepSpeed's words for where a parameter's values are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
    """Never seen here: what is on its way is not available yet."""


AVAILABLE, NOT_AVAILABLE = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE

SHARD = "ds_tensor"
_STATE = "__getstate__"
_NUMEL = "partition_numel"
_FACE = ("ds_id", "ds_shape", "ds_numel", "ds_persist", "ds_status", "ds_active_sub_modules", _NUMEL, SHARD, _STATE)
_numbers = itertools.count()


def has_face(parameter: nn.Parameter) -> bool:
    """True when it has the attributes: clients ask for `ds_id` to know whether a parameter has to be gathered."""
    return "ds_id" in parameter.__dict__


def put_on_face(parameter: nn.Parameter, persistent: bool, private: tuple[str, ...], *, whole: bool = False) -> None:
    """Give the attributes, or bring them up to date; `ds_id` stays.

    Args:
        parameter: some keeper is responsible for it from now on.
        persistent: its values never leave the device.
        private: attributes that are nobody else's business.
        whole: every rank has all of it (stages 0 to 2): it has none of the attributes.
    """
    face = parameter.__dict__
    if whole:
        forget_face(parameter)
        face[_STATE] = _state_without(parameter, private)
        return
    face.setdefault("ds_id", next(_numbers))
    face["ds_shape"], face["ds_numel"], face["ds_persist"] = parameter.shape, parameter.numel(), persistent
    face["ds_status"] = AVAILABLE  # the class of a released parameter says otherwise
    face["ds_active_sub_modules"] = set()
    face[_NUMEL] = functools.partial(_share_numel, parameter.numel())
    face[_STATE] = _state_without(parameter, (*_FACE, *private))


def _share_numel(numel: int) -> int:
    """Elements of a parameter that a rank has on average, rounded up; `ds_tensor` has those of this one."""
    return -(-numel // world.world_size())


def announce(parameter: nn.Parameter) -> None:
    """Give the attributes to a parameter that stays in memory until an engine adopts it: its values are there."""
    put_on_face(parameter, False, ())


def forget_face(parameter: nn.Parameter) -> None:
    """Take them away: it is an ordinary parameter again."""
    for name in _FACE:
        parameter.__dict__.pop(name, None)


def _state_without(parameter: nn.Parameter, private: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    """What `pickle` and `torch.save` write besides the values; a keeper and what it keeps stay here."""
    reference = TensorWeakRef(parameter)

    def state() -> dict[str, Any]:
        alive = reference()
        attributes = {} if alive is None else alive.__dict__
        return {name: value for name, value in attributes.items() if name not in private}

    return state
