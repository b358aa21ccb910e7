"""Collectives through memory that all ranks of one node see.

[Note: epochs] The owner of a shard publishes on a board the last step whose weights are in the shard's home. Readers
wait for the step they need, and then read alone: ranks need not be at the same place of the model at the same time. A
shard is not changed before every rank has reached the next step, so a shard that a reader waited for stays unchanged.

[Note: update requests] Updates after the step run when their rank fetches the unit. A rank that waits for another
rank's shard publishes this; the other rank then runs all its due updates.

[Note: reductions] Each rank leaves full gradients in its own memory, publishes their place, and adds up its shard of
all ranks' gradients in rank order. Its memory is free again once all ranks have read it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import astuple
from functools import partial

import torch

from offload.array.tiered_array import Disk, Home, TieredArray, await_all
from offload.array.two_slots import PeerSlotArray, TwoSlotArray
from offload.errors import PeerError, StateError, ZeroInfinityError
from offload.io.swapfile import PeerSwap, SwapGeometry
from offload.memory.board import NodeBoard
from offload.memory.node_collectives import NodeCollectives
from offload.memory.shared_host_memory import SharedHostMemory, map_peer_memory
from offload.streams import MaybeEvent
from offload.system.descriptors import AllGatherBytes, exchange_descriptors
from zero.dist.comm import Comm
from zero.dist.failure_state import naming_ranks
from zero.params.layout import Layout, Placement, Unit
from zero.store.collectives import Collectives, MultiRankCollectives, PendingWork, ReduceOptions, StepUpdates
from zero.store.storage import Storage

POLL_SECONDS = 0.01  # Interval of checks whether another rank waits for an update of this rank.
RETRY_SECONDS = 0.5  # Pause after a failed update.


class SharedRegions:
    """Host memory that the ranks of one node share."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._regions: list[SharedHostMemory] = []
        self.pools: list[SharedHostMemory] = []  # Each rank's memory from `allocate_own`, in rank order.

    def allocate_common(self, nbytes: int, what: str) -> SharedHostMemory:
        """All ranks map the first rank's file."""
        return self._share(SharedHostMemory(nbytes if self._comm.rank == 0 else 1, what, prefault=False))[0]

    def allocate_own(self, nbytes: int, what: str) -> SharedHostMemory:
        self.pools = self.per_rank(nbytes, what)
        return self.pools[self._comm.rank]

    def per_rank(self, nbytes: int, what: str) -> list[SharedHostMemory]:
        """Bytes of every rank, in rank order, that the others can read."""
        return self._share(SharedHostMemory(nbytes, what, prefault=False))

    def close(self) -> None:
        """Free all of it. Idempotent."""
        while self._regions:
            self._regions.pop().close()

    def _share(self, own: SharedHostMemory) -> list[SharedHostMemory]:
        share = partial(self._comm.all_gather_bytes, f"sharing memory for {own.what}")
        with naming_ranks(f"sharing memory for {own.what}"):
            regions = map_peer_memory(self._comm.rank, self._comm.world_size, share, own)
        self._regions += regions
        return regions


