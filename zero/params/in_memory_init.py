"""Parameters that were built under `Init` but stay in memory: they have no store, and ranks may edit them differently.

An engine takes the first rank's values. Until then each rank has its own values, and only `GatheredParameters` with a
`modifier_rank` makes them equal.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from offload.accelerator import compute_device
from offload.errors import StateError
from zero.params.deepspeed_attributes import has_ds_attributes
from zero.params.released_parameter import is_managed
from zero.ranks import backend, world


def is_in_memory_init(parameter: torch.Tensor) -> bool:
    """True if it has DeepSpeed's attributes and no parameter store."""
    return isinstance(parameter, nn.Parameter) and has_ds_attributes(parameter) and not is_managed(parameter)


def check_modifier_rank(modifier_rank: int | None) -> None:
    """Raise StateError if there is no such rank. None is fine; so is any rank before torch.distributed is set up."""
    world_size = world.world_size()
    if modifier_rank is not None and world.is_distributed() and not 0 <= modifier_rank < world_size:
        raise StateError(
            f"GatheredParameters: expected a modifier_rank from 0 to {world_size - 1}, got {modifier_rank}"
        )


def broadcast_values(source_rank: int, parameters: Iterable[torch.Tensor]) -> None:
    """Copy these values from `source_rank` to every rank. All ranks call this with the same parameters.

    Before torch.distributed is set up, the values stay.

    Args:
        source_rank: a rank of the default group.
        parameters: any dtype and layout, on the host or the device.
    """
    if world.world_size() == 1:
        return
    for parameter in parameters:
        if parameter.is_meta:
            continue  # it has no values yet
        values = parameter.detach().contiguous().view(-1).view(torch.uint8)
        if values.is_cpu and not backend.has_cpu_backend(None):
            values = values.to(compute_device())
        if values.numel():
            backend.broadcast(values, source_rank, None).wait()
        with torch.no_grad():
            parameter.detach().copy_(values.view(parameter.dtype).view(parameter.shape))
