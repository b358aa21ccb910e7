"""Sizes of pools, the memory for data in flight. On the CPU fewer transfers need them than on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from offload.kernels.square_sums import ROW_BYTES, row_count
from offload.memory.device_poison import poison_bytes
from offload.memory.flat_storage import copies_to_bind
from offload.sizes import PAGE_BYTES, align_up
from zero.params.layout import Layout, SubGroup, Unit
from zero.params.placement import ONE_RANK, Placement
from zero.plan.depth import Depth

WIDE_CHUNK_NUMEL = 8 << 20
"""Elements of a gradient that are widened at once on a GPU. To begin a chunk was seen to take Python 0.43 ms, in which
PCIe 5 moves 6 M elements.
"""
SUM_CHUNK_BYTES = 32 << 20
"""Gradients that are added to earlier ones in host memory pass through chunks of it. One of 8 MiB was seen to take 1.6
ms, of which the memory's bandwidth explains 0.3.
"""
WHOLE_BYTES_PER_ELEMENT = 20
"""A square matrix in Muon takes fp32 master, gradient and direction (12), and bf16 factors of products (8)."""


def gradient_sums_bytes(unit: Unit) -> int:
    """Bytes of the sums of squares of this rank's shard of one unit's gradient."""
    return ROW_BYTES * row_count(unit.shard_numel)


class PoolSizes:
    """Sizes for one model.

    Args:
        device: units are computed there.
        on_gpu: the device's memory is not the host's.
        wide: gradients are accumulated in fp32 from the start.
        sums_micro_batches: gradients of several micro-batches are added up before they are stored or reduced.
        placement: which ranks share each unit.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        on_gpu: bool,
        wide: bool,
        sums_micro_batches: bool = False,
        placement: Placement = ONE_RANK,
    ) -> None:
        self._layout, self._device, self.on_gpu = layout, device, on_gpu
        self._wide, self._placement = wide, placement
        self._sums_micro_batches = sums_micro_batches and wide
        self._trained = [unit for unit in layout.units if unit.trainable]

    def placeholder_bytes(self) -> int:
        """Device memory of the poison that released parameters are views of."""
        return poison_bytes(max((unit.nbytes for unit in self._layout.units), default=0), self._device)

    def block_sum_bytes(self) -> int:
        """Host bytes of all block sums; pinned with a GPU, which can write only to pinned host memory."""
        return sum(map(gradient_sums_bytes, self._trained))

    def whole_parameter_bytes(self) -> int:
        """The most memory, besides tiered arrays, for the update of one whole parameter; 0 if no rule needs such."""
        numels = (slot.numel for unit in self._trained if unit.needs_whole_parameters for slot in unit.slots)
        return WHOLE_BYTES_PER_ELEMENT * max(numels, default=0)

    def unit_pool_bytes(self, movable: Sequence[Unit], in_place: Collection[int], depth: Depth) -> int:
        """Room for gathered units and for rows of experts.

        Args:
            movable: the units that are fetched and evicted.
            in_place: indices of the units that are used in place.
            depth: elements gathered at a time, and additional room because of holes.
        """
        pooled = [unit for unit in movable if unit.index not in in_place]
        numel = min(depth.live_numel + depth.slack_numel, sum(unit.numel for unit in pooled))
        width = max((unit.dtype.itemsize for unit in pooled), default=0)
        # Rows are gathered even if whole units are used in place: of at most two layers, when one is recomputed.
        rows = 2 * max((unit.nbytes for unit in movable if unit.expert_rows and unit.index in in_place), default=0)
        return align_up(numel * width, PAGE_BYTES) + rows

    def unit_copy_bytes(self, movable: Sequence[Unit], depth: Depth) -> int:
        """What parameters see of live and of persistent units, where that is not the memory of their values."""
        if not copies_to_bind(self._device):
            return 0
        width = max((unit.dtype.itemsize for unit in self._layout.units), default=0)
        persistent = sum(unit.nbytes for unit in self._layout.units if unit.persistent)
        return min(depth.live_numel, sum(unit.numel for unit in movable)) * width + persistent

    def gradient_pool_bytes(self, count: int) -> int:
        """Room for `count` flat gradients of the largest unit and for the gradients of persistent units.

        On a GPU it includes their sums and the chunks that are widened there.
        """
        sizes = [
            (unit.numel * 4 if self._sums_micro_batches else unit.nbytes, unit.persistent) for unit in self._trained
        ]
        largest = max((nbytes for nbytes, _ in sizes), default=0)
        # Two neighbouring persistent units may be open together, because gradients arrive in reverse model order.
        small = 2 * max((nbytes for nbytes, persistent in sizes if persistent and nbytes < largest), default=0)
        if not self._placement.is_single_rank:
            count += 1  # one is always zero: a rank without a gradient sends it
        flat = count * largest + small
        if not self.on_gpu or not flat:
            return flat
        sums = max(align_up(gradient_sums_bytes(unit), PAGE_BYTES) for unit in self._trained)
        longest = max(unit.numel for unit in self._trained)
        return flat + (count + 2) * sums + (min(WIDE_CHUNK_NUMEL, longest) * 4 if self._wide else 0)

    def secondary_shard_bytes(self, movable: Iterable[Unit]) -> dict[int, int]:
        """Index of each unit -> bytes of this rank's secondary shard of it (hpZ)."""
        size = self._placement.secondary_size
        return {unit.index: unit.nbytes // size for unit in movable} if size > 1 else {}

    def collective_bytes(self) -> int:
        """Room for data from other ranks while the largest gradient is reduced, or for shards that they read."""
        if self._placement.is_single_rank:
            return 0
        if self._placement.shares_memory:  # shards of persistent units, readable by the others
            sharded = [unit for unit in self._layout.units if unit.persistent and unit.shard_numel != unit.numel]
            return sum(unit.shard_numel * unit.dtype.itemsize for unit in sharded)
        deferred = self._sums_micro_batches or (self._placement.gradients_deferred and self._wide)
        width = 4 if deferred else max((unit.dtype.itemsize for unit in self._trained), default=0)
        return width * max((unit.numel for unit in self._trained), default=0)

    def staged_element_bytes(self, weights: bool, gradients: bool, widened: bool) -> int:
        """Bytes per element that an update on a GPU copies there: of weights, and of gradients, which may be fp32."""
        width = max((unit.dtype.itemsize for unit in self._trained), default=0)
        return (width if weights else 0) + ((4 if widened else width) if gradients else 0)

    def update_pool_bytes(
        self,
        groups: Iterable[SubGroup],
        staged_bytes_per_element: int,
        in_flight: int,
        state_bytes: Callable[[SubGroup], int] = lambda group: 0,
    ) -> int:
        """Room for values that updates on a GPU use and that live elsewhere.

        Args:
            groups: sub-groups updated on the GPU.
            staged_bytes_per_element: sum of the widths of the weights and gradients that are copied there.
            in_flight: number of sub-groups at a time.
            state_bytes: bytes of a sub-group's optimizer state, if it is copied there too.
        """
        if not self.on_gpu:
            return 0
        most = 0
        for group in groups:
            passing = (group.end - group.begin) * staged_bytes_per_element + align_up(state_bytes(group), PAGE_BYTES)
            # Each unit's part of an array begins on a new page.
            pages = 2 * (len(list(self._layout.units_in(group))) + 1)
            most = max(most, passing and passing + pages * PAGE_BYTES)
        return in_flight * most


def prefix_that_fits(sizes: Iterable[int], limit: int) -> tuple[int, int]:
    """(number of the first sizes that fit into `limit` together, what remains of `limit`)."""
    count = 0
    for size in sizes:
        if size > limit:
            break
        count, limit = count + 1, limit - size
    return count, limit
