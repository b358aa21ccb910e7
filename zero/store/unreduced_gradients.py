"""Memory for whole gradients, as autograd makes them, before they are reduced to this rank's shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from offload.memory.pool import BlockPool, LinearPool
from offload.memory.shared_host_memory import SharedHostMemory
from offload.sizes import PAGE_BYTES, align_up
from zero.params.layout import Layout, Unit
from zero.plan.plan import DEVICE, Plan


class SharedAllocator(Protocol):
    """Allocates memory that all ranks see. All ranks make the same calls, in the same order."""

    def allocate_common(self, nbytes: int, what: str) -> SharedHostMemory:
        """The same bytes for all ranks, zero."""

    def allocate_own(self, nbytes: int, what: str) -> SharedHostMemory:
        """Bytes of this rank that the others can read."""


class UnreducedGradients:
    """Memory for the whole gradients of one engine.

    Args:
        allocate_pool: allocates on a tier; the memory is freed with the engine.
        shared: allocates the memory if ranks share memory, so that the owner of a shard can read the shard here.

    Attributes:
        pool: flat gradients in flight.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        device: torch.device,
        allocate_pool: Callable[[str, int], LinearPool],
        shared: SharedAllocator | None,
    ) -> None:
        self._layout, self._plan, self._allocate_pool = layout, plan, allocate_pool
        self._deferred: dict[int, torch.Tensor] = {}
        self._deferred_memory: torch.Tensor | None = None
        self._receive_buffer: torch.Tensor | None = None
        self._memory_pools: list[LinearPool] = []
        memory = None
        if shared is not None:
            pool_bytes = align_up(plan.gradient_pool_bytes, PAGE_BYTES)
            memory = shared.allocate_own(pool_bytes + plan.deferred_bytes, "gradients")
            self._deferred_memory = memory.data[pool_bytes:]
        self.pool = BlockPool("flat gradients", plan.gradient_pool_bytes, "memory_budget.device", device, shared=memory)

    def allocate_deferred_sum(self, unit: Unit) -> torch.Tensor:
        """The sum of several contributions to a unit, fp32 (unit.numel,); in planned memory if the plan has some."""
        if unit.index not in self._deferred:
            planned = bool(self._plan.deferred_bytes) and not self._deferred
            units = [u for u in self._layout.units if u.trainable] if planned else [unit]
            nbytes = sum(u.numel * 4 for u in units)
            memory = self._deferred_memory if planned else None
            if memory is None:
                memory = self._allocate_memory(nbytes)
            parts = torch.split(memory.view(torch.float32), [u.numel for u in units])
            self._deferred.update({u.index: part for u, part in zip(units, parts, strict=True)})
        return self._deferred[unit.index]

    def allocate_receive_buffer(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8, for parts of gradients that other ranks send; the same memory in all calls."""
        # More than planned, if a sum is wider.
        if self._receive_buffer is None or self._receive_buffer.numel() < nbytes:
            total = max(nbytes, self._plan.collective_bytes)
            self._receive_buffer = self._allocate_memory(total)
        return self._receive_buffer[:nbytes]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of device memory that only this rank uses, in all deferred sums and in the receive buffer."""
        return sum(pool.nbytes for pool in self._memory_pools if pool.is_movable)

    def free_unused(self) -> None:
        """Free the memory of deferred sums and of the receive buffer, all unused; a later call allocates it again."""
        for pool in self._memory_pools:
            pool.close()
        self._memory_pools, self._deferred, self._receive_buffer = [], {}, None

    def _allocate_memory(self, nbytes: int) -> torch.Tensor:
        pool = self._allocate_pool(DEVICE, nbytes)
        self._memory_pools.append(pool)
        return pool.allocate(nbytes)
