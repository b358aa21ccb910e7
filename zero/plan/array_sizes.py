"""Sizes of tiered arrays on one rank, and the rows of a plan."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zero.params.layout import AddressSpace, Layout, SubGroup, Unit
from zero.plan.plan import DEVICE, HOST, NVME, Plan, PlanRow
from zero.plan.pools import PoolSizes
from zero.plan.sub_group_state import StateFormat

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
    yield PlanRow(HOST, "arena: records and chunks in flight", plan.host_pool_bytes)
