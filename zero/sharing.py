"""Exchange through memory that all ranks of one node see.

[Note: epochs] Whoever has a slice says on a board up to which step its weights are where they live. Readers wait for
the step they need, and then read alone: nobody has to be in the same place of the model at the same time. A slice is
not changed before every rank has come to the next step, so what was waited for stays as it is.

[Note: urging] Updates behind the step are made when somebody fetches the unit. A rank that waits for another one's
slice says so; the other then makes all its updates that are due.

[Note: reductions] Each rank leaves whole gradients in memory of its own, says where, and adds up its slice of all
ranks' in rank order. Its memory is free again once all have read it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple
from functools import partial

import torch

from offload.board import Board
from offload.descriptors import Share, exchange_descriptors
from offload.errors import StateError
from offload.peer_planes import PeerHome, peer_plane
from offload.planes import Disk, Plane, settle_all
from offload.shared_exchange import SharedExchange
from offload.sharing import SharedRegion, exchange_regions
from offload.streams import Fence
from offload.swapfile import PeerSwap, SwapGeometry
from zero.comm import Comm
from zero.exchange import Turn, Wire
from zero.optim.behind import DueUpdates
from zero.params.layout import Layout, Unit
from zero.placement import Placement
from zero.storage import Storage
from zero.whole_gradients import SharedPlaces

WAIT_SECONDS_MAX = 1800.0
"""As torch.distributed waits. A rank may be slow for a long time; one that has failed or left is noticed in seconds."""
LOOK_SECONDS = 0.01
"""Between looks whether somebody waits for an update of this rank's."""


class Regions:
    """Allocates shared memory, and keeps it until it is closed."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._regions: list[SharedRegion] = []
        self.pools: list[SharedRegion] = []
        """What each rank has made its own, in rank order."""

    def common(self, nbytes: int, what: str) -> SharedRegion:
        """See `SharedPlaces`. The first rank's file, mapped by all."""
        mine = SharedRegion(nbytes if self._comm.rank == 0 else 1, what, touched=False)
        regions = self._exchange(mine)
        return regions[0]

    def own(self, nbytes: int, what: str) -> SharedRegion:
        """See `SharedPlaces`."""
        self.pools = self._exchange(SharedRegion(nbytes, what, touched=False))
        return self.pools[self._comm.rank]

    def close(self) -> None:
        """Give everything up. Idempotent."""
        while self._regions:
            self._regions.pop().close()

    def _exchange(self, mine: SharedRegion) -> list[SharedRegion]:
        share = partial(self._comm.agree, f"sharing memory for {mine.what}")
        regions = exchange_regions(self._comm.rank, self._comm.world_size, share, mine)
        self._regions += regions
        return regions


