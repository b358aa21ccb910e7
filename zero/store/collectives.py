"""Collectives of one engine's ranks: they gather the shards of units, and add up gradients.

[Note: order] The thread that decides on a collective queues it at once. Every rank queues the same collectives in the
same order, and they run in that order, however long the disk takes in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offload.files.archives import bytes_of, bytes_tensor
from offload.kernels import kernels
from offload.kernels.square_sums import SquareSum
from offload.memory.shared_host_memory import SharedHostMemory
from offload.streams import MaybeEvent
from offload.timeline import Timeline
from zero.dist.comm import Comm, TrafficCounts
from zero.params.layout import ONE_RANK, Layout, Placement, SubGroup, Unit
from zero.store.storage import Storage
from zero.store.unreduced_gradients import SharedAllocator, UnreducedGradients

PendingWork = tuple[Any, ...]  # Identifies queued work; its content depends on the class of collectives.

NEAR = "gather inside nodes"  # The kind of a gather among neighbours.

HOST_CHUNK_BYTES = 16 << 20  # Bytes of a shard that are gathered at a time when values are read on the host.


class StepUpdates(Protocol):
    """The updates of the last step, for ranks that read each other's memory; see `PendingUpdates`."""

    is_stopped: bool

    @property
    def is_idle(self) -> bool: ...

    def is_stored(self, index: int) -> bool: ...

    def groups_of(self, units: Iterable[int] | None) -> list[SubGroup]: ...

    async def update_groups(self, groups: Iterable[SubGroup]) -> None: ...

    async def run_with_retry(self, transfer: Callable[[], Awaitable[None]]) -> None: ...


