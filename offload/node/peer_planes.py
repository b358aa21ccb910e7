"""A plane of another process of the node whose current slots change: read from that process's swap files.

A plane whose places never change is a `Plane` over the same homes and the other process's swap space.

[Note: who may read when] Nothing here waits. The owner publishes on a board what is done (a step, for example), after
its writes have returned. Bytes that it holds stranded after a failed write are not in the files. The owner overwrites
nothing before all peers have published that they have read it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import torch

from offload.planes.planes import Disk, Home, Plane


class PeerSlotPlane(Plane):
    """Another process's plane over pairs of slots, all of it in its swap space (`offload/planes/two_slots.py`).

    Args:
        homes: their swap offsets are those of the first slots.
        table: (homes,) uint8, shared: the current slot of each home. The owner writes it before it publishes.
        disk: the owner's swap space (`PeerSwap`) and this process's engine.
    """

    def __init__(self, name: str, width: int, homes: list[Home], table: torch.Tensor, disk: Disk) -> None:
        super().__init__(name, width, homes, disk)
        self._table = table

    async def _transfer_swap(self, home: Home, lo: int, hi: int, part: torch.Tensor, *, write: bool) -> None:
        index = bisect_left(self._begins, home.begin)
        beyond = int(self._table[index]) * self.nbytes(home.begin, home.end)
        await super()._transfer_swap(replace(home, swap_offset=home.swap_offset + beyond), lo, hi, part, write=write)
