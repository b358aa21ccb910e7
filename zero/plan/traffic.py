"""The traffic and the updates of a step, predicted from the plan."""

from __future__ import annotations

from dataclasses import dataclass

from zero.params.layout import Layout, Unit
from zero.plan.plan import DEVICE, NVME, Plan
from zero.plan.sizes import ArraySizes


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Traffic of one optimizer step of one rank, after the schedule is learnt."""

    update_read_bytes: int
    """Read from NVMe by updates; the next forward uses the weights among them."""
    update_write_bytes: int
    """Written to NVMe by updates."""
    fetch_read_bytes: int
    """Read from NVMe by further forwards and by backwards."""
    gradient_read_bytes: int
    gradient_write_bytes: int
    copied_in_bytes: int
    """Gathered units that are copied to a device with memory of its own."""
    copied_out_bytes: int
    """Gradients that are copied from such a device."""
    host_updated_numel: int
    """Elements that the CPU updates; all others are updated on the device."""

    @property
    def nvme_read_bytes(self) -> int:
        return self.update_read_bytes + self.fetch_read_bytes + self.gradient_read_bytes

    @property
    def nvme_write_bytes(self) -> int:
        return self.update_write_bytes + self.gradient_write_bytes


def step_traffic(plan: Plan, layout: Layout, *, on_gpu: bool) -> StepTraffic:
    """Traffic of a step in which every forward and every backward uses each unit once.

    Args:
        plan: the plan of one rank.
        layout: the layout that the plan was made for.
        on_gpu: the device has memory of its own.
    """
    sizes = ArraySizes(layout, plan.state_dtype, plan.states, wide=plan.gradient_wide)
    trained = [unit for unit in layout.units if unit.trainable]
    movable = [unit for unit in layout.units if not unit.persistent]
    on_disk = {unit.index for unit in layout.units if plan.weight_tiers[unit.index] == NVME}
    until_backward = _units_left_cached(plan, movable)
    until_forward = _units_left_cached(plan, movable[::-1])  # of the next pass, where the step comes later
    groups = list(zip(plan.sub_groups, plan.state_tiers, strict=True))
    state_bytes = sum(sizes.state_bytes(group) for group, tier in groups if tier == NVME)
    trained_weights = sum(_shard_bytes(unit) for unit in trained if unit.index in on_disk)
    fetched = gathered = 0
    for unit in movable:
        forwards = plan.passes - (plan.passes - 1) * (unit.index in until_forward)
        backwards = 0 if unit.index in until_backward else plan.passes
        gathered += (forwards + backwards) * _shard_bytes(unit) if plan.weight_tiers[unit.index] != DEVICE else 0
        # The first forward after a step uses the weights that the update has read; frozen units are read each time.
        read = forwards - unit.trainable + backwards
        fetched += read * _shard_bytes(unit) if unit.index in on_disk else 0
    spilled = sum(sizes.gradient_bytes(unit) for unit in trained if plan.gradient_tiers[unit.index] == NVME)
    spilled *= plan.passes
    copied_out = plan.passes * sum(_shard_bytes(unit) for unit in trained if plan.gradient_tiers[unit.index] != DEVICE)
    return StepTraffic(
        update_read_bytes=state_bytes + trained_weights,
        update_write_bytes=state_bytes + trained_weights,
        fetch_read_bytes=fetched,
        gradient_read_bytes=spilled,
        gradient_write_bytes=spilled,
        copied_in_bytes=gathered if on_gpu else 0,
        copied_out_bytes=copied_out if on_gpu else 0,
        host_updated_numel=sum(g.end - g.begin for g, tier in groups if tier != DEVICE or not on_gpu),
    )


def _units_left_cached(plan: Plan, units: list[Unit]) -> set[int]:
    """Units that stay on the device when they have been used in this order, and the reverse order comes next.

    As `is_reused_soon` decides (zero/cache/policy.py): their next use is near, and the units in between fit too.
    """
    cached: set[int] = set()
    after_numel = 0
    for unit in reversed(units):
        if 2 * after_numel > plan.limits.reuse_numel_max or after_numel + unit.numel > plan.limits.live_numel_max:
            break
        cached.add(unit.index)
        after_numel += unit.numel
    return cached


def _shard_bytes(unit: Unit) -> int:
    return unit.shard_numel * unit.dtype.itemsize
