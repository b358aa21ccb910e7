"""What DeepSpeed's configuration and engine answer of a configuration: name -> a function of ours.

`CONFIG`: attributes of `DeepSpeedConfig`. `GETTERS`: further methods of the engine, which has those of `CONFIG` too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, get_args

from zero.compat.engine_getters import OWN_NAMES
from zero.config import Config
from zero.config.precision_block import DTYPES
from zero.ranks import world

Answer = Callable[[Config], Any]

# DeepSpeed's attribute of a configuration -> the block of the JSON.
BLOCKS_BY_NAME = {
    "bfloat16_config": "bf16",
    "compression_config": "compression_training",
    "datastates_config": "datastates_ckpt",
    "expert_parallel_config": "expert_parallel",
    "float16_config": "fp16",
} | {
    f"{block}_config": block
    for block in (
        *("activation_checkpointing", "aio", "autotuning", "checkpoint", "compile", "flops_profiler", "hybrid_engine"),
        *("nebula", "tensor_parallel", "timers", "weight_quantization"),
    )
}
# Of the data efficiency library, which is not available: what DeepSpeed says of one that is off.
DATA_EFFICIENCY: dict[str, Any] = {
    "enabled": False,
    "seed": 1234,
    "data_sampling": {
        **{"enabled": False, "num_epochs": 1000, "num_workers": 0, "pin_memory": False},
        **{"curriculum_learning": {"enabled": False}, "dynamic_batching": {"enabled": False}},
    },
    "data_routing": {"enabled": False, "random_ltd": {"enabled": False, "layer_token_lr_schedule": {"enabled": False}}},
}
# DeepSpeed's name -> key of `eigenvalue`, and DeepSpeed's default; without effect here.
EIGENVALUE = {
    "enabled": False, "verbose": False, "max_iter": 100, "tol": 1e-2, "stability": 1e-6, "gas_boundary_resolution": 1,
    "layer_name": "bert.encoder.layer", "layer_num": 0,
}  # fmt: skip


def block_of_config(config: Config, name: str) -> Any:
    """A block of the configuration; one that was not given has its defaults, and is disabled."""
    given = getattr(config, name)
    if given is not None:
        return given
    kind = get_args(type(config).model_fields[name].annotation)[0]
    if not hasattr(kind, "model_fields"):
        return {}
    return kind(**({"enabled": False} if "enabled" in kind.model_fields else {}))


def given(config: Config, block: str, key: str | None = None, default: Any = None) -> Any:
    """A block of the JSON as the user wrote it, or a key of it; the default if it is not there."""
    there = config.source.get(block)
    if there is None or key is None:
        return default if there is None else there
    value = there.get(key) if isinstance(there, Mapping) else None
    return default if value is None else value


def value(path: str, default: Any = None) -> Answer:
    """The value at a dotted path of the configuration; DeepSpeed's default where ours is None."""

    def answer(config: Config) -> Any:
        there: Any = config
        for key in path.split("."):
            there = block_of_config(there, key) if isinstance(there, Config) and key != path else getattr(there, key)
        return default if there is None else there

    return answer


def _parameters(block: str) -> Answer:
    """The parameters of a block without its `enabled`; False: there is no such block, as in DeepSpeed."""

    def answer(config: Config) -> Any:
        there = given(config, block)
        return {key: item for key, item in there.items() if key != "enabled"} if isinstance(there, Mapping) else False

    return answer


def optimizer_name(config: Config) -> str | None:
    return None if config.optimizer is None else OWN_NAMES.get(config.optimizer.type, config.optimizer.type)


def _torch_dtype(path: str) -> Answer:
    return lambda config: DTYPES.get(value(path)(config))


