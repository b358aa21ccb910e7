"""How the slices of a unit come together, and how gradients are added up: what the ranks of one engine exchange.

[Note: order] Whoever decides that something is exchanged takes a turn for it at once, on the thread that decides. Turns
are taken in the same order on every rank, and exchanged in that order, whatever the disk does in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offload.kernels import kernels
from offload.kernels.square_sums import SquareSum
from offload.memory.byte_tensors import bytes_of, tensor_of
from offload.memory.shared_region import SharedRegion
from offload.streams import Fence
from offload.timeline import Timeline
from zero.params.layout import Layout, Unit
from zero.params.placement import ONE_RANK, Placement
from zero.ranks.comm import Comm, Payload
from zero.store.storage import Storage
from zero.store.whole_gradients import SharedPlaces

if TYPE_CHECKING:
    from zero.optim.pending_updates import DueUpdates

Turn = tuple[Any, ...]  # What an exchange needs to know of its place in the order.

NEAR = "gather inside nodes"  # What a gather among neighbours is for.

HOST_CHUNK_BYTES = 16 << 20  # Of a slice, at a time, where values are read on the host.


class Exchange:
    """What an engine asks of the other ranks. Whatever an exchange leaves out is as with one rank, which has none."""

    scale: float = 1.0  # What the sum over ranks that `reduce` gives has to be multiplied by.
    share: float = 1.0  # What a rank's gradient counts for in what is kept.
    overlaps: bool = True  # False: whoever starts a reduction waits for it.
    memory: SharedPlaces | None = None  # Where what all ranks see is to be allocated; None: nothing is shared.
    reads_homes: bool = False  # True: ranks read slices where they live, at any time.

    def __init__(self, placement: Placement = ONE_RANK, everyone: Exchange | None = None) -> None:
        self.placement = placement
        self._outer = everyone

    @property
    def everyone(self) -> Exchange:
        """With all ranks of the run: in a pipeline those of other stages too, which hold other parameters."""
        return self if self._outer is None else self._outer

    @property
    def is_stage(self) -> bool:
        """True in a pipeline."""
        return self._outer is not None

    def over_stages(self, what: str, payload: bytes) -> list[bytes]:
        """One `payload` a stage of a pipeline, from the ranks at this one's place; without a pipeline, this one's."""
        return [payload]

    def saves(self, name: str) -> bool:
        """True if this stage writes the parameter or buffer into checkpoints; a tied one is written by one stage."""
        return True

    def counted_elsewhere(self) -> SquareSum:
        """What this stage's gradients have of the norm that another stage has too."""
        return SquareSum()

    def note_in(self, timeline: Timeline) -> None:
        """Note collectives there."""

    def slices(self, nbytes: int) -> SharedRegion | None:
        """Host memory for this rank's slices of one space that the others can read; None: nobody does. In order."""
        return None

    def attach(self, layout: Layout, storage: Storage, updates: DueUpdates) -> None:
        """The storage is made, on every rank. All ranks come here."""

    def adopted(self) -> None:
        """The planes hold the initial values of this rank's slices."""

    def turn(self, what: str, unit: Unit) -> Turn:
        """Take the next turn for `what` ("gather", `NEAR` or "reduce"); it must be used, or given up."""
        return ()

    def give_up(self, turn: Turn, error: BaseException) -> None:
        """This rank cannot use a turn that it has taken: who waits for it is told why. Any thread."""

    async def gather(self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence) -> Fence:
        """Fill `flat` (uint8, the unit's bytes), of which this rank's slice is there behind `after`. Returns behind.

        With a turn for `NEAR` it is this rank's part among its neighbours that is there.
        """
        return after[0] if after else None

    @asynccontextmanager
    async def reduce(
        self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence
    ) -> AsyncIterator[list[torch.Tensor]]:
        """What has to be added up, in that order, to get the sum of this rank's slice over all ranks' `flat`.

        Args:
            turn: for "reduce".
            flat: (unit.numel,) this rank's; must stay as it is until the context ends, and may be used for sums.
            after: fences behind what filled it.
        """
        yield [flat]

    def sees(self, flat: torch.Tensor) -> bool:
        """True if `flat` lies in memory that `reduce` can work with."""
        return True

    def step_taken(self, changing: Callable[[int], bool]) -> None:
        """A step is fixed on every rank: what is gathered from now on is as of that step.

        `changing`: will this rank's slice of a unit (an index) change?.
        """

    def rewritten(self, unstored: Collection[int] = ()) -> None:
        """Weights have changed on every rank by other means than a step; what is gathered from now on is as of that.

        `unstored`: units (indices) whose new weights are not yet where they live, until `stored` says so.
        """

    def stored(self, index: int) -> None:
        """On the mover's loop: a unit's rewritten weights are where they live."""

    def agree(self, what: str, payload: bytes) -> list[bytes]:
        """Every rank's `payload`, in rank order. Blocks until all have called it."""
        return [payload]

    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int) -> None:
        """Give every rank the values of `source_rank`, in place, in few messages. Blocks."""

    def payload(self) -> Mapping[str, Payload]:
        """What collectives have handled so far, by what they were for."""
        return {}

    def renewed(self) -> Exchange:
        """An exchange with the same ranks for another storage; this one serves its own until it is released."""
        return self

    def release(self) -> None:
        """Let go of what belongs to the storage; its renewed one goes on."""

    def close(self, error: BaseException | None = None) -> None:
        """Let go of what the exchange holds. The other ranks are told that this one is gone, and of `error`."""


