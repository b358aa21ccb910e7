"""DeepSpeed's names for the states of an engine and for the places where they can be put."""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import Enum

from offload.errors import ConfigError


class OffloadDeviceEnum(str, Enum):
    """Where state is kept."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """States that `engine.offload_states` can move."""

    optim_states = "optim_states"
    """The optimizer's states."""
    hp_params = "hp_params"
    """The remainders from 16-bit weights to their fp32 masters. They are stored with the states and move with them."""
    lp_params = "lp_params"
    """The weights, including fp32 weights, which are their own masters."""
    lp_grads = "lp_grads"
    """Gradients that have been collected since the last step, and the memory for them."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """The pool for gradients in flight. It is empty between two backwards."""


ALL = frozenset(OffloadStateTypeEnum)
OPTIMIZER_STATES = frozenset((OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params))
"""These are stored together in one record."""
NEEDED_BY_FORWARD = frozenset((OffloadStateTypeEnum.lp_params,))
"""The states that a forward needs."""
NEEDED_BY_BACKWARD = ALL - OPTIMIZER_STATES
"""The states that a backward needs."""


def parse_kinds(include: Container[OffloadStateTypeEnum] | None) -> frozenset[OffloadStateTypeEnum]:
    """The states that `include` asks to move, as members or as names; None: all.

    Raises ConfigError: an unknown name, or no collection of names.
    """
    if include is None:
        return ALL
    names = [kind.value for kind in OffloadStateTypeEnum]
    if isinstance(include, (str, Enum)) or not isinstance(include, Container):
        raise ConfigError(f"offload_states: include: expected a list of {', '.join(names)}, or None, got {include!r}")
    # Members are strings, so `in` works for names and for members.
    unknown = [name for name in include if name not in names] if isinstance(include, Iterable) else []
    if unknown:
        raise ConfigError(f"offload_states: include: expected {', '.join(names)}, got {unknown[0]!r}")
    kinds = frozenset(kind for kind in OffloadStateTypeEnum if kind in include)
    return kinds | OPTIMIZER_STATES if kinds & OPTIMIZER_STATES else kinds


def parse_device(device: OffloadDeviceEnum | str) -> OffloadDeviceEnum:
    """The device that `offload_states` is asked for. Raises ConfigError: it is neither cpu nor none."""
    try:
        chosen = OffloadDeviceEnum(device)
    except ValueError:
        raise ConfigError(f"offload_states: device: expected cpu, got {device!r}") from None
    if chosen == OffloadDeviceEnum.nvme:
        raise ConfigError(
            "offload_states: device: states go to host memory (cpu), got nvme; to keep them on NVMe all the time, set "
            "zero_optimization.offload_param and offload_optimizer"
        )
    return chosen
