"""Sizes of tiered arrays on one rank, and the rows of a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.kernels.square_sums import ROW_BYTES, row_count
from offload.memory.device_poison import poison_bytes
from offload.memory.flat_storage import copies_to_bind
from offload.sizes import PAGE_BYTES, align_up
from zero.params.layout import ONE_RANK, AddressSpace, Layout, Placement, SubGroup, Unit
from zero.params.units import LiveNumels
from zero.plan.plan import DEVICE, HOST, NVME, Plan, PlanRow
from zero.plan.sub_group_state import StateFormat

# ---- depth ---------------------------------------------------------------------------------------------------------
# The depth of a plan: how much is on the device at once, from the least possible to all spare memory.
#
# [Note: the rule] The planner tries one depth after the other, deepest first, and takes the first plan that fits.
#
# 1. *Deep*: four neighbouring units are gathered (one in use, one or two prefetched, one kept), with room for one more,
#    so that holes between blocks of unequal size block nothing. There are two flat gradients, so that one is moved away
#    while the next is made. With `memory_budget.device` what remains of the budget is used for gathered units. Without
#    it this is done on a GPU as long as these pools stay within a fifth of the free memory; on a CPU, device memory is
#    host memory and is not used for this.
# 2. *Lean*: three neighbours, two gradients. Without a budget it is the deepest if deep takes more than that fifth.
# 3. *Short*: two neighbours, one gradient. Like lean it takes at most half of the free memory: the other half is for
#    activations, and for the gradients that autograd makes.
# 4. *Least*: the units of one call, one gradient, no prefetching. It takes as much as it needs.
#
# Additional gathered elements are used to keep units from their forward to their backward, a quarter of them to
# prefetch. A depth changes speed and memory, never the layout and never a result.
#
# [Note: neighbours] They are units that modules use one after the other, in model order; the units of one module, such
# as a frozen base and its adapters, count together. Each count includes the parameters in use around it, of a module
# whose children are being called. With `stage3_max_live_parameters` nothing fills spare memory: that many elements are
# gathered at most, but never fewer than one call uses.


FREE_SHARE = 0.2
"""Part of a device's free memory that a plan without a budget may fill; what remains is for activations."""


POOL_SHARE = 0.5
"""Part of it for pools if memory is short; only the least depth, the need of one call, may take more."""


@dataclass(frozen=True, slots=True)
class Depth:
    """Memory on the device for units and gradients that do not live there."""

    live_numel: int
    """Elements gathered at a time, including units of enclosing modules."""
    slack_numel: int
    """Additional room, because of holes."""
    gradients: int
    """Flat gradients of the largest unit."""

    def add_live(self, numel: int) -> Depth:
        """The depth with `numel` more gathered elements."""
        return replace(self, live_numel=self.live_numel + numel)

    def limit_to(self, live_numel_max: int | None) -> Depth:
        """The depth with at most `live_numel_max` gathered elements."""
        return self if live_numel_max is None else replace(self, live_numel=min(self.live_numel, live_numel_max))


def depths(uses: LiveNumels, largest_numel: int) -> tuple[Depth, Depth, Depth, Depth]:
    """Deep, lean, short and least.

    Args:
        uses: uses of the model's units that are fetched and evicted.
        largest_numel: elements of the largest of these units.
    """
    around = uses.enclosing_max
    # A block that stays in the middle of the pool leaves two holes: any unit must fit into the larger one.
    hole = largest_numel if around else 0

    def neighbours(count: int) -> int:
        return max(_largest_window(uses.per_module, count) + around, uses.peak)

    return (
        Depth(neighbours(4), largest_numel, 2),
        Depth(neighbours(3), hole, 2),
        Depth(neighbours(2), hole, 1),
        Depth(uses.peak, hole, 1),
    )


def _largest_window(numels: Sequence[int], count: int) -> int:
    return max((sum(numels[i : i + count]) for i in range(len(numels))), default=0)


# ---- pools ---------------------------------------------------------------------------------------------------------
# Sizes of pools, the memory for data in flight. On the CPU fewer transfers need them than on a GPU.


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


WHOLE_PARAMETER_ROW = "whole parameter in an update"
"""Name of the row for memory that is allocated only during the update."""
PADDING_WORTH_A_NOTE = 0.1
"""Smallest share of padding, among all elements including it, for a note in the plan."""