class SharedMemory:
    """See above. All ranks are on one node.

    Args:
        comm: of this engine.
        placement: of this rank.
        wire: how gradients travel; they are added up in fp32, so only `overlaps` matters.
    """

    memory: SharedPlaces | None

    def __init__(self, comm: Comm, placement: Placement, wire: Wire) -> None:
        self._comm, self.placement, self._wire = comm, placement, wire
        self.scale, self.overlaps = 1.0 / placement.world_size, wire.overlaps
        self.memory = self._regions = Regions(comm)
        self._board: Board | None = None
        self._reducer: SharedExchange | None = None
        self._planes: dict[int, list[Plane]] = {}
        """Rank -> its weight planes, one per space; of ranks whose slices this one reads."""
        self._swaps: list[PeerSwap] = []
        self._epoch, self._reductions = 0, 0

    def attach(self, layout: Layout, storage: Storage, updates: DueUpdates) -> None:
        """Find the others' slices. All ranks come here, once their storage is made."""
        comm, placement = self._comm, self.placement
        share = partial(comm.agree, "sharing")
        self._urges = len(layout.units)
        self._layout, self._storage, self._updates = layout, storage, updates
        self._board = Board.join(comm.rank, comm.world_size, self._urges + comm.world_size, share)
        self._reducer = SharedExchange.join(
            comm.rank,
            comm.world_size,
            share,
            self._regions.pools,
            (placement.shard_index, placement.shard_size),
            deadline_seconds=WAIT_SECONDS_MAX,
            check=comm.check,
        )
        if storage.disk is not None:  # all ranks have made the same plan, so all have one
            self._open_swaps(storage.disk, share)
        storage.at_end.append(self._end)
        updates.stored = self._publish

    def adopted(self) -> None:
        """The planes hold the initial values of this rank's slices."""
        self._epoch = 1
        for unit in self._layout.units:
            self._publish(unit.index)

    # ---- see Exchange -----------------------------------------------------------------------------

    def turn(self, what: str, unit: Unit) -> Turn:
        """See `Exchange`."""
        if what == "gather":
            return (self._epoch,)
        self._reductions += 1
        return (self._reductions, self._comm.ticket(what, unit.index, unit.name))

    async def gather(self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence) -> Fence:
        """See `Exchange`."""
        in_place = unit.index in self._storage.plan.whole
        others = [rank for rank in self.placement.shard_ranks if rank != self._comm.rank]
        await settle_all([self._fetch(rank, turn[0] if unit.trainable else 1, unit, flat, in_place) for rank in others])
        return None

    async def _fetch(self, rank: int, epoch: int, unit: Unit, flat: torch.Tensor, in_place: bool) -> None:
        what = f"the slice of {unit.name} as of step {epoch - 1}"
        if self._there.read(rank, unit.index) < epoch:
            with self._comm.waiting(what):
                await self._there.reached(
                    rank,
                    unit.index,
                    epoch,
                    what=what,
                    deadline_seconds=WAIT_SECONDS_MAX,
                    urge=partial(self._urge, rank, epoch),
                )
        if not in_place:
            plane = self._planes[rank][self._layout.space_of(unit)]
            slices = flat.chunk(self.placement.shard_size)
            await plane.read(unit.begin, unit.end, slices[self.placement.shard_ranks.index(rank)])

    @asynccontextmanager
    async def reduce(
        self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence
    ) -> AsyncIterator[list[torch.Tensor]]:
        """See `Exchange`."""
        if self._reducer is None:
            raise StateError("reduce: nothing is shared yet")
        own = self._regions.pools[self._comm.rank]
        number, ticket = turn
        with self._comm.waiting(str(ticket)):
            async with self._reducer.reduce(number, own.offset_of(flat), flat.nbytes, unit=unit.index) as slices:
                yield [part.view(flat.dtype) for part in slices]

    def sees(self, flat: torch.Tensor) -> bool:
        """See `Exchange`."""
        return _lies_in(flat, self._regions.pools[self._comm.rank])

    def step_taken(self, changing: Callable[[int], bool]) -> None:
        """See `Exchange`."""
        self._epoch += 1
        waiting = False
        for unit in self._layout.units:
            if changing(unit.index):
                waiting = True
            else:
                self._publish(unit.index)
        if waiting:
            self._storage.mover.post("updates that other ranks wait for", self._listen(self._epoch))

    def agree(self, what: str, payload: bytes) -> list[bytes]:
        """See `Exchange`."""
        return self._comm.agree(what, payload)

    def broadcast(self, tensor: torch.Tensor, source_rank: int) -> None:
        """See `Exchange`."""
        self._comm.broadcast(tensor, source_rank)

    def broadcast_all(self, tensors: Sequence[torch.Tensor], source_rank: int) -> None:
        """See `Exchange`."""
        self._comm.broadcast_coalesced(tensors, source_rank)

    def payload_numel(self) -> dict[str, int]:
        """See `Exchange`. None of it goes through collectives."""
        return {}

    def renewed(self) -> SharedMemory:
        """See `Exchange`."""
        return SharedMemory(self._comm, self.placement, self._wire)

    def close(self) -> None:
        """See `Exchange`."""
        self.release()
        self._comm.close()

    def release(self) -> None:
        """See `Exchange`."""
        self._end()
        if self._reducer is not None:
            self._reducer.close()
        if self._board is not None:
            self._board.close()
        while self._swaps:
            self._swaps.pop().close()
        self._regions.close()

    def _open_swaps(self, own: Disk, share: Share) -> None:
        """Open the planes of the other ranks of the shard group in their swap files."""
        comm = self._comm
        given = [SwapGeometry(*json.loads(answer)) for answer in share(json.dumps(astuple(own.swap.geometry)).encode())]
        received = exchange_descriptors(comm.rank, comm.world_size, share, own.swap.descriptors)
        for rank, (descriptors, geometry) in enumerate(zip(received, given, strict=True)):
            if rank == comm.rank:
                continue
            swap = PeerSwap(descriptors, geometry)
            self._swaps.append(swap)
            self._planes[rank] = [
                peer_plane(
                    f"{plane.name} of rank {rank}",
                    space.dtype.itemsize,
                    [
                        PeerHome(home.begin, home.end, -1, home.swap_offset)
                        for home in plane.homes
                        if home.memory is None
                    ],
                    region=None,
                    disk=Disk(own.aio, swap),
                )
                for space, plane in zip(self._layout.spaces, self._storage.weights, strict=True)
            ]

    # ---- inside -----------------------------------------------------------------------------------

    @property
    def _there(self) -> Board:
        if self._board is None:
            raise StateError("gather: nothing is shared yet")
        return self._board

    def _publish(self, index: int) -> None:
        self._there.publish(index, self._epoch)

    def _urge(self, rank: int, epoch: int) -> None:
        self._comm.check()
        self._there.publish(self._urges + rank, epoch)

    async def _listen(self, epoch: int) -> None:
        """Make the updates of a step as soon as another rank waits for one, if they are not made before."""
        board, me = self._there, self._urges + self._comm.rank
        while not (self._updates.all_settled or self._updates.stopped or self._epoch != epoch):
            if any(wanted >= epoch for wanted in board.read_all(me)):
                due = self._updates.groups_of(None)
                await asyncio.gather(self._updates.bring(due), return_exceptions=True)  # who fetches them is told
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _end(self) -> None:
        """Nobody waits for updates of this rank any more."""
        self._epoch = -1


def _lies_in(flat: torch.Tensor, region: SharedRegion) -> bool:
    try:
        region.offset_of(flat)
    except StateError:
        return False
    return True