CONFIG: dict[str, Answer] = {
    "amp_enabled": value("amp.enabled", False),
    "amp_params": _parameters("amp"),
    "checkpoint_parallel_write_pipeline": lambda c: bool(getattr(c.checkpoint.parallel_write, "pipeline_stage", False)),
    "checkpoint_tag_validation_enabled": lambda c: c.checkpoint.tag_validation != "ignore",
    "checkpoint_tag_validation_fail": lambda c: c.checkpoint.tag_validation == "fail",
    "curriculum_enabled_legacy": value("curriculum_learning.enabled"),
    "curriculum_params_legacy": _parameters("curriculum_learning"),
    "data_efficiency_config": lambda c: DATA_EFFICIENCY,
    "data_efficiency_enabled": value("data_efficiency.enabled", False),
    "disable_allgather": value("disable_allgather", False),
    "disable_python_gc": value("disable_python_gc", False),
    **{f"eigenvalue_{key}": value(f"eigenvalue.{key}", default) for key, default in EIGENVALUE.items()},
    "elastic_model_parallel_size": value("elasticity.model_parallel_size"),
    "elasticity_enabled": value("elasticity.enabled"),
    "global_rank": lambda c: world.rank(),
    "grad_accum_dtype": value("data_types.grad_accum_dtype"),
    "graph_harvesting": value("graph_harvesting", False),
    "keep_in_fp32_modules": lambda c: given(c, "data_types", "keep_in_fp32_modules"),
    "load_universal_checkpoint": value("checkpoint.load_universal", False),
    "log_level": value("log_level", "info"),
    "mics_hierarchial_params_gather": value("zero_optimization.mics_hierarchical_params_gather", False),
    "mics_shard_size": value("zero_optimization.mics_shard_size"),
    "num_gpus_per_node": value("elasticity.num_gpus_per_node"),
    "optimizer_legacy_fusion": lambda c: given(c, "optimizer", "legacy_fusion", False),
    "optimizer_name": optimizer_name,
    "optimizer_params": lambda c: given(c, "optimizer", "params"),
    "param_dtype": lambda c: given(c, "data_types", "param_dtype"),
    "pld_enabled": value("progressive_layer_drop.enabled"),
    "pld_params": _parameters("progressive_layer_drop"),
    "scheduler_name": lambda c: given(c, "scheduler", "type"),
    "scheduler_params": lambda c: given(c, "scheduler", "params"),
    "sparse_gradients_enabled": value("sparse_gradients", False),
    "torch_autocast_dtype": _torch_dtype("torch_autocast.dtype"),
    "torch_autocast_enabled": value("torch_autocast.enabled"),
    "torch_autocast_lower_precision_safe_modules": value("torch_autocast.lower_precision_safe_modules"),
    "use_data_before_expert_parallel_": value("use_data_before_expert_parallelism", False),
    "use_node_local_storage": value("checkpoint.use_node_local_storage"),
    "zero_allow_untested_optimizer": value("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": value("zero_force_ds_cpu_optimizer", True),
}


def _flag_of_zero(key: str, *, default: bool = False) -> Answer:
    return value(f"zero_optimization.{key}", default)


GETTERS: dict[str, Answer] = {
    "aio_config": value("aio"),
    "autotp_size": value("tensor_parallel.autotp_size", 0),
    "autotuning_enabled": value("autotuning.enabled"),
    "autotuning_end_profile_step": value("autotuning.end_profile_step"),
    "autotuning_metric": value("autotuning.metric"),
    "autotuning_metric_path": value("autotuning.metric_path", os.path.abspath("autotuning_metric.json")),
    "autotuning_model_info_path": value("autotuning.model_info_path", os.path.abspath("autotuning_model_info.json")),
    "autotuning_profile_model_info": lambda c: False,
    "autotuning_start_profile_step": value("autotuning.start_profile_step"),
    "checkpoint_serialization_enabled": value("checkpoint.checkpoint_serialization", True),
    "checkpoint_writer_enabled": lambda c: c.checkpoint.writer is not None,
    "compile_autosp": lambda c: "autosp" in (value("compile.passes")(c) or ()),
    "compile_autotp": lambda c: "autotp" in (value("compile.passes")(c) or ()),
    "compile_zero_optimization_stage": lambda c: bool({"z1", "z3"} & {*(value("compile.passes")(c) or ())}),
    "cpuadam_cores_perc": value("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.9),
    "curriculum_learning_config": lambda c: DATA_EFFICIENCY["data_sampling"]["curriculum_learning"],
    "curriculum_learning_enabled": lambda c: False,
    "data_sampling_config": lambda c: DATA_EFFICIENCY["data_sampling"],
    "data_sampling_enabled": lambda c: False,
    "dump_state": value("dump_state"),
    "flops_profiler_detailed": value("flops_profiler.detailed", True),
    "flops_profiler_module_depth": value("flops_profiler.module_depth"),
    "flops_profiler_output_file": value("flops_profiler.output_file"),
    "flops_profiler_profile_step": value("flops_profiler.profile_step"),
    "flops_profiler_recompute_fwd_factor": value("flops_profiler.recompute_fwd_factor", 0.0),
    "flops_profiler_top_modules": value("flops_profiler.top_modules"),
    "get_compile_time": lambda c: [],
    "is_deepcompile_active": lambda c: False,
    "is_deepcompile_enabled": value("compile.deepcompile", False),
    "is_elastic_model_parallel_supported": value("elasticity.enabled"),
    "is_first_weights_partition_group": lambda c: c.zero_optimization.stage >= 3,
    "is_sanity_checks_enabled": _flag_of_zero("enable_sanity_checks"),
    "managed_gradient_accumulation": value("managed_gradient_accumulation"),
    "pld_gamma": value("progressive_layer_drop.gamma"),
    "pld_theta": value("progressive_layer_drop.theta"),
    "random_ltd_config": lambda c: DATA_EFFICIENCY["data_routing"]["random_ltd"],
    "random_ltd_enabled": lambda c: False,
    "super_offload": value("zero_optimization.offload_optimizer.super_offload", False),
    "tensor_parallel_config": value("tensor_parallel"),
    "uses_parallelization_pass_only": lambda c: False,
    "zenflow_config": value("zero_optimization.zenflow"),
    "zero_allgather_sequential": _flag_of_zero("stage3_allgather_sequential"),
    "zero_compute_grad_norm": _flag_of_zero("compute_grad_norm", default=True),
    "zero_elastic_checkpoint": _flag_of_zero("elastic_checkpoint"),
    "zero_legacy_stage1": _flag_of_zero("legacy_stage1"),
    "zero_load_from_fp32_weights": _flag_of_zero("load_from_fp32_weights", default=True),
    "zero_log_trace_cache_warnings": _flag_of_zero("log_trace_cache_warnings"),
    "zero_model_persistence_threshold": value("zero_optimization.stage3_model_persistence_threshold"),
    "zero_parameter_alignment": _flag_of_zero("parameter_alignment"),
    "zero_quantized_gradients": _flag_of_zero("zero_quantized_gradients"),
    "zero_quantized_nontrainable_weights": _flag_of_zero("zero_quantized_nontrainable_weights"),
    "zero_quantized_weights": _flag_of_zero("zero_quantized_weights"),
    "zero_save_muon_momentum_buffer_in_memory": _flag_of_zero("save_muon_momentum_buffer_in_memory"),
    "zeropp_loco_param": value("zero_optimization.zeropp_loco_param"),
}
