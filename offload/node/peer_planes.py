"""Planes of another process of the node, read where they are: in memory that is shared, or in its swap files.

[Note: who may read when] Nothing here waits. The owner publishes on a board what is done, a step say, after its
writes have returned (what it holds stranded after a failed write is not in the files), and overwrites nothing before
everybody has published that it was read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.errors import StateError
from offload.memory.shared_region import SharedRegion
from offload.planes.planes import Disk, Home, Plane


@dataclass(frozen=True, slots=True)
class PeerHome:
    """Where coordinates [begin, end) of another process's plane live: numbers, to be told to other processes."""

    begin: int
    end: int
    region_offset: int  # Where its bytes begin in the shared memory; -1 when the home is the swap space.
    swap_offset: int


def describe(plane: Plane, region: SharedRegion | None) -> tuple[PeerHome, ...]:
    """The homes of a plane of this process, as other processes can find them.

    Raises StateError: a home lies elsewhere in memory, where nobody else can read it. `region`: the shared memory that
    its homes in host memory lie in; None if there are none.
    """
    found = []
    for home in plane.homes:
        if home.memory is None:
            found.append(PeerHome(home.begin, home.end, -1, home.swap_offset))
            continue
        if region is None:
            raise StateError(f"plane {plane.name}: [{home.begin:,}, {home.end:,}) is in memory that is not shared")
        found.append(PeerHome(home.begin, home.end, region.offset_of(home.memory), -1))
    return tuple(found)


def peer_plane(
    name: str,
    width: int | Callable[[int], int],
    homes: Sequence[PeerHome],
    *,
    region: SharedRegion | None,
    disk: Disk | None,
) -> Plane:
    """Another process's plane, over the same coordinates. Reading is all that should be done with it.

    Raises StateError: a home lies where this process has no way to.

    Args:
        homes: as the other process described them.
        region: its shared memory as mapped here.
        disk: its swap space (`PeerSwap`) and this process's engine.
    """
    found = []
    for home in homes:
        if home.region_offset < 0:
            found.append(Home(home.begin, home.end, None, home.swap_offset))
            continue
        nbytes = (home.end - home.begin) * width if isinstance(width, int) else width(home.end - home.begin)
        end = home.region_offset + nbytes
        if region is None or end > region.nbytes:
            have = "none" if region is None else f"{region.nbytes:,} bytes"
            raise StateError(
                f"plane {name}: [{home.begin:,}, {home.end:,}) is said to end at byte {end:,} of the shared memory; "
                f"there is {have}"
            )
        found.append(Home(home.begin, home.end, region.data[home.region_offset : end]))
    return Plane(name, width, found, disk)


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