class SharedMemoryCollectives(MultiRankCollectives):
    """See above. All ranks are on one node.

    `reduce_options`: how gradients are reduced; they are added up in fp32, so only `averages` and `overlaps` matter.
    """

    reads_homes = True

    def __init__(
        self, comm: Comm, placement: Placement, reduce_options: ReduceOptions, world: Collectives | None = None
    ) -> None:
        super().__init__(comm, placement, reduce_options, world)
        self.memory = self._regions = SharedRegions(comm)
        self._board: NodeBoard | None = None
        self._reducer: NodeCollectives | None = None
        # Rank whose shards this one reads -> its arrays of weights, by space.
        self._peer_arrays: dict[int, list[TieredArray]] = {}
        self._swaps: list[PeerSwap] = []
        # Persistent unit -> (begin, end) of the copy of its shard, in bytes of every rank's `_copy_regions`.
        self._copy_ranges: dict[int, tuple[int, int]] = {}
        self._copy_regions: list[SharedHostMemory] = []
        self._slot_regions: list[SharedHostMemory] = []
        self._slot_ranges: list[tuple[int, int]] = []
        self._first_slots: list[list[Home]] = []  # Per space, the homes on the disk, if the arrays have two slots.
        self._epoch, self._reductions, self._is_stopped = 0, 0, False

    def attach(self, layout: Layout, storage: Storage, updates: StepUpdates) -> None:
        """Find the other ranks' shards. Collective, after every rank has made its storage."""
        comm, placement = self._comm, self.placement
        share = self._join_board(layout, storage, updates)
        with naming_ranks("sharing memory for collectives"):
            board = NodeBoard.join(comm.rank, comm.world_size, NodeCollectives.columns(), share)
        part = placement.shard_index, placement.shard_size
        self._reducer = NodeCollectives(board, self._regions.pools, part, comm.timeout_seconds, comm.raise_if_failed)
        self._allocate_copies()
        self._publish_slots()
        if storage.disk is not None:  # all ranks have the same plan, so all have a disk or none has
            self._open_peer_swaps(storage.disk, share)

    def _join_board(self, layout: Layout, storage: Storage, updates: StepUpdates) -> AllGatherBytes:
        """Make the board; from now on this rank publishes its shards there."""
        comm = self._comm
        share = partial(comm.all_gather_bytes, "sharing")
        self._request_column = len(layout.units)
        self._closed_column = self._request_column + comm.world_size
        self._layout, self._storage, self._updates = layout, storage, updates
        with naming_ranks("sharing a board"):
            self._board = NodeBoard.join(comm.rank, comm.world_size, self._closed_column + 1, share)
        storage.share(self)  # if an engine is dropped, closing its storage must end the sharing too
        return share

    def on_weights_initialized(self) -> None:
        self.on_weights_rewritten()

    def enqueue(self, what: str, unit: Unit) -> PendingWork:
        if what == "gather":
            return (self._epoch,)
        self._reductions += 1
        return (self._reductions, self._comm.enqueue(what, unit.index, unit.name))

    def cancel(self, work: PendingWork, error: BaseException) -> None:
        if len(work) > 1:  # a reduction; a shard needs no report: its readers get it when it is there
            self._comm.cancel(work[1], error)

    async def gather(self, work: PendingWork, unit: Unit, flat: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        others = [rank for rank in self.placement.shard_ranks if rank != self._comm.rank]
        await await_all([self._fetch_shard(rank, work[0], unit, flat) for rank in others])
        return None

    async def _fetch_shard(self, rank: int, epoch: int, unit: Unit, flat: torch.Tensor) -> None:
        await self._wait_for_shard(rank, epoch, unit)
        into = flat.chunk(self.placement.shard_size)[self.placement.shard_ranks.index(rank)]
        if unit.index in self._copy_ranges:
            begin, end = self._copy_ranges[unit.index]
            into.copy_(self._copy_regions[rank].data[begin:end])
        elif unit.index not in self._storage.plan.unsharded_units:
            array = self._peer_arrays[rank][self._layout.space_of(unit)]
            await self._updates.run_with_retry(lambda: array.read(unit.begin, unit.end, into))

    async def _wait_for_shard(self, rank: int, epoch: int, unit: Unit) -> None:
        """Return when another rank's shard has reached the epoch."""
        what = f"the shard of {unit.name} as of step {epoch - 1}"
        if self._attached_board.read(rank, unit.index) < epoch:
            request = partial(self._request_update, rank, unit, epoch)
            deadline_seconds = self._comm.timeout_seconds
            async with self._naming_lost_rank(what):
                with self._comm.waiting(what):
                    await self._attached_board.wait_for_peer(
                        rank, unit.index, epoch, what=what, deadline_seconds=deadline_seconds, on_pause=request
                    )

    @asynccontextmanager
    async def _naming_lost_rank(self, what: str) -> AsyncIterator[None]:
        """Translate errors of peers into errors that name the rank which was lost first.

        A peer that has left may only have noticed that another one died, and have reported that later.
        """
        try:
            yield
        except PeerError as error:
            ranks = ", ".join(f"rank {peer}" for peer in error.peers)
            why = RuntimeError(f"{ranks} cannot provide {what}: {error}")
            raise await self._comm.explain(why, f"the wait for {what}") from error

    @asynccontextmanager
    async def reduce(
        self, work: PendingWork, unit: Unit, flat: torch.Tensor, *after: MaybeEvent
    ) -> AsyncIterator[list[torch.Tensor]]:
        if self._reducer is None:
            raise StateError("reduce: the shared memory is not set up yet")
        own = self._regions.pools[self._comm.rank]
        number, queued = work
        async with self._naming_lost_rank(f"the gradient of {unit.name}"):
            with self._comm.waiting(str(queued)):
                async with self._reducer.reduce_scatter(
                    number, own.offset_of(flat), flat.nbytes, unit=unit.index
                ) as shards:
                    yield [part.view(flat.dtype) for part in shards]

    def can_reduce_from(self, flat: torch.Tensor) -> bool:
        return is_within(flat, self._regions.pools[self._comm.rank])

    def on_weights_rewritten(self, unstored: Collection[int] = ()) -> None:
        async def advance() -> None:
            self._begin_epoch(lambda index: index in unstored or not self._updates.is_stored(index), frozen_too=True)

        # On the I/O loop, where updates of the last step end: no update ends between the new epoch and `is_stored`.
        self._storage.io_loop.run("publishing the rewritten weights", advance())

    def on_unit_updated(self, index: int) -> None:
        self._publish(index)

    def on_weights_stored(self, index: int) -> None:
        self._publish(index, frozen_too=True)

    def on_step_decided(self, changing: Callable[[int], bool]) -> None:
        self._begin_epoch(changing)

    def _begin_epoch(self, changing: Callable[[int], bool], *, frozen_too: bool = False) -> None:
        """Begin a new epoch and publish this rank's shards, except those that are `changing`."""
        self._epoch += 1
        waiting = False
        for unit in self._layout.units:
            if changing(unit.index):
                waiting = True
            else:
                self._publish(unit.index, frozen_too=frozen_too)
        if waiting:
            self._storage.io_loop.submit("updates that other ranks wait for", self._serve_requests(self._epoch))

    def clone(self) -> SharedMemoryCollectives:
        return SharedMemoryCollectives(self._comm, self.placement, self._reduce_options, self._world)

    def close(self, error: BaseException | None = None) -> None:
        self.detach()
        self._comm.close(error)

    def detach(self) -> None:
        self.on_close_begin()
        self.on_transfers_end()

    def on_transfers_end(self) -> None:
        """Close everything that is shared; all transfers of this rank have ended."""
        if self._reducer is not None:
            self._reducer.close()
        board, self._board = self._board, None
        if board is not None:
            board.publish(self._closed_column, 1)
            board.close()
        while self._swaps:
            self._swaps.pop().close()
        self._peer_arrays = {}
        self._regions.close()

    def _open_peer_swaps(self, own: Disk, share: AllGatherBytes) -> None:
        comm = self._comm
        answers = share(json.dumps(astuple(own.swap.geometry)).encode())
        geometries = [SwapGeometry(*json.loads(answer)) for answer in answers]
        with naming_ranks("sharing swap files"):
            received = exchange_descriptors(comm.rank, comm.world_size, share, own.swap.descriptors)
        for rank, (descriptors, geometry) in enumerate(zip(received, geometries, strict=True)):
            if rank == comm.rank:
                continue
            swap = PeerSwap(descriptors, geometry)
            self._swaps.append(swap)
            self._peer_arrays[rank] = [
                self._peer_weights(rank, number, Disk(own.aio, swap)) for number in range(len(self._layout.spaces))
            ]

    def _publish_slots(self) -> None:
        """Publish from now on which slot counts, for arrays of which snapshots are taken; in shared memory."""
        arrays = [array for array in self._storage.weights if isinstance(array, TwoSlotArray)]
        position = 0
        for array in arrays:
            self._slot_ranges.append((position, position + len(array.pairs)))
            position += len(array.pairs)
        if not position:
            return
        self._slot_regions = self._regions.per_rank(position, "slots of weights")
        for array, (begin, end) in zip(arrays, self._slot_ranges, strict=True):
            self._first_slots.append(array.publish_slots(self._slot_regions[self._comm.rank].data[begin:end]))

    def _peer_weights(self, rank: int, number: int, disk: Disk) -> TieredArray:
        """Another rank's weights of a space in its swap space. All ranks have the same plan, so places are known."""
        array, width = self._storage.weights[number], self._layout.spaces[number].dtype.itemsize
        name = f"{array.name} of rank {rank}"
        if self._first_slots:
            begin, end = self._slot_ranges[number]
            return PeerSlotArray(name, width, self._first_slots[number], self._slot_regions[rank].data[begin:end], disk)
        return TieredArray(name, width, [home for home in array.homes if home.memory is None], disk)

    @property
    def _attached_board(self) -> NodeBoard:
        if self._board is None:
            raise StateError("gather: the shared memory is not set up yet")
        return self._board

    def _allocate_copies(self) -> None:
        """Make room for copies of shards of persistent units, which every rank also has in full in its own memory.

        They may be edited there at any time (`p.data.mul_(0.5)`, on every rank): all ranks would edit one shared copy.
        """
        units = [u for u in self._layout.units if u.persistent and u.index in self._storage.plan.unsharded_units]
        position = 0
        for unit in units:
            nbytes = unit.shard_numel * unit.dtype.itemsize
            self._copy_ranges[unit.index] = (position, position + nbytes)
            position += nbytes
        if units:
            self._copy_regions = self._regions.per_rank(position, "shards of weights")

    def _publish(self, index: int, *, frozen_too: bool = False) -> None:
        unit = self._layout.units[index]
        if index in self._copy_ranges and (unit.trainable or frozen_too):
            begin, end = self._copy_ranges[index]
            flat = self._storage.flat_buffer(unit)
            if flat is None:
                raise StateError(f"{unit.name}: its memory has already been released")
            self._copy_regions[self._comm.rank].data[begin:end].copy_(unit.shard_of(flat))
        self._attached_board.publish(index, self._epoch)

    def _request_update(self, rank: int, unit: Unit, epoch: int) -> None:
        self._comm.raise_if_failed()
        board = self._attached_board
        board.publish(self._request_column + rank, epoch)
        if board.read(rank, self._closed_column) and board.read(rank, unit.index) < epoch:
            raise PeerError(f"{board.peer_name(rank)} has closed its engine without providing it", [rank])

    async def _serve_requests(self, epoch: int) -> None:
        """Run the updates of a step as soon as another rank waits for one, if they have not run before."""
        board, own_column = self._attached_board, self._request_column + self._comm.rank
        while not (self._updates.is_idle or self._updates.is_stopped or self._epoch != epoch or self._is_stopped):
            pause = POLL_SECONDS
            if any(requested_epoch >= epoch for requested_epoch in board.read_all(own_column)):
                try:
                    await self._updates.update_groups(self._updates.groups_of(None))
                except ZeroInfinityError:  # fetches on this rank raise it; after a successful retry the others go on
                    pause = RETRY_SECONDS
            await asyncio.sleep(pause)

    def on_close_begin(self) -> None:
        """Answer no further requests: no rank waits for updates of this rank any more."""
        self._is_stopped = True


def is_within(flat: torch.Tensor, region: SharedHostMemory) -> bool:
    try:
        region.offset_of(flat)
    except StateError:
        return False
    return True
