"""`deepspeed.runtime.zero.stage_1_and_2`."""

from zero.compat.optimizer_kinds import DeepSpeedZeroOptimizer
from zero.estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