class Alone(Exchange):
    """One rank: there is nobody to exchange anything with."""


@dataclass(frozen=True, slots=True)
class Wire:
    """How gradients travel.

    Attributes:
        dtype: `communication_data_type`; None: as they are.
        prescale: divide by the number of ranks before the sum.
        predivide_factor: of the division, this much comes before the sum.
        averages: False: no division, gradients are sums.
        overlaps: beside the computation.
    """

    dtype: torch.dtype | None = None
    prescale: bool = False
    predivide_factor: float = 1.0
    averages: bool = True
    overlaps: bool = True


class AmongRanks(Exchange):
    """What every exchange between several ranks leaves to their comm."""

    def __init__(self, comm: Comm, placement: Placement, wire: Wire, everyone: Exchange | None = None) -> None:
        super().__init__(placement, everyone)
        self._comm, self._wire, self.overlaps = comm, wire, wire.overlaps
        self.scale = self.share = 1.0 / placement.world_size if wire.averages else 1.0

    def note_in(self, timeline: Timeline) -> None:
        self._comm.timeline = timeline

    def agree(self, what: str, payload: bytes) -> list[bytes]:
        return self._comm.agree(what, payload)

    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int) -> None:
        self._comm.broadcast(tensors, source_rank)


class Collectives(AmongRanks):
    """Exchange by collectives of torch.distributed. `wire`: how gradients travel."""

    def __init__(self, comm: Comm, placement: Placement, wire: Wire, everyone: Exchange | None = None) -> None:
        super().__init__(comm, placement, wire, everyone)
        self._shard, self._replicas = comm.group(placement.shard_ranks), comm.group(placement.replica_ranks)
        self._near = comm.group(placement.near_ranks)
        self._before = placement.world_size if wire.prescale else wire.predivide_factor
        self.scale = self._before * self.share
        if self._replicas.size > 1:  # two sums in the dtype that travels: each is divided before it is rounded to that
            parts = self._shard.size if wire.averages else 1
            self._scales, self.scale = (1.0 / parts, self.scale * parts), 1.0
        self._room = asyncio.Lock()
        self._arriving: Callable[[int], torch.Tensor] | None = None

    def attach(self, layout: Layout, storage: Storage, updates: DueUpdates) -> None:
        self._arriving = storage.whole_gradients.arriving

    def turn(self, what: str, unit: Unit) -> Turn:
        kinds = ["gather persistent" if unit.persistent and self.placement.weights_sharded else "gather"]
        if what == "gather":
            kinds *= self._shard.size > 1
        elif what == NEAR:
            kinds = [NEAR]
        else:
            kinds = ["reduce"] * (self._shard.size > 1)
            kinds += ["reduce over replicas", "gather over replicas"] * (self._replicas.size > 1)
        return tuple(self._comm.ticket(kind, unit.index, unit.name) for kind in kinds)

    def give_up(self, turn: Turn, error: BaseException) -> None:
        for ticket in turn:
            self._comm.cancel(ticket, error)

    async def gather(self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence) -> Fence:
        if not turn:
            return after[0] if after else None
        group = self._near if turn[0].kind == NEAR else self._shard
        return await self._comm.all_gather(turn[0], flat.view(unit.dtype), group, *after)

    @asynccontextmanager
    async def reduce(
        self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence
    ) -> AsyncIterator[list[torch.Tensor]]:
        """See `Exchange`. What arrives has room for one unit: reductions take turns."""
        async with self._room:
            yield await self._reduced(list(turn), unit, self._on_the_wire(flat, after), *after)

    async def _reduced(self, tickets: list[Any], unit: Unit, flat: torch.Tensor, *after: Fence) -> list[torch.Tensor]:
        own, sources = flat, [flat]
        if self._shard.size > 1:
            into = self._room_for(flat)
            sources = await self._comm.reduce_scatter(tickets.pop(0), flat, self._shard, *after, into=into)
            own = unit.own(flat)
        if self._replicas.size > 1:
            if self._shard.size > 1:
                kernels.reduce_ranks(own, sources, scale=self._scales[0])
            into = self._room_for(own)
            parts = await self._comm.reduce_scatter(tickets.pop(0), own, self._replicas, *after, into=into)
            part = own.chunk(self._replicas.size)[self._replicas.index]
            kernels.reduce_ranks(part, parts, scale=self._scales[1])
            streams = self._comm.streams
            streams.wait(await self._comm.all_gather(tickets.pop(0), own, self._replicas, streams.fence()))
            sources = [own]
        return sources

    def _on_the_wire(self, flat: torch.Tensor, after: tuple[Fence, ...]) -> torch.Tensor:
        """`flat` as it travels. A wider dtype changes nothing where sums are made in fp32 anyway."""
        wish = self._wire.dtype or flat.dtype
        if wish.itemsize == flat.element_size() or (wish.itemsize > flat.element_size() and self._comm.fixed_order):
            wish = flat.dtype
        if wish != flat.dtype or self._before != 1:
            self._comm.streams.wait(*after)  # it is read, or changed, on the mover's stream
        flat = flat.to(wish)
        return flat if self._before == 1 else flat.div_(self._before)

    def _room_for(self, flat: torch.Tensor) -> torch.Tensor | None:
        if self._arriving is None:
            return None
        return self._arriving(flat.nbytes).view(flat.dtype)

    def payload(self) -> Mapping[str, Payload]:
        return self._comm.payload

    def renewed(self) -> Collectives:
        return Collectives(self._comm, self.placement, self._wire, self._outer)

    def close(self, error: BaseException | None = None) -> None:
        self._comm.close(error)


def whole(exchange: Exchange, unit: Unit, flat: torch.Tensor) -> torch.Tensor:
    """`flat` (host memory, bytes or elements of a unit) with all slices; this rank's is there. All ranks come here."""
    ranks = exchange.placement.shard_ranks
    if len(ranks) == 1:
        return flat
    parts = [part.view(torch.uint8) for part in flat.chunk(len(ranks))]
    own = parts[exchange.placement.shard_index]
    for lo in range(0, own.numel(), HOST_CHUNK_BYTES):
        hi = min(lo + HOST_CHUNK_BYTES, own.numel())
        answers = exchange.agree(f"reading {unit.name}", bytes_of(own[lo:hi]))
        for part, rank in zip(parts, ranks, strict=True):
            if part is not own:
                part[lo:hi].copy_(tensor_of(answers[rank]))
    return flat