class Collectives:
    """An engine's communication with the other ranks. This class's methods are those for a single rank."""

    scale: float = 1.0  # Factor for the sum over ranks from `reduce`.
    share: float = 1.0  # Factor of one rank's gradient in the stored gradient.
    overlaps: bool = True  # False: the thread that starts a reduction waits for it.
    memory: SharedAllocator | None = None  # Allocates memory that all ranks see; None: nothing is shared.
    reads_homes: bool = False  # True: ranks read shards in their homes, at any time.

    def __init__(self, placement: Placement = ONE_RANK, world: Collectives | None = None) -> None:
        self.placement = placement
        self._world = world

    @property
    def world(self) -> Collectives:
        """The collectives of all ranks of the run: in a pipeline also of other stages, which have other parameters."""
        return self if self._world is None else self._world

    @property
    def is_pipeline_stage(self) -> bool:
        """True in a pipeline."""
        return self._world is not None

    def gather_over_stages(self, what: str, payload: bytes) -> list[bytes]:
        """One `payload` per stage of a pipeline, from the ranks of this rank's column; without a pipeline its own."""
        return [payload]

    def is_saved_here(self, name: str) -> bool:
        """True if this stage writes the parameter or buffer into checkpoints; a tied one is written by one stage."""
        return True

    def duplicate_square_sum(self) -> SquareSum:
        """Sum of squares to add to this stage's, to correct for gradients that another stage counts too."""
        return SquareSum()

    def set_timeline(self, timeline: Timeline) -> None:
        """Record collectives in the timeline."""

    def allocate_shards(self, nbytes: int) -> SharedHostMemory | None:
        """Host memory for this rank's shards of an address space, readable by other ranks; None: not needed.

        Called in the order of the spaces.
        """
        return None

    def attach(self, layout: Layout, storage: Storage, updates: StepUpdates) -> None:
        """The storage exists on every rank. Collective."""

    def on_weights_initialized(self) -> None:
        """The arrays hold the initial values of this rank's shards."""

    def enqueue(self, what: str, unit: Unit) -> PendingWork:
        """Queue `what` ("gather", `NEAR` or "reduce") as the next work; the caller must run it or cancel it."""
        return ()

    def cancel(self, work: PendingWork, error: BaseException) -> None:
        """This rank cannot run work that it has queued: report the reason to ranks that wait for it. Any thread."""

    async def gather(self, work: PendingWork, unit: Unit, flat: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        """Fill `flat` (uint8, the unit's bytes); this rank's shard is there after the events `after`.

        Returns an event after the gather. With work for `NEAR`, this rank's part among its neighbours is there instead.
        """
        return after[0] if after else None

    @asynccontextmanager
    async def reduce(
        self, work: PendingWork, unit: Unit, flat: torch.Tensor, *after: MaybeEvent
    ) -> AsyncIterator[list[torch.Tensor]]:
        """The tensors to add up, in this order, for the sum of this rank's shard over all ranks' `flat`.

        Args:
            work: for "reduce".
            flat: (unit.numel,) this rank's; the caller must not change it until the context ends; it may hold sums.
            after: events after the work that filled it.
        """
        yield [flat]

    def can_reduce_from(self, flat: torch.Tensor) -> bool:
        """True if `flat` is in memory that `reduce` can use."""
        return True

    def on_step_decided(self, changing: Callable[[int], bool]) -> None:
        """A step is decided on every rank: gathers from now on must return the weights of that step.

        `changing`: unit index -> whether this rank's shard of the unit will change.
        """

    def on_weights_rewritten(self, unstored: Collection[int] = ()) -> None:
        """Weights have changed on every rank by other means than a step: gathers from now on return the new weights.

        `unstored`: indices of units whose new weights are not in their home until `on_weights_stored` is called.
        """

    def on_unit_updated(self, index: int) -> None:
        """A unit's weights of the last step are in their home. Called on the I/O loop."""

    def on_weights_stored(self, index: int) -> None:
        """A unit's rewritten weights are in their home. Called on the I/O loop."""

    def all_gather_bytes(self, what: str, payload: bytes) -> list[bytes]:
        """Every rank's `payload`, in rank order. Blocks until all have called it."""
        return [payload]

    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int) -> None:
        """Give every rank the values of `source_rank`, in place, in few messages. Blocks."""

    def ended_ranks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of these other ranks that have ended or closed their engine -> what is known about it. Any thread."""
        return {}

    def traffic(self) -> Mapping[str, TrafficCounts]:
        """The amounts that collectives have handled so far, by purpose."""
        return {}

    def clone(self) -> Collectives:
        """Collectives of the same ranks for another storage; these still serve their own storage until `detach`."""
        return self

    def detach(self) -> None:
        """Free everything that belongs to the storage; the clone continues."""

    def close(self, error: BaseException | None = None) -> None:
        """Free everything. Reports to the other ranks that this one has left, and `error`."""


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """How gradients are sent.

    Attributes:
        dtype: `communication_data_type`; None: the gradient's dtype.
        prescale: divide by the number of ranks before the sum.
        predivide_factor: divide by this part of the divisor before the sum.
        averages: False: no division, gradients are sums.
        overlaps: reductions overlap with the computation.
    """

    dtype: torch.dtype | None = None
    prescale: bool = False
    predivide_factor: float = 1.0
    averages: bool = True
    overlaps: bool = True


class MultiRankCollectives(Collectives):
    """What all collectives of several ranks have in common: methods that call their comm directly."""

    def __init__(
        self, comm: Comm, placement: Placement, reduce_options: ReduceOptions, world: Collectives | None = None
    ) -> None:
        super().__init__(placement, world)
        self._comm, self._reduce_options, self.overlaps = comm, reduce_options, reduce_options.overlaps
        self.scale = self.share = 1.0 / placement.world_size if reduce_options.averages else 1.0

    def set_timeline(self, timeline: Timeline) -> None:
        self._comm.timeline = timeline

    def all_gather_bytes(self, what: str, payload: bytes) -> list[bytes]:
        return self._comm.all_gather_bytes(what, payload)

    def ended_ranks(self, ranks: Sequence[int]) -> dict[int, str]:
        return self._comm.ended_ranks(ranks)

    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int) -> None:
        self._comm.broadcast(tensors, source_rank)


class TorchCollectives(MultiRankCollectives):
    """Collectives of torch.distributed. `reduce_options`: how gradients are sent."""

    def __init__(
        self, comm: Comm, placement: Placement, reduce_options: ReduceOptions, world: Collectives | None = None
    ) -> None:
        super().__init__(comm, placement, reduce_options, world)
        self._shard, self._replicas = comm.group(placement.shard_ranks), comm.group(placement.replica_ranks)
        self._near = comm.group(placement.secondary_ranks)
        self._predivisor = placement.world_size if reduce_options.prescale else reduce_options.predivide_factor
        self.scale = self._predivisor * self.share
        if self._replicas.size > 1:  # two sums in the dtype that is sent: each is divided before it is rounded to it
            parts = self._shard.size if reduce_options.averages else 1
            self._scales, self.scale = (1.0 / parts, self.scale * parts), 1.0
        self._receive_lock = asyncio.Lock()
        self._received: UnreducedGradients | None = None  # It has the memory for arriving parts.

    def attach(self, layout: Layout, storage: Storage, updates: StepUpdates) -> None:
        self._received = storage.unreduced_gradients

    def enqueue(self, what: str, unit: Unit) -> PendingWork:
        kinds = ["gather persistent" if unit.persistent and self.placement.weights_sharded else "gather"]
        if what == "gather":
            kinds *= self._shard.size > 1
        elif what == NEAR:
            kinds = [NEAR]
        else:
            kinds = ["reduce"] * (self._shard.size > 1)
            kinds += ["reduce over replicas", "gather over replicas"] * (self._replicas.size > 1)
        return tuple(self._comm.enqueue(kind, unit.index, unit.name) for kind in kinds)

    def cancel(self, work: PendingWork, error: BaseException) -> None:
        for queued in work:
            self._comm.cancel(queued, error)

    async def gather(self, work: PendingWork, unit: Unit, flat: torch.Tensor, *after: MaybeEvent) -> MaybeEvent:
        if not work:
            return after[0] if after else None
        group = self._near if work[0].kind == NEAR else self._shard
        return await self._comm.all_gather(work[0], flat.view(unit.dtype), group, *after)

    @asynccontextmanager
    async def reduce(
        self, work: PendingWork, unit: Unit, flat: torch.Tensor, *after: MaybeEvent
    ) -> AsyncIterator[list[torch.Tensor]]:
        """The memory for arriving parts has room for one unit, so one reduction runs at a time."""
        async with self._receive_lock:
            yield await self._reduce(list(work), unit, self._prepare_send(flat, after), *after)

    async def _reduce(
        self, queued: list[Any], unit: Unit, flat: torch.Tensor, *after: MaybeEvent
    ) -> list[torch.Tensor]:
        own, sources = flat, [flat]
        if self._shard.size > 1:
            into = self._allocate_receive_buffer(flat)
            sources = await self._comm.reduce_scatter(queued.pop(0), flat, self._shard, *after, into=into)
            own = unit.shard_of(flat)
        if self._replicas.size > 1:
            if self._shard.size > 1:
                kernels.reduce_ranks(own, sources, scale=self._scales[0])
            into = self._allocate_receive_buffer(own)
            parts = await self._comm.reduce_scatter(queued.pop(0), own, self._replicas, *after, into=into)
            part = own.chunk(self._replicas.size)[self._replicas.index]
            kernels.reduce_ranks(part, parts, scale=self._scales[1])
            streams = self._comm.streams
            streams.wait_events(await self._comm.all_gather(queued.pop(0), own, self._replicas, streams.record_event()))
            sources = [own]
        return sources

    def _prepare_send(self, flat: torch.Tensor, after: tuple[MaybeEvent, ...]) -> torch.Tensor:
        """`flat` in the form that is sent. A wider dtype is ignored where sums are made in fp32 anyway."""
        dtype = self._reduce_options.dtype or flat.dtype
        if dtype.itemsize == flat.element_size() or (dtype.itemsize > flat.element_size() and self._comm.fixed_order):
            dtype = flat.dtype
        if dtype != flat.dtype or self._predivisor != 1:
            self._comm.streams.wait_events(*after)  # below the I/O loop's stream reads or changes `flat`
        flat = flat.to(dtype)
        return flat if self._predivisor == 1 else flat.div_(self._predivisor)

    def _allocate_receive_buffer(self, flat: torch.Tensor) -> torch.Tensor | None:
        if self._received is None:
            return None
        return self._received.allocate_receive_buffer(flat.nbytes).view(flat.dtype)

    def traffic(self) -> Mapping[str, TrafficCounts]:
        return self._comm.traffic

    def clone(self) -> TorchCollectives:
        return TorchCollectives(self._comm, self.placement, self._reduce_options, self._world)

    def close(self, error: BaseException | None = None) -> None:
        self._comm.close(error)


def gather_on_host(collectives: Collectives, unit: Unit, flat: torch.Tensor) -> torch.Tensor:
    """Fill `flat` (host memory, bytes or elements of a unit) with all shards; this rank's is there. Collective."""
    ranks = collectives.placement.shard_ranks
    if len(ranks) == 1:
        return flat
    parts = [part.view(torch.uint8) for part in flat.chunk(len(ranks))]
    own = parts[collectives.placement.shard_index]
    for lo in range(0, own.numel(), HOST_CHUNK_BYTES):
        hi = min(lo + HOST_CHUNK_BYTES, own.numel())
        answers = collectives.all_gather_bytes(f"reading {unit.name}", bytes_of(own[lo:hi]))
        for part, rank in zip(parts, ranks, strict=True):
            if part is not own:
                part[lo:hi].copy_(bytes_tensor(answers[rank]))
    return flat
