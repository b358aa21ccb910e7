"""DeepSpeed's names that this library has; all other names of `surface.json` are refused with an error.

What DeepSpeed's module takes from another one of its own (`from` in `surface.json`) is listed there only.

Module below `deepspeed` -> our module -> names, as `theirs=ours` if the two differ.
"""

from __future__ import annotations

# Modules that are identical to one of ours: clients assign names in them, or compare classes from them.
SAME: dict[str, str] = {
    "comm": "zero.compat.comm_names",
    "comm.comm": "zero.compat.comm_names",
    "ops.op_builder": "zero.compat.operators",
    "runtime.activation_checkpointing.checkpointing": "zero.checkpointing",
    "runtime.zero.partition_parameters": "zero.compat.partition_parameters",
    "utils.groups": "zero.compat.groups",
    "utils.logging": "zero.compat.logs",
}

FRAGMENTS = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized"
)
LEAVES = (
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
)
DEBUGGING = (
    "debug_clear_module_and_param_names debug_extract_module_and_param_names debug_module2name debug_module2name_class "
    "debug_param2name debug_param2name_id debug_param2name_id_numel debug_param2name_id_shape "
    "debug_param2name_id_shape_device debug_param2name_id_shape_status module_names param_names"
)
CONFIGS = {
    "zero.compat.configs": "DeepSpeedZeroConfig",
    "zero.config.zero_block": (
        "DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig=OffloadParamConfig"
    ),
}

