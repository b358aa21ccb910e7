"""States that have not their parameter's shape: of Adafactor a mean for each row and each column of a matrix.

[Note: where they are] Beside the numbers of a parameter, and in no record: in memory of the ranks that have it, on the
device that updates it. One that is updated whole lies on one rank of a shard group; the others have nothing of it.

[Note: one writer] A tensor that is kept is never changed in place. An update gets copies and returns what they have
become, and the pipeline puts that here as soon as the update counts. So one that fails or is made again starts from the
same values, and a reader keeps what it has read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload.archives import bytes_tensor, make_archive, read_archive

if TYPE_CHECKING:
    from zero.exchange.exchange import Exchange
    from zero.optim.rules import Rules
    from zero.params.layout import Layout

Small = Mapping[str, Tensor]  # Of one parameter, by name.
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


class SmallStates:
    """Of one parameter."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: Small | None = None) -> None:
        self.tensors: Small = tensors or {}

    def on_host(self) -> dict[str, Tensor]:
        """Copies. On a GPU the calling thread's stream is behind the updates."""
        return {name: value.to("cpu", copy=True) for name, value in self.tensors.items()}


def owned(layout: Layout) -> frozenset[int]:
    """Parameters (indices) of which this rank has elements."""
    pairs = ((unit, slot) for unit in layout.units if unit.trainable for slot in unit.slots)
    return frozenset(slot.index for unit, slot in pairs for lo, hi in [unit.within(slot)] if lo < hi)


def gathered(exchange: Exchange, mine: Mapping[str, Small]) -> Mapping[str, Small]:
    """Small states by the parameters' names, from whichever ranks have them. All ranks come here.

    `mine`: this rank's, on the host.
    """
    if exchange.placement.alone:
        return mine
    found: dict[str, Small] = {}
    for answer in exchange.agree("small states", make_archive(dict(mine)).numpy().tobytes()):
        for name, tensors in read_archive(bytes_tensor(answer), "small states of another rank").items():
            found.setdefault(name, tensors)
    return found


def largest_share(layout: Layout, rules: Rules) -> int:
    """Bytes of the rank that has most of them; equal on all ranks, as plans are."""
    held: dict[int, int] = {}
    for unit in layout.units:
        rule = rules.each[unit.rule]
        for slot in unit.slots if unit.trainable and rule.small else ():
            slice_ = slot.offset_numel // unit.shard_numel
            shapes = rule.small_shapes(slot.shape).values()
            held[slice_] = held.get(slice_, 0) + sum(shape.numel() * dtype.itemsize for shape, dtype in shapes)
    return max(held.values(), default=0)