class ArraySizes:
    """Sizes for one model.

    Args:
        layout: units and address spaces.
        state_dtype: dtype of the states.
        states: names of the optimizer states of each update rule.
        wide: gradients are accumulated in fp32 from the start.
    """

    def __init__(
        self, layout: Layout, state_dtype: torch.dtype, states: tuple[tuple[str, ...], ...], *, wide: bool
    ) -> None:
        self.layout = layout
        self._state_dtype = state_dtype
        self._states = states
        self._wide = wide

    def weight_bytes(self, unit: Unit) -> int:
        """Bytes of a unit's weights on this rank: its shard, or the whole unit if it is persistent."""
        return (unit.numel if unit.persistent else unit.shard_numel) * unit.dtype.itemsize

    def gradient_bytes(self, unit: Unit) -> int:
        """Bytes of this rank's shard of a unit's gradient."""
        return unit.shard_numel * (4 if self._wide else unit.dtype.itemsize)

    def state_bytes(self, group: SubGroup) -> int:
        """Bytes of a sub-group's optimizer state."""
        return self.state_format(self.layout.spaces[group.space]).nbytes(group.end - group.begin)

    def state_format(self, address_space: AddressSpace) -> StateFormat:
        return StateFormat(address_space.remainder, self._state_dtype, self._states[address_space.rule])

    def all_states_bytes(self, numel: int) -> int:
        """Bytes of all optimizer states if sub-groups have `numel` elements."""
        total = 0
        for space, begin, end, group_numel in self.layout.sub_group_runs(numel):
            count, last_numel = divmod(end - begin, group_numel)
            state_format = self.state_format(self.layout.spaces[space])
            total += count * state_format.nbytes(group_numel) + state_format.nbytes(last_numel)
        return total


def padding_notes(trained: Iterable[Unit], ranks: int) -> list[str]:
    """A note about padding in units that are updated as whole parameters, if there is much of it."""
    units = [unit for unit in trained if unit.needs_whole_parameters]
    numel = sum(unit.numel for unit in units)
    share = 1 - sum(slot.numel for unit in units for slot in unit.slots) / max(numel, 1)
    if not units or share < PADDING_WORTH_A_NOTE:
        return []
    why = (
        f": each of the {ranks} ranks updates some of them whole, and they cannot be divided evenly"
        if ranks > 1
        else ""
    )
    return [f"{share:.0%} of the {numel:,} elements that are updated as whole parameters are padding{why}"]


def rows_of(plan: Plan, sizes: ArraySizes, pools: PoolSizes) -> Iterable[PlanRow]:
    """The rows of a plan that is otherwise complete; some rows have 0 bytes."""
    units = sizes.layout.units
    trained = [unit for unit in units if unit.trainable]
    for tier in (DEVICE, HOST, NVME):
        yield PlanRow(tier, "weights", sum(sizes.weight_bytes(u) for u in units if plan.weight_tiers[u.index] == tier))
        gradients = sum(sizes.gradient_bytes(u) for u in trained if plan.gradient_tiers[u.index] == tier)
        yield PlanRow(tier, "gradients", gradients)
        groups = zip(plan.sub_groups, plan.state_tiers, strict=True)
        yield PlanRow(tier, "optimizer states", sum(sizes.state_bytes(g) for g, t in groups if t == tier))
    yield PlanRow(DEVICE, "small optimizer states", plan.small_bytes)
    yield PlanRow(DEVICE, "weights shared out inside nodes", sum(plan.secondary_shard_bytes.values()))
    yield PlanRow(DEVICE, "gathered units", plan.unit_pool_bytes)
    yield PlanRow(DEVICE, "copies of units in use", plan.unit_copy_bytes)
    yield PlanRow(DEVICE, "flat gradients in flight", plan.gradient_pool_bytes)
    yield PlanRow(DEVICE, "shards in flight between ranks", plan.collective_bytes)
    yield PlanRow(DEVICE, "gradients of this rank, not reduced yet", plan.deferred_bytes)
    yield PlanRow(DEVICE, "updates in flight", plan.update_pool_bytes)
    yield PlanRow(DEVICE if pools.on_gpu else HOST, WHOLE_PARAMETER_ROW, pools.whole_parameter_bytes())
    yield PlanRow(DEVICE, "stand-in for what is away", pools.placeholder_bytes())
    yield PlanRow(HOST, "block sums of gradients", pools.block_sum_bytes())
    yield PlanRow(NVME, "second slots", plan.second_slot_bytes)
    yield from plan.activations.rows()
    yield PlanRow(HOST, "pool: states and chunks in flight", plan.host_pool_bytes)
