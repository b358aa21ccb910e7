"""Weights that neighbours shard a second time among themselves, so that most gathers stay inside a node (hpZ).

[Note: near gathers] The first gather of a unit after its weights may have changed needs the shards of all ranks. Each
rank then keeps its part of the unit among its neighbours, and later gathers of the unit need only the neighbours. The
kind of a gather depends only on earlier decisions and on changes of the weights, so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.errors import StateError
from offload.streams import MaybeEvent
from zero.params.layout import Layout, Unit
from zero.store.collectives import NEAR, Collectives, PendingWork
from zero.store.storage import Storage


class SecondaryShards:
    """See above. Without hpZ it does nothing. `storage`: has the memory for this rank's parts."""

    def __init__(self, layout: Layout, storage: Storage, collectives: Collectives) -> None:
        self._storage, self._collectives, self._placement = storage, collectives, collectives.placement
        self._current: set[int] = set()  # Units whose part is current once all gathers decided so far are over.
        self._filled: set[int] = set()  # Units among them whose part is there; the I/O loop adds them.

    def enqueue_near(self, unit: Unit) -> PendingWork | None:
        """Queue a gather of the unit from the neighbours; None: gather it from all ranks, and then `store_part`."""
        if unit.index in self._current:
            return self._collectives.enqueue(NEAR, unit)
        if unit.index in self._storage.secondary_shards:
            self._filled.discard(unit.index)
            self._current.add(unit.index)
        return None

    def invalidate(self, indices: Iterable[int]) -> None:
        """The weights of these units change, on every rank."""
        self._current.difference_update(indices)

    # ---- the I/O loop -------------------------------------------------------------------------

    def store_part(self, unit: Unit, flat: torch.Tensor, after: MaybeEvent) -> MaybeEvent:
        """Copy this rank's part of `flat` (uint8, the unit's bytes, there after `after`). Returns a later event."""
        home, streams = self._storage.secondary_shards.get(unit.index), self._storage.streams
        if home is None:
            return after
        with streams.collective_stream(after):  # near gathers read the part on the same stream, in order
            home.copy_(self._own_part(flat))
            self._filled.add(unit.index)
            return streams.record_event()

    async def gather(
        self, unit: Unit, flat: torch.Tensor, events: tuple[MaybeEvent, ...], work: PendingWork
    ) -> MaybeEvent:
        """Fill `flat` (uint8, the unit's bytes) from the neighbours' parts; `events` are after its last uses."""
        if unit.index not in self._filled:
            raise StateError(f"gathering {unit.name} inside the node: the earlier gather from all ranks has failed")
        streams = self._storage.streams
        with streams.collective_stream(*events):
            self._own_part(flat).copy_(self._storage.secondary_shards[unit.index])
            own = streams.record_event()
        return await self._collectives.gather(work, unit, flat, own)

    def _own_part(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.chunk(self._placement.secondary_size)[self._placement.secondary_index]