OURS: dict[str, dict[str, str]] = {
    "": {
        "zero.config.sources": "add_config_arguments",
        "zero.compat.initialize_for_clients": "initialize",
        "zero.compat.operators": "git_branch git_hash version=VERSION",
        "zero.engine.inference": "init_inference",
    },
    "accelerator.abstract_accelerator": {"zero.compat.accelerator_names": "DeepSpeedAccelerator=Accelerator"},
    "accelerator.real_accelerator": {
        "zero.compat.accelerator_names": "get_accelerator is_current_accelerator_supported"
    },
    "checkpoint.utils": {
        "zero.compat.checkpoint_files": (
            "clone_tensors_for_torch_save get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank "
            "get_zero_ckpt_name_for_rank"
        )
    },
    "comm": {"deepspeed.comm.torch": "TorchBackend", "deepspeed.comm.ccl": "CCLBackend"},
    "comm.reduce_op": {"zero.compat.comm_names": "ReduceOp"},
    "comm.utils": {
        "zero.compat.helpers": "get_local_rank_from_launcher get_world_rank_from_launcher get_world_size_from_launcher"
    },
    "compression.helper": {"zero.compat.helpers": "convert_conv1d_to_linear recursive_getattr recursive_setattr"},
    "constants": {"zero.compat.comm_names": "default_pg_timeout"},
    "env_report": {"zero.compat.commands": "cli_main=report main=report"},
    "git_version_info": {
        "zero.compat.operators": (
            "accelerator_name compatible_ops git_branch git_hash installed_ops torch_info version=VERSION"
        )
    },
    "inference.engine": {"zero.engine.inference": "InferenceEngine"},
    "launcher.launch": {"zero.compat.commands": "main=run"},
    "launcher.runner": {
        "zero.compat.commands": (
            "DEEPSPEED_ENVIRONMENT_NAME _parse_hostfile=parse_hostfile_lines encode_world_info fetch_hostfile main=run "
            "parse_args parse_inclusion_exclusion parse_resource_filter"
        )
    },
    "elasticity.config": {
        "zero.compat.elasticity": "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize",
        "zero.config.elasticity": "ElasticityConfig=Elasticity",
    },
    "elasticity.elasticity": {
        "zero.compat.elasticity": "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config"
    },
    "moe.experts": {"zero.models.moe": "Experts"},
    "moe.layer": {"zero.models.moe": "MoE"},
    "moe.sharded_moe": {"zero.models.moe": "MOELayer TopKGate"},
    "moe.utils": {
        "zero.compat.helpers": "has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer"
    },
    "monitor.comet": {"zero.compat.monitoring": "CometMonitor"},
    "monitor.config": {"zero.compat.monitoring": "DeepSpeedMonitorConfig get_monitor_config"},
    "monitor.csv_monitor": {"zero.compat.monitoring": "csvMonitor"},
    "monitor.monitor": {
        "zero.compat.monitoring": "CometMonitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor"
    },
    "monitor.tensorboard": {"zero.compat.monitoring": "TensorBoardMonitor"},
    "monitor.wandb": {"zero.compat.monitoring": "WandbMonitor"},
    "ops": {"zero.compat.operators": "__compatible_ops__=compatible_ops"},
    "ops.adagrad.cpu_adagrad": {"zero.ops.adagrad": "DeepSpeedCPUAdagrad"},
    "ops.adam.cpu_adam": {"zero.ops.adam": "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {"zero.ops.adam": "FusedAdam"},
    "ops.aio": {"zero.compat.operators": "AsyncIOBuilder"},
    "ops.lamb.fused_lamb": {"zero.ops.lamb": "FusedLamb"},
    "ops.lion.cpu_lion": {"zero.ops.lion": "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {"zero.ops.lion": "FusedLion"},
    "profiling.flops_profiler.profiler": {"zero.flops_profiler": "FlopsProfiler get_model_profile"},
    "runtime.base_optimizer": {"zero.optim.optimizer": "DeepSpeedOptimizer=ZeroOptimizer ZeROOptimizer=ZeroOptimizer"},
    "runtime.config": {
        "offload.errors": "DeepSpeedConfigError=ConfigError",
        "zero.compat.configs": "DEEPSPEED_OPTIMIZERS DeepSpeedConfig ZeroStageEnum",
    },
    "runtime.config_utils": {
        "zero.compat.helpers": "dict_raise_error_on_duplicate_keys get_dict_param get_list_param get_scalar_param"
    },
    "runtime.data_pipeline.curriculum_scheduler": {"zero.data.forward_schedules": "CurriculumScheduler"},
    "runtime.dataloader": {
        "torch.utils.data": "DeepSpeedDataLoader=DataLoader",
        "zero.data.resumable": "RepeatingLoader",
    },
    "runtime.constants": {"zero.compat.configs": "ValidationMode"},
    "runtime.engine": {
        "zero.compat.timers": "EngineTimers",
        "zero.engine.engine": "DeepSpeedEngine=ZeroEngine",
    },
    "runtime.hybrid_engine": {"zero.engine.engine": "DeepSpeedEngine=ZeroEngine DeepSpeedHybridEngine=ZeroEngine"},
    "runtime.lr_schedules": {
        "zero.lr_schedules": (
            "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR "
            "get_torch_optimizer=torch_optimizer"
        ),
    },
    "runtime.model_checkpointing.constants": {"zero.compat.configs": "ValidationMode"},
    "runtime.pipe.engine": {
        "zero.engine.engine": "DeepSpeedEngine=ZeroEngine",
        "zero.engine.pipeline_engine": "PipelineEngine",
    },
    "runtime.pipe.module": {
        "zero.engine.pipeline_engine": "PipelineError",
        "zero.models.pipeline_module": "LayerSpec PipelineModule TiedLayerSpec",
    },
    "runtime.pipe.topology": {
        "zero.models.pipeline_topology": "PipelineParallelGrid PipeDataParallelTopology PipeModelDataParallelTopology "
        "ProcessTopology",
    },
    "runtime.precision_config": {
        "zero.compat.configs": "get_bfloat16_config get_float16_config",
        "zero.config.precision_block": "DeepSpeedBF16Config=Bf16Config DeepSpeedFP16Config=Fp16Config",
    },
    "runtime.progressive_layer_drop": {"zero.data.forward_schedules": "ProgressiveLayerDrop"},
    "runtime.sequence_parallel.ulysses_sp": {"zero.compat.helpers": "TiledMLP"},
    "runtime.utils": {
        "zero.compat.helpers": (
            "PartitionedTensor call_to_str clip_grad_norm_ copy_to_device ensure_directory_exists get_global_norm "
            "get_only_unique_item move_to_device partition_balanced partition_uniform prefix_sum_inc "
            "required_torch_version see_memory_usage set_random_seed"
        ),
    },
    "runtime.zero": {"zero.compat.partition_parameters": "MiCS_Init unregister_external_parameter"},
    "runtime.zero.config": {
        **CONFIGS,
        "zero.assembly.device_memory": "OffloadDeviceEnum",
        "zero.compat.configs": "DeepSpeedZeroConfig ZeroStageEnum",
    },
    "runtime.zero.mics": {"zero.compat.partition_parameters": "MiCS_Init"},
    "runtime.zero.offload_config": {**CONFIGS, "zero.assembly.device_memory": "OffloadDeviceEnum OffloadStateTypeEnum"},
    "runtime.zero.offload_states": {"zero.compat.helpers": "get_state_devices"},
    "runtime.zero.parameter_offload": {"zero.engine.parameter_offload": "DeepSpeedZeRoOffload=ParameterOffload"},
    "runtime.zero.stage3": {
        "zero.compat.helpers": "unwrap_model_for_generation",
        "zero.compat.initialize_for_clients": "DeepSpeedZeroOptimizer_Stage3",
        "zero.engine.memory_estimates": (
            "estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live"
        ),
    },
    "runtime.zero.stage_1_and_2": {
        "zero.compat.initialize_for_clients": "DeepSpeedZeroOptimizer",
        "zero.engine.memory_estimates": (
            "estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live"
        ),
    },
    "runtime.zero.tiling": {"zero.params.tiled_linear": "TiledLinear TiledLinearReturnBias"},
    "runtime.zero.utils": {
        "zero.compat.helpers": "ZERO_SUPPORTED_OPTIMIZERS ZeRORuntimeException is_zero_supported_optimizer",
        "zero.compat.partition_parameters": "is_zero_param",
    },
    "utils": {
        "zero.compat.comm_names": "is_initialized",
        "zero.compat.logs": "logger",
        # Here too, because one of them has the name of a submodule.
        "zero.params.leaf_modules": LEAVES,
    },
    "utils.comms_logging": {"zero.compat.helpers": "convert_size"},
    "utils.debug": {"zero.compat.helpers": DEBUGGING},
    "utils.init_on_device": {"zero.compat.helpers": "OnDevice"},
    "utils.module_utils": {"zero.compat.helpers": "recursive_getattr recursive_setattr"},
    "utils.numa": {"zero.compat.helpers": "parse_range parse_range_list"},
    "utils.nvtx": {"zero.compat.helpers": "instrument_w_nvtx"},
    "utils.tensor_fragment": {"zero.values.fragments": FRAGMENTS},
    "utils.timer": {"zero.compat.timers": "NoopTimer SynchronizedWallClockTimer ThroughputTimer trim_mean"},
    "utils.torch": {"zero.compat.helpers": "required_torch_version"},
    "utils.z3_leaf_module": {"zero.params.leaf_modules": f"{LEAVES} apply_zero_leaf_module_config"},
    "utils.zero_to_fp32": {
        "zero.checkpoint.export": "get_fp32_state_dict_from_zero_checkpoint",
        "zero.compat.checkpoint_files": "get_model_state_file get_model_state_files get_optim_files",
        "zero.compat.to_fp32": (
            "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict "
            "load_state_dict_from_zero_checkpoint main"
        ),
    },
}
