"""The plan for states alone: parameters and gradients stay in their owner's memory, optimizer states are on a tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from offload.errors import BudgetError
from offload.kernels.masters import remainder_dtype
from offload.kernels.moments import MOMENTS_BLOCK_NUMEL
from offload.sizes import BLOCK_NUMEL, PAGE_BYTES, align_up, format_bytes
from offload.streams import shares_host_memory
from zero.config import Config
from zero.params.layout import AddressSpace, Layout, Slot, SubGroup, Unit
from zero.plan.array_sizes import ArraySizes
from zero.plan.machine import Machine
from zero.plan.plan import HOST, NVME, Limits, Plan, PlanRow, tier_of
from zero.plan.planner import STATE_DTYPES, SUB_GROUP_NUMEL_MAX, SUB_GROUPS_IN_FLIGHT


def lay_out_tensors(tensors: Sequence[tuple[int, str, torch.Tensor]], *, whole_parameters: bool = False) -> Layout:
    """Each tensor is a unit without padding; units of one dtype are an address space. Empty tensors are left out.

    Coordinates begin at whole blocks of moments, so that neighbours share no scale. If parameters are updated whole,
    they begin at whole blocks of states, so that neighbours share no sub-group.

    Args:
        tensors: (index of the parameter, name, tensor).
        whole_parameters: the rule needs whole parameters.
    """
    align = BLOCK_NUMEL if whole_parameters else MOMENTS_BLOCK_NUMEL
    ends: dict[torch.dtype, int] = {}
    units: list[Unit] = []
    for index, name, tensor in tensors:
        numel = tensor.numel()
        if not numel:
            continue
        begin = ends.get(tensor.dtype, 0)
        ends[tensor.dtype] = align_up(begin + numel, align)
        slot = Slot((name,), tensor.shape, numel, 0, index)
        unit = Unit(len(units), name, (slot,), numel, numel, tensor.dtype, True, True, begin)
        units.append(replace(unit, remainder=remainder_dtype(tensor.dtype), needs_whole_parameters=whole_parameters))
    spaces = (AddressSpace(dtype, True, tuple(unit for unit in units if unit.dtype == dtype)) for dtype in ends)
    return Layout(tuple(spaces), tuple(units))


def plan_states(
    layout: Layout, config: Config, machine: Machine, device: torch.device, states: tuple[tuple[str, ...], ...]
) -> Plan:
    """The tier of the states, and the number of sub-groups in memory at a time.

    Args:
        layout: see `lay_out_tensors`.
        config: only its `offload_optimizer` and `sub_group_size` are used.
        machine: the available memory.
        device: device of parameters and gradients; if it is not the host, updates copy them through host memory.
        states: names of the optimizer states of the one update rule.

    Raises:
        BudgetError: the host has no room.
    """
    offload = config.zero_optimization.offload_optimizer
    sizes = ArraySizes(layout, STATE_DTYPES[offload.state_dtype], states, wide=False)
    groups = _sub_groups(layout, config.zero_optimization.sub_group_size)
    state_sizes = [sizes.state_bytes(group) for group in groups]
    tier = tier_of(offload.device) if any(state_sizes) else HOST  # without states nothing is on a disk
    passing = [
        (state_bytes if tier == NVME else 0)
        + (0 if shares_host_memory(device) else _weight_and_gradient_bytes(layout, group))
        for group, state_bytes in zip(groups, state_sizes, strict=True)
    ]
    slot = align_up(max(passing, default=0), PAGE_BYTES)
    in_flight = offload.buffer_count or SUB_GROUPS_IN_FLIGHT
    plan = Plan(
        Limits(live_numel_max=0, prefetch_numel=0, reuse_numel_max=0),
        sub_groups=groups,
        state_tiers=(tier,) * len(groups),
        state_dtype=STATE_DTYPES[offload.state_dtype],
        states=states,
        states_only=True,
        sub_groups_in_flight=in_flight,
        host_pool_bytes=min(in_flight, len(groups)) * slot,
        baseline_bytes=machine.rss_bytes,
    )
    rows = (
        PlanRow(tier, "optimizer states", sum(state_sizes)),
        PlanRow(HOST, "arena: records in flight", plan.host_pool_bytes),
    )
    plan.rows = tuple(row for row in rows if row.nbytes)
    need = plan.tier_bytes(HOST)
    if need > machine.available_bytes:
        raise BudgetError(
            f"offload: {format_bytes(need)} of host memory are needed ({need:,} bytes), and "
            f"{format_bytes(machine.available_bytes)} are free ({machine.available_source}); "
            + ('set device to "nvme"' if tier == HOST else "set a smaller sub_group_size")
            + f"\n{plan.table()}"
        )
    return plan


def _sub_groups(layout: Layout, numel_max: int | None) -> tuple[SubGroup, ...]:
    largest = max((space.numel for space in layout.spaces), default=0)
    full = min(SUB_GROUP_NUMEL_MAX, align_up(-(-largest // SUB_GROUPS_IN_FLIGHT), BLOCK_NUMEL))
    groups = layout.sub_groups(full if numel_max is None else min(full, numel_max))
    # The last sub-group of an address space is extended to whole blocks too, because each block has its scales.
    return tuple(replace(group, end=align_up(group.end, BLOCK_NUMEL)) for group in groups)


def _weight_and_gradient_bytes(layout: Layout, group: SubGroup) -> int:
    """Bytes of the weights and gradients in a sub-group."""
    return 2 * (group.end - group.begin) * layout.spaces[group.space].dtype.itemsize
