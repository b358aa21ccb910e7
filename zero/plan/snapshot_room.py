"""What snapshots take: room for two slots of everything, and the bytes that each has to write."""

from __future__ import annotations

from offload.errors import ConfigError
from offload.sizes import format_bytes
from zero.config.offload_block import OffloadOptimizerConfig
from zero.plan.plan import NVME, Plan
from zero.plan.plane_sizes import PlaneSizes


def plan_snapshots(plan: Plan, sizes: PlaneSizes, offload: OffloadOptimizerConfig) -> int:
    """Bytes of NVMe that snapshots take beyond what lives there anyway; what they cost is noted in the plan.

    Args:
        plan: complete but for what this returns.
        sizes: of its planes.
        offload: the block that asks for them.

    Raises:
        ConfigError: states are not on NVMe.
    """
    snapshot = offload.snapshot
    if snapshot is None:
        return 0
    if offload.device != NVME:
        raise ConfigError(
            "zero_optimization.offload_optimizer.snapshot: snapshots keep states where they are, on NVMe; expected "
            f'offload_optimizer.device "nvme", got "{offload.device}"; set it, or remove the block'
        )
    plan.snapshots = True
    both = in_memory = through = 0
    for unit in sizes.layout.units:
        nbytes = unit.shard_numel * unit.dtype.itemsize
        both += 2 * nbytes
        if plan.weight_tiers[unit.index] != NVME:
            in_memory += nbytes
            through += nbytes if unit.trainable else 0
    for group, tier in zip(plan.sub_groups, plan.record_tiers, strict=True):
        nbytes = sizes.record_bytes(group)
        both += 2 * nbytes
        if tier != NVME:
            in_memory += nbytes
            through += nbytes
    often = "step" if snapshot.every == 1 else f"{snapshot.every} steps"
    plan.notes.append(
        f"snapshots: weights and states take {format_bytes(both)} of NVMe, twice their size; every {often} "
        f"{format_bytes(through)} of them that live in memory are written beside ({through:,} bytes)"
    )
    return both // 2 + in_memory
