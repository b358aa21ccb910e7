"""Gathers through the host memory of a node whose GPUs cannot read each other's memory.

On such a node a collective copies every slice through the host anyway. Here slices whose home is in host memory are in
regions that every rank has mapped and page-locked, and each GPU copies its peers' slices directly from there, over its
own link. Epochs tell when a slice may be read, as in `shared_memory.py`. All other weights are gathered by collectives,
and gradients are reduced by collectives.

[Note: copies end on the host] A gather is over only when the device has made its copies. A rank takes the next step
only when its gathers are over, and no slice changes before every rank has taken that step. So no rank writes to a slice
that is being copied.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import torch

from offload.memory.pinned import pin
from offload.memory.shared_region import SharedHostMemory
from offload.planes.planes import TieredArray, await_all
from offload.streams import MaybeEvent
from zero.exchange.exchange import Collectives, Turn, Wire
from zero.exchange.shared_memory import SharedMemory, lies_in
from zero.params.layout import Layout, Unit
from zero.params.placement import Placement
from zero.ranks.comm import Comm, Payload
from zero.store.storage import Storage

if TYPE_CHECKING:
    from zero.optim.pending_updates import DueUpdates


class HostGathers(SharedMemory):
    """See above. All ranks are on one node, and weights are sharded. `wire`: how gradients are sent."""

    def __init__(self, comm: Comm, placement: Placement, wire: Wire) -> None:
        super().__init__(comm, placement, wire)
        self._collectives = Collectives(comm, placement, wire)
        self.memory, self.scale = None, self._collectives.scale
        self._given: list[
            list[SharedHostMemory]
        ] = []  # Regions by rank, for each plane of weights with homes on the host.
        self._homes: dict[
            int, tuple[list[SharedHostMemory], int, int]
        ] = {}  # Unit -> (regions by rank, begin, end byte).
        self._unpin: list[Callable[[], None]] = []

    def slices(self, nbytes: int) -> SharedHostMemory:
        """The owner page-locks its own mapping."""
        regions = self._regions.each(nbytes, "slices of weights")
        self._given.append(regions)
        for rank, region in enumerate(regions):
            unpin = pin(region.data) if rank != self._comm.rank else None
            if unpin is not None:
                self._unpin.append(unpin)
        return regions[self._comm.rank]

    def attach(self, layout: Layout, storage: Storage, updates: DueUpdates) -> None:
        self._collectives.attach(layout, storage, updates)
        self._join(layout, storage, updates)
        for space, plane in zip(layout.spaces, storage.weights, strict=True):
            regions = next((given for given in self._given if _is_over(plane, given[self._comm.rank])), None)
            # A plane with two slots changes its places by itself: its units are gathered by collectives.
            if regions is None or type(plane) is not TieredArray:
                continue
            for unit in space.units:
                place = plane.host_range(unit.begin, unit.end)
                if place is not None:
                    self._homes[unit.index] = (regions, *place)

    def turn(self, what: str, unit: Unit) -> Turn:
        if what == "gather" and unit.index in self._homes:
            return (self._epoch,)
        return self._collectives.turn(what, unit)

    def give_up(self, turn: Turn, error: BaseException) -> None:
        if not (turn and isinstance(turn[0], int)):  # a slice needs no report: its readers get it when it is there
            self._collectives.give_up(turn, error)

    async def gather(self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        if unit.index not in self._homes:
            return await self._collectives.gather(turn, unit, flat, *after)
        others = [rank for rank in self.placement.shard_ranks if rank != self._comm.rank]
        copies: list[MaybeEvent] = [*after]

        async def fetch(rank: int) -> None:
            await self._awaited(rank, turn[0], unit)
            regions, begin, end = self._homes[unit.index]
            into = flat.chunk(self.placement.shard_size)[self.placement.shard_ranks.index(rank)]
            # After `after`, and so after all earlier uses of `flat`: this rank's own slice comes after them too.
            copies.append(self._storage.streams.copy_to_device(into, regions[rank].data[begin:end], *after))

        try:
            await await_all([fetch(rank) for rank in others])
        finally:
            await self._storage.streams.synchronize(*copies)
        return copies[-1]

    @asynccontextmanager
    async def reduce(
        self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: MaybeEvent
    ) -> AsyncIterator[list[torch.Tensor]]:
        async with self._collectives.reduce(turn, unit, flat, *after) as parts:
            yield parts

    def sees(self, flat: torch.Tensor) -> bool:
        return True

    def payload(self) -> Mapping[str, Payload]:
        return self._collectives.payload()

    def renewed(self) -> HostGathers:
        return HostGathers(self._comm, self.placement, self._wire)

    def _let_go(self) -> None:
        while self._unpin:
            self._unpin.pop()()
        self._given, self._homes = [], {}
        super()._let_go()


def _is_over(plane: TieredArray, region: SharedHostMemory) -> bool:
    return plane.host is not None and lies_in(plane.host, region)
