"""All public names of `zero`. Importing this module imports torch and the engine."""

from __future__ import annotations

from zero import checkpointing
from zero.assembly.device_memory import OffloadDeviceEnum, OffloadStateTypeEnum
from zero.assembly.statistics import Statistics
from zero.checkpoint.export import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zero.config.sources import add_config_arguments
from zero.data.resumable import RepeatingLoader
from zero.dist.initialization import init_distributed
from zero.engine.engine import ZeroEngine
from zero.engine.inference import InferenceEngine, init_inference
from zero.engine.initialize import initialize
from zero.engine.memory_estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zero.engine.pretrained import load_pretrained
from zero.engine.qk_clip import observe_attention_logits
from zero.optim.offload_optimizer import OffloadOptimizer
from zero.params.gathering import GatheredParameters
from zero.params.initialisation import Init
from zero.params.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from zero.params.tiled_linear import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "InferenceEngine",
    "Init",
    "OffloadDeviceEnum",
    "OffloadOptimizer",
    "OffloadStateTypeEnum",
    "RepeatingLoader",
    "Statistics",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroEngine",
    "add_config_arguments",
    "checkpointing",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_z3_leaf_modules",
    "init_distributed",
    "init_inference",
    "initialize",
    "load_pretrained",
    "load_state_dict_from_zero_checkpoint",
    "observe_attention_logits",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]
