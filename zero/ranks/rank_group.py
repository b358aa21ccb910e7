"""Which ranks, and how much they have moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Group:
    ranks: tuple[int, ...]
    index: int  # Of this rank in `ranks`.
    handle: Any = field(default=None, repr=False, compare=False)  # Torch's process group; None for a group of one.

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(slots=True)
class Payload:
    """What collectives of one kind have handled on this rank: whole flat tensors, before any cut."""

    calls: int = 0
    numel: int = 0
    nbytes: int = 0
