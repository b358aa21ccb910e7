"""States that do not have their parameter's shape: Adafactor keeps a mean for each row and column of a matrix.

[Note: where they are] They are kept with the numbers of a parameter, and not in the states of sub-groups: in memory of
the ranks that have the parameter, on the device that updates it. A parameter that is updated as one piece is on one
rank of a shard group; the other ranks have no part of it.

[Note: one writer] A tensor here is never changed in place. An update gets copies and returns the new values, and the
pipeline stores them here as soon as the update counts. So an update that fails or is repeated starts from the same
values, and the values that a reader has do not change.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from offload.files.archives import make_archive, read_archive
from zero.params.layout import Layout
from zero.store.collectives import Collectives

SmallTensors = Mapping[str, Tensor]  # The small states of one parameter, by name.
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


class SmallStates:
    """The small states of one parameter."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: SmallTensors | None = None) -> None:
        self.tensors: SmallTensors = tensors or {}

    def to_host(self) -> dict[str, Tensor]:
        """Copies on the host. On a GPU the calling thread's stream must run after the updates."""
        return {name: value.to("cpu", copy=True) for name, value in self.tensors.items()}


def local_parameters(layout: Layout) -> frozenset[int]:
    """Indices of the parameters of which this rank has elements."""
    pairs = ((unit, slot) for unit in layout.units if unit.trainable for slot in unit.slots)
    return frozenset(slot.index for unit, slot in pairs for lo, hi in [unit.shard_range(slot)] if lo < hi)


def gather_small_states(collectives: Collectives, own: Mapping[str, SmallTensors]) -> Mapping[str, SmallTensors]:
    """Small states by the parameters' names, from all ranks that have some. Collective.

    `own`: this rank's, on the host.
    """
    if collectives.placement.is_single_rank:
        return own
    states: dict[str, SmallTensors] = {}
    for answer in collectives.all_gather_bytes("small states", make_archive(dict(own))):
        for name, tensors in read_archive(answer, "small states of another rank").items():
            states.setdefault(name, tensors)
    return states
