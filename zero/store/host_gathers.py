"""Gathers through the host memory of a node whose GPUs cannot read each other's memory.

On such a node a collective copies every shard through the host anyway. Here shards whose home is in host memory are in
memory that every rank has mapped and page-locked, and each GPU copies its peers' shards directly from there, over its
own link. Epochs show when a shard may be read, as in `shared_memory.py`. All other weights are gathered by collectives,
and gradients are reduced by collectives.

[Note: copies end on the host] A gather is over only when the device has made its copies. A rank takes the next step
only when its gathers are over, and no shard changes before every rank has taken that step. So no rank writes to a shard
that is being copied.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager

import torch

from offload.array.tiered_array import TieredArray, await_all
from offload.memory.host_memory import pin
from offload.memory.shared_host_memory import SharedHostMemory
from offload.streams import MaybeEvent
from zero.dist.comm import Comm, TrafficCounts
from zero.params.layout import Layout, Placement, Unit
from zero.store.collectives import PendingWork, ReduceOptions, StepUpdates, TorchCollectives
from zero.store.shared_memory import SharedMemoryCollectives, is_within
from zero.store.storage import Storage


class HostGatherCollectives(SharedMemoryCollectives):
    """See above. All ranks are on one node, and weights are sharded. `reduce_options`: how gradients are sent."""

    def __init__(self, comm: Comm, placement: Placement, reduce_options: ReduceOptions) -> None:
        super().__init__(comm, placement, reduce_options)
        self._collectives = TorchCollectives(comm, placement, reduce_options)
        self.memory, self.scale = None, self._collectives.scale
        # For each array of weights with homes on the host, the shared memory of each rank.
        self._shard_regions: list[list[SharedHostMemory]] = []
        # Unit -> (shared memory of each rank, begin, end byte).
        self._homes: dict[int, tuple[list[SharedHostMemory], int, int]] = {}
        self._pinned_regions = ExitStack()  # Closing it ends the page locks of the other ranks' memory.

    def allocate_shards(self, nbytes: int) -> SharedHostMemory:
        """The owner page-locks its own mapping."""
        regions = self._regions.per_rank(nbytes, "shards of weights")
        self._shard_regions.append(regions)
        for rank, region in enumerate(regions):
            unpin = pin(region.data) if rank != self._comm.rank else None
            if unpin is not None:
                self._pinned_regions.callback(unpin)
        return regions[self._comm.rank]

    def attach(self, layout: Layout, storage: Storage, updates: StepUpdates) -> None:
        self._collectives.attach(layout, storage, updates)
        self._join_board(layout, storage, updates)
        for space, array in zip(layout.spaces, storage.weights, strict=True):
            rank = self._comm.rank
            regions = next((regions for regions in self._shard_regions if _lies_in_region(array, regions[rank])), None)
            # An array with two slots changes its places by itself: its units are gathered by collectives.
            if regions is None or type(array) is not TieredArray:
                continue
            for unit in space.units:
                place = array.host_range(unit.begin, unit.end)
                if place is not None:
                    self._homes[unit.index] = (regions, *place)

    def enqueue(self, what: str, unit: Unit) -> PendingWork:
        if what == "gather" and unit.index in self._homes:
            return (self._epoch,)
        return self._collectives.enqueue(what, unit)

    def cancel(self, work: PendingWork, error: BaseException) -> None:
        if not (work and isinstance(work[0], int)):  # a shard needs no report: its readers get it when it is there
            self._collectives.cancel(work, error)

    async def gather(self, work: PendingWork, unit: Unit, flat: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        if unit.index not in self._homes:
            return await self._collectives.gather(work, unit, flat, *after)
        others = [rank for rank in self.placement.shard_ranks if rank != self._comm.rank]
        copies: list[MaybeEvent] = [*after]

        async def fetch(rank: int) -> None:
            await self._wait_for_shard(rank, work[0], unit)
            regions, begin, end = self._homes[unit.index]
            into = flat.chunk(self.placement.shard_size)[self.placement.shard_ranks.index(rank)]
            # After `after`, and so after all earlier uses of `flat`: this rank's own shard comes after them too.
            copies.append(self._storage.streams.copy_to_device(into, regions[rank].data[begin:end], *after))

        try:
            await await_all([fetch(rank) for rank in others])
        finally:
            await self._storage.streams.synchronize(*copies)
        return copies[-1]

    @asynccontextmanager
    async def reduce(
        self, work: PendingWork, unit: Unit, flat: torch.Tensor, *after: MaybeEvent
    ) -> AsyncIterator[list[torch.Tensor]]:
        async with self._collectives.reduce(work, unit, flat, *after) as parts:
            yield parts

    def can_reduce_from(self, flat: torch.Tensor) -> bool:
        return True

    def traffic(self) -> Mapping[str, TrafficCounts]:
        return self._collectives.traffic()

    def clone(self) -> HostGatherCollectives:
        return HostGatherCollectives(self._comm, self.placement, self._reduce_options)

    def on_transfers_end(self) -> None:
        self._pinned_regions.close()
        self._shard_regions, self._homes = [], {}
        super().on_transfers_end()


def _lies_in_region(array: TieredArray, region: SharedHostMemory) -> bool:
    return array.host is not None and is_within(array.host, region)
