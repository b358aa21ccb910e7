"""How much is set aside for saved activations: their sum depends on the batch, so the user says it, or it grows."""

from __future__ import annotations

from offload.errors import BudgetError
from offload.saved.slabs import STEP_BYTES
from offload.saved.spill_store import PIECE_BYTES, PIECES_IN_FLIGHT
from offload.sizes import PAGE_BYTES, align_up
from zero.config import Config
from zero.config.activation_block import ActivationCheckpointing
from zero.plan.plan import DEVICE, HOST, NVME, ActivationPlan, tier_of

KNOB = "activation_checkpointing.activation_bytes"


def tier_in(block: ActivationCheckpointing) -> str | None:
    """Where saved inputs go; None: they stay where they are."""
    tier = tier_of(block.device)
    return tier if tier != DEVICE or block.contiguous_memory_optimization else None


def plan_activations(config: Config) -> ActivationPlan:
    """The part of the plan that saved activations have.

    Raises:
        BudgetError: host memory is budgeted in bytes, and nobody said how much of it they may take.
    """
    block, budget = config.activation_checkpointing, config.memory_budget.host
    tier = tier_in(block)
    nbytes = None if block.activation_bytes is None else align_up(block.activation_bytes, PAGE_BYTES)
    if tier == HOST and nbytes is None and isinstance(budget, int):
        raise BudgetError(
            f"{KNOB}: expected bytes, because memory_budget.host is {budget:,} and saved activations go to host "
            "memory; say how many of these bytes they may take"
        )
    if tier != NVME:
        return ActivationPlan(tier, nbytes)
    passing_bytes = PIECES_IN_FLIGHT * PIECE_BYTES
    if nbytes is None:
        return ActivationPlan(tier, nbytes, passing_bytes, STEP_BYTES)
    return ActivationPlan(tier, nbytes, min(passing_bytes, nbytes), nbytes)
