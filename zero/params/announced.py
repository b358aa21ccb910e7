"""Parameters that `Init` has seen and left in memory: no keeper, but other ranks may have edited them.

An engine takes the first rank's values of them. Until then they are each rank's own, and only `GatheredParameters` with
a `modifier_rank` makes them the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from offload.accelerator import compute_device
from offload.errors import StateError
from zero.params.face import has_face
from zero.params.released import is_kept
from zero.ranks import backend, world


def is_announced(parameter: torch.Tensor) -> bool:
    """True when it has DeepSpeed's attributes and nobody keeps its values."""
    return isinstance(parameter, nn.Parameter) and has_face(parameter) and not is_kept(parameter)


def check_rank(modifier_rank: int | None) -> None:
    """Raise StateError unless there is such a rank; None, and any before the ranks have met, is fine."""
    world_size = world.world_size()
    if modifier_rank is not None and world.is_distributed() and not 0 <= modifier_rank < world_size:
        raise StateError(
            f"GatheredParameters: expected a modifier_rank from 0 to {world_size - 1}, got {modifier_rank}"
        )


def take_values_of(source_rank: int, parameters: Iterable[torch.Tensor]) -> None:
    """Make these values on every rank what they are on `source_rank`. All ranks come here with the same parameters.

    Before the ranks have met there is nobody to take them from, and they stay.

    Args:
        source_rank: of the default group.
        parameters: any dtype and layout, on the host or the device.
    """
    if world.world_size() == 1:
        return
    for parameter in parameters:
        if parameter.is_meta:
            continue  # it has none yet
        values = parameter.detach().contiguous().view(-1).view(torch.uint8)
        if values.is_cpu and not backend.has_cpu(None):
            values = values.to(compute_device())
        if values.numel():
            backend.broadcast(values, source_rank, None).wait()
        with torch.no_grad():
            parameter.detach().copy_(values.view(parameter.dtype).view(parameter.shape))
