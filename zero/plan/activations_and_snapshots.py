"""Memory in the plan besides tiered arrays: for saved activations, and for the second slots of snapshots.

The size of activations depends on the batch: the user sets it, or the memory grows when it is needed.
"""

from __future__ import annotations

from offload.errors import BudgetError, ConfigError
from offload.saved.growing_pool import STEP_BYTES
from offload.saved.spill_store import PIECE_BYTES, PIECES_IN_FLIGHT
from offload.sizes import PAGE_BYTES, align_up, format_bytes
from zero.config import Config
from zero.config.machine_block import ActivationCheckpointing
from zero.config.zero_block import OffloadOptimizerConfig
from zero.plan.array_sizes import ArraySizes
from zero.plan.plan import DEVICE, HOST, NVME, ActivationPlan, Plan, tier_of

ACTIVATION_BYTES_KEY = "activation_checkpointing.activation_bytes"


def activation_tier(block: ActivationCheckpointing) -> str | None:
    """The tier for saved inputs; None: they stay where they are."""
    tier = tier_of(block.device)
    return tier if tier != DEVICE or block.contiguous_memory_optimization else None


def plan_activations(config: Config) -> ActivationPlan:
    """The part of the plan for saved activations.

    Raises:
        BudgetError: host memory is budgeted in bytes, and their part of it is not set.
    """
    block, budget = config.activation_checkpointing, config.memory_budget.host
    tier = activation_tier(block)
    nbytes = None if block.activation_bytes is None else align_up(block.activation_bytes, PAGE_BYTES)
    if tier == HOST and nbytes is None and isinstance(budget, int):
        raise BudgetError(
            f"{ACTIVATION_BYTES_KEY}: expected bytes, because memory_budget.host is {budget:,} and saved activations "
            "go to host memory; set how many of these bytes they may take"
        )
    if tier != NVME:
        return ActivationPlan(tier, nbytes)
    in_flight_bytes = PIECES_IN_FLIGHT * PIECE_BYTES
    if nbytes is None:
        return ActivationPlan(tier, nbytes, in_flight_bytes, STEP_BYTES)
    return ActivationPlan(tier, nbytes, min(in_flight_bytes, nbytes), nbytes)


def plan_snapshots(plan: Plan, sizes: ArraySizes, offload: OffloadOptimizerConfig) -> int:
    """Bytes of NVMe that snapshots take in addition to the tiered arrays there; a note in the plan says what they cost.

    Args:
        plan: complete, except for the result of this function.
        sizes: sizes of its tiered arrays.
        offload: the block that configures snapshots.

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
    slot_bytes = in_memory_bytes = written_bytes = 0
    for unit in sizes.layout.units:
        nbytes = unit.shard_numel * unit.dtype.itemsize
        slot_bytes += 2 * nbytes
        if plan.weight_tiers[unit.index] != NVME:
            in_memory_bytes += nbytes
            written_bytes += nbytes if unit.trainable else 0
    for group, tier in zip(plan.sub_groups, plan.state_tiers, strict=True):
        nbytes = sizes.state_bytes(group)
        slot_bytes += 2 * nbytes
        if tier != NVME:
            in_memory_bytes += nbytes
            written_bytes += nbytes
    interval = "step" if snapshot.every == 1 else f"{snapshot.every} steps"
    plan.notes.append(
        f"snapshots: weights and states take {format_bytes(slot_bytes)} of NVMe, twice their size; every {interval} "
        f"{format_bytes(written_bytes)} of them that are kept in memory are written too ({written_bytes:,} bytes)"
    )
    return slot_bytes // 2 + in_memory_bytes
