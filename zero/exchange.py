"""How the slices of a unit come together, and how gradients are added up: what the ranks of one engine exchange.

[Note: order] Whoever decides that something is exchanged takes a turn for it at once, on the thread that decides. Turns
are taken in the same order on every rank, and exchanged in that order, whatever the disk does in between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import torch

from offload import kernels
from offload.streams import Fence
from zero.comm import Comm, Ticket
from zero.params.layout import Unit
from zero.placement import ONE_RANK, Placement

Turn = tuple[Ticket, ...]

HOST_CHUNK_BYTES = 16 << 20
"""Of a slice, at a time, where values are read on the host."""


class Exchange(Protocol):
    """What an engine asks of the other ranks."""

    placement: Placement

    def turn(self, what: str, unit: Unit) -> Turn:
        """Take the next turn for `what` ("gather" or "reduce"); it must be used."""

    async def gather(self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence) -> Fence:
        """Fill `flat` (uint8, the unit's bytes), of which this rank's slice is there behind `after`. Returns behind."""

    def reduce(
        self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence
    ) -> AbstractAsyncContextManager[list[torch.Tensor]]:
        """What has to be added up, in that order, to get the sum of this rank's slice over all ranks' `flat`.

        Args:
            turn: for "reduce".
            unit: whose gradient.
            flat: (unit.numel,) this rank's; must stay as it is until the context ends, and may be used for sums.
            after: fences behind what filled it.
        """

    def agree(self, what: str, payload: bytes) -> list[bytes]:
        """Every rank's `payload`, in rank order. Blocks until all have called it."""

    def broadcast(self, tensor: torch.Tensor, source_rank: int) -> None:
        """Give every rank the values of `source_rank`, in place. Blocks."""

    def close(self) -> None:
        """Let go of what the exchange holds."""


class Alone:
    """One rank: there is nobody to exchange anything with."""

    def __init__(self, placement: Placement = ONE_RANK) -> None:
        self.placement = placement

    def turn(self, what: str, unit: Unit) -> Turn:
        """See `Exchange`."""
        return ()

    async def gather(self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence) -> Fence:
        """See `Exchange`."""
        return after[0] if after else None

    @asynccontextmanager
    async def reduce(
        self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence
    ) -> AsyncIterator[list[torch.Tensor]]:
        """See `Exchange`."""
        yield [flat]

    def agree(self, what: str, payload: bytes) -> list[bytes]:
        """See `Exchange`."""
        return [payload]

    def broadcast(self, tensor: torch.Tensor, source_rank: int) -> None:
        """See `Exchange`."""

    def close(self) -> None:
        """See `Exchange`."""


class Collectives:
    """Exchange by collectives of torch.distributed.

    Args:
        comm: of this engine.
        placement: of this rank.
    """

    def __init__(self, comm: Comm, placement: Placement) -> None:
        self._comm, self.placement = comm, placement
        self._shard, self._replicas = comm.group(placement.shard_ranks), comm.group(placement.replica_ranks)

    def turn(self, what: str, unit: Unit) -> Turn:
        """See `Exchange`."""
        kinds = {"gather": [what] * (self._shard.size > 1)}.get(what)
        if kinds is None:
            kinds = ["reduce"] * (self._shard.size > 1) + ["reduce replicas", "gather replicas"] * (
                self._replicas.size > 1
            )
        return tuple(self._comm.ticket(kind, unit.index, unit.name) for kind in kinds)

    async def gather(self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence) -> Fence:
        """See `Exchange`."""
        if not turn:
            return after[0] if after else None
        return await self._comm.all_gather(turn[0], flat, self._shard, *after)

    @asynccontextmanager
    async def reduce(
        self, turn: Turn, unit: Unit, flat: torch.Tensor, *after: Fence
    ) -> AsyncIterator[list[torch.Tensor]]:
        """See `Exchange`."""
        tickets, own = list(turn), flat
        sources = [flat]
        if self._shard.size > 1:
            sources = await self._comm.reduce_scatter(tickets.pop(0), flat, self._shard, *after)
            own = unit.own(flat)
        if self._replicas.size > 1:
            if self._shard.size > 1:
                _add_up(own, sources)
            parts = await self._comm.reduce_scatter(tickets.pop(0), own, self._replicas, *after)
            _add_up(own.chunk(self._replicas.size)[self._replicas.index], parts)
            await self._comm.all_gather(tickets.pop(0), own, self._replicas)
            sources = [own]
        yield sources

    def agree(self, what: str, payload: bytes) -> list[bytes]:
        """See `Exchange`."""
        return self._comm.agree(what, payload)

    def broadcast(self, tensor: torch.Tensor, source_rank: int) -> None:
        """See `Exchange`."""
        self._comm.broadcast(tensor, source_rank)

    def close(self) -> None:
        """See `Exchange`."""
        self._comm.close()


def whole(exchange: Exchange, unit: Unit, flat: torch.Tensor) -> torch.Tensor:
    """`flat` (host memory, bytes or elements of a unit) with all slices; this rank's is there. All ranks come here."""
    ranks = exchange.placement.shard_ranks
    if len(ranks) == 1:
        return flat
    parts = [part.view(torch.uint8) for part in flat.chunk(len(ranks))]
    own = parts[exchange.placement.shard_index]
    for lo in range(0, own.numel(), HOST_CHUNK_BYTES):
        hi = min(lo + HOST_CHUNK_BYTES, own.numel())
        answers = exchange.agree(f"reading {unit.name}", own[lo:hi].numpy().tobytes())
        for part, rank in zip(parts, ranks, strict=True):
            if part is not own:
                part[lo:hi].copy_(torch.frombuffer(bytearray(answers[rank]), dtype=torch.uint8))
    return flat


def _add_up(into: torch.Tensor, sources: list[torch.Tensor]) -> None:
    if len(sources) == 1 and sources[0] is into:
        return
    kernels.reduce_ranks(into, sources)
