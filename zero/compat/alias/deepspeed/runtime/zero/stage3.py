"""`deepspeed.runtime.zero.stage3`."""

from zero.compat.helpers import unwrap_model_for_generation
from zero.compat.optimizer_kinds import DeepSpeedZeroOptimizer_Stage3
from zero.estimates import (
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]
