"""Memory for whole gradients, as autograd makes them, before they are reduced to this rank's slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from offload.memory.arena import BlockPool, LinearPool
from offload.memory.shared_region import SharedHostMemory
from offload.sizes import PAGE_BYTES, align_up
from zero.params.layout import Layout, Unit
from zero.plan.plan import DEVICE, Plan


class SharedPlaces(Protocol):
    """Allocates memory that all ranks see. All ranks make the same calls, in the same order."""

    def common(self, nbytes: int, what: str) -> SharedHostMemory:
        """The same bytes for all ranks, zero."""

    def own(self, nbytes: int, what: str) -> SharedHostMemory:
        """Bytes of this rank that the others can read."""


class WholeGradients:
    """Memory for the whole gradients of one engine.

    Args:
        region: allocates on a tier; the memory is freed with the engine.
        shared: allocates the memory if ranks share memory, so that the owner of a slice can read the slice here.

    Attributes:
        pool: flat gradients in flight.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        device: torch.device,
        region: Callable[[str, int], LinearPool],
        shared: SharedPlaces | None,
    ) -> None:
        self._layout, self._plan, self._region = layout, plan, region
        self._deferred: dict[int, torch.Tensor] = {}
        self._deferred_memory: torch.Tensor | None = None
        self._arriving: torch.Tensor | None = None
        self._regions: list[LinearPool] = []
        both = None
        if shared is not None:
            pool_bytes = align_up(plan.gradient_pool_bytes, PAGE_BYTES)
            both = shared.own(pool_bytes + plan.deferred_bytes, "gradients")
            self._deferred_memory = both.data[pool_bytes:]
        self.pool = BlockPool("flat gradients", plan.gradient_pool_bytes, "memory_budget.device", device, shared=both)

    def deferred(self, unit: Unit) -> torch.Tensor:
        """The sum of several contributions to a unit, fp32 (unit.numel,); in planned memory if the plan has some."""
        if unit.index not in self._deferred:
            planned = bool(self._plan.deferred_bytes) and not self._deferred
            units = [u for u in self._layout.units if u.trainable] if planned else [unit]
            nbytes = sum(u.numel * 4 for u in units)
            memory = self._deferred_memory if planned else None
            if memory is None:
                memory = self._taken(nbytes)
            parts = torch.split(memory.view(torch.float32), [u.numel for u in units])
            self._deferred.update({u.index: part for u, part in zip(units, parts, strict=True)})
        return self._deferred[unit.index]

    def arriving(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8, for parts of gradients that other ranks send; the same memory in all calls."""
        if self._arriving is None or self._arriving.numel() < nbytes:  # more than planned, if a sum is wider
            total = max(nbytes, self._plan.collective_bytes)
            self._arriving = self._taken(total)
        return self._arriving[:nbytes]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of device memory that only this rank uses, in all results of `deferred` and `arriving`."""
        return sum(region.nbytes for region in self._regions if region.is_movable)

    def give_up(self) -> None:
        """Free the unused memory of `deferred` and `arriving`; a later call allocates it again."""
        for region in self._regions:
            region.close()
        self._regions, self._deferred, self._arriving = [], {}, None

    def _taken(self, nbytes: int) -> torch.Tensor:
        region = self._region(DEVICE, nbytes)
        self._regions.append(region)
        return region.allocate(nbytes)
