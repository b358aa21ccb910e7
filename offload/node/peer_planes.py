"""A plane of another process of the node whose places change: read from its swap files, at the slots that count.

A plane whose places stay as they are is a `Plane` over the same homes and the other process's swap space.

[Note: who may read when] Nothing here waits. The owner publishes on a board what is done, a step say, after its
writes have returned (what it holds stranded after a failed write is not in the files), and overwrites nothing before
everybody has published that it was read.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import torch

from offload.planes.planes import Disk, Home, Plane


class PeerSlotPlane(Plane):
    """Another process's plane over pairs of slots, all of it in its swap space (`offload/planes/two_slots.py`).

    Args:
        homes: as in its first slots.
        table: (homes,) uint8, shared: the current slot of each. Its owner writes there before it publishes.
        disk: its swap space (`PeerSwap`) and this process's engine.
    """

    def __init__(self, name: str, width: int, homes: list[Home], table: torch.Tensor, disk: Disk) -> None:
        super().__init__(name, width, homes, disk)
        self._table = table

    async def _transfer_swap(self, home: Home, lo: int, hi: int, part: torch.Tensor, *, write: bool) -> None:
        index = bisect_left(self._begins, home.begin)
        beyond = int(self._table[index]) * self.nbytes(home.begin, home.end)
        await super()._transfer_swap(replace(home, swap_offset=home.swap_offset + beyond), lo, hi, part, write=write)
