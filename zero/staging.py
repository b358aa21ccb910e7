"""Ranges of planes made addressable for a moment: in place, or in a leased block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.arena import Block
from offload.errors import StateError
from offload.planes import Plane


@dataclass(frozen=True, slots=True)
class Record:
    """Views into one sub-group's state record."""

    remainder: torch.Tensor | None
    """int16, split spaces only."""
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @staticmethod
    def over(data: torch.Tensor, numel: int, split: bool) -> Record:
        """The record of `numel` elements in `data` (uint8)."""
        first = 2 * numel if split else 0
        return Record(
            data[:first].view(torch.int16) if split else None,
            data[first : first + 4 * numel].view(torch.float32),
            data[first + 4 * numel : first + 8 * numel].view(torch.float32),
        )


class Staged:
    """One range of a plane for the time of an update: in place, or in a part of a leased block."""

    def __init__(self, plane: Plane, begin: int, end: int, compute: torch.device) -> None:
        self.plane, self.begin, self.end = plane, begin, end
        memory = plane.memory(begin, end)
        self.in_place = memory is not None and memory.device == compute
        self.data = memory if self.in_place else None
        self.nbytes = 0 if self.in_place else (end - begin) * plane.bytes_per_element

    def stage(self, block: Block, offset_bytes: int) -> None:
        """Use `block` from `offset_bytes` on."""
        self.data = block.data[offset_bytes : offset_bytes + self.nbytes]

    @property
    def bytes(self) -> torch.Tensor:
        """uint8, the range's bytes."""
        if self.data is None:
            raise StateError(f"{self.plane.name}: range [{self.begin}, {self.end}) is not staged")
        return self.data

    async def read(self) -> None:
        """Bring the range in, unless it is in place."""
        if not self.in_place:
            await self.plane.read(self.begin, self.end, self.bytes)

    async def write(self) -> None:
        """Bring it back, unless it is in place."""
        if not self.in_place:
            await self.plane.write(self.begin, self.end, self.bytes)
