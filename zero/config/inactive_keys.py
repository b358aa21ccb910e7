"""DeepSpeed's keys that do nothing here, with the reason, and those that are refused, with what to do instead.

`KEYS` has those that stand beside keys that act, `FEATURES` the blocks in which none acts: dotted path of a block ->
key -> its reason, or `Inert`, or `Refused`. A feature that would change the results is refused. One that does not (a
service, a separate profiler, passes of a compiler) is accepted and listed once with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero.config.fields import InactiveBlock, Inert, Refused, Row


def _keys(words: str, row: Row) -> dict[str, Row]:
    """The same for each of these keys."""
    return dict.fromkeys(words.split(), row)


def _off(feature: str, instead: str) -> dict[str, Row]:
    """The key that would switch on a feature that is not available."""
    return {"enabled": Refused(f"{feature} is not available; set it to false, and {instead}")}


IMPLEMENTATION = "it chooses between implementations, and the engine has only one, with the same bits on every device"
OWN_GENERATION = (
    "the model generates with its own modules: no kernels are injected, and there are no tensor-parallel ranks"
)
PLANNED = "the memory plan is made from the model itself when a run starts"
TUNER = (
    "the tuner tries a few placements of weights and optimizer states, and doubles the micro-batch while that is faster"
)
TUNED_BATCH = "the tuner changes only the micro-batch, not gradient accumulation; limit the micro-batch instead"

# Dotted path of a block, "" for the top level -> its keys.
KEYS: Mapping[str, Mapping[str, Row]] = {
    "": {
        "sequence_parallel_size": Refused(
            "sequence parallelism is not available; set it to 1, and for long sequences set "
            'activation_checkpointing.activation_device to "cpu" or "nvme", or use zero.TiledLinear',
            (1, 0),
        ),
        "zero_allow_untested_optimizer": "an optimizer that cannot be used is always refused by name",
        "zero_force_ds_cpu_optimizer": "torch optimizers are used as they are and run with the engine's kernels",
        "seq_parallel_communication_data_type": "there is no sequence parallelism",
        "sparse_gradients": "gradients of embeddings are reduced dense",
        "allgather_size": "weights are gathered a unit at a time",
        "disable_allgather": "each unit's weights are gathered in one collective",
        "graph_harvesting": "no graphs are captured",
        "disable_python_gc": "Python's garbage collector pauses only in saves and loads",
        "vocabulary_size": "it only makes DeepSpeed warn about slow vocabulary sizes",
        "use_data_before_expert_parallelism": "there are no expert-parallel groups",
        "datastates_ckpt": "checkpoints are written by this engine",
        "comms_config": 'DeepSpeed does not read it either; write "comms_logger"',
        "monitor_config": "DeepSpeed does not read it either; write the blocks in it at the top level",
    },
    "bf16": {"immediate_grad_update": "gradients are always accumulated as soon as they are complete"},
    "fp16": {
        "fused_mode": "there is only one kernel",
        "fp16_master_weights_and_grads": Refused("master weights are always fp32; set it to false"),
    },
    "torch_autocast": {
        "lower_precision_safe_modules": "ranks exchange weights and gradients in the dtype they are kept in; torch "
        "decides which operations are cast",
    },
    "data_types": {
        "keep_in_fp32_modules": Refused(
            "this key is not available; remove it, and let the model's own code cast what needs fp32", ()
        ),
    },
    "optimizer": {
        "adam_w_mode": Refused("set it in optimizer.params", (True,)),
        "legacy_fusion": IMPLEMENTATION,
    },
    "optimizer.params": {
        "fp32_optimizer_states": Refused("moments are kept in fp32; set it to true", (True,)),
        **_keys("fused foreach capturable differentiable set_grad_none ns_method", IMPLEMENTATION),
        "max_grad_norm": Refused('use the top-level key "gradient_clipping"', ()),
        **_keys(
            """freeze_step var_freeze_step var_update_scaler local_step_scaler local_step_clipper cuda_aware
            comm_backend_name coeff_beta factor_max factor_min factor_threshold""",
            Refused("it belongs to the 1-bit and 0/1 optimizers, which are not available; remove it", ()),
        ),
        "per_head_muon": Refused("Muon orthogonalizes whole matrices; remove it"),
    },
    "zero_optimization": {
        **_keys(
            "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
            Refused(
                "quantized collectives change the results and are not available; set it to false, and to move fewer "
                "bytes set zero_hpz_partition_size (fewer gathers between nodes) or communication_data_type"
            ),
        ),
        "reduce_bucket_size": Inert("gradients are reduced one unit at a time", 500_000_000),
        "allgather_bucket_size": Inert("weights are gathered a unit at a time", 500_000_000),
        "contiguous_gradients": Inert("a unit's gradients are always one buffer", default=True),
        "reduce_scatter": Inert("a rank gets the sums of its own shard either way", default=True),
        "allgather_partitions": Inert("a unit is always gathered in one collective", default=True),
        "round_robin_gradients": Inert("every rank has an equal shard of every unit", default=False),
        "use_multi_rank_bucket_allreduce": Inert(
            "each gradient is reduced in one collective for all ranks", default=True
        ),
        "compute_grad_norm": "the gradient norm is always computed",
        "load_from_fp32_weights": Refused("a checkpoint's exact fp32 weights are always loaded; remove it", (True,)),
        "elastic_checkpoint": "every checkpoint loads at any number of ranks",
        "stage3_model_persistence_threshold": "each parameter is kept or released by its own size only",
        "stage3_use_all_reduce_for_fetch_params": "gathered shards are already the flat unit",
        "stage3_allgather_sequential": "gathered shards are already the flat unit",
        "legacy_stage1": "all stages share one implementation",
        "parameter_alignment": "every parameter starts at 64 bytes in its unit",
        "zeropp_loco_param": "it corrects quantized gradients, and gradients are not quantized",
        "mics_hierarchical_params_gather": "a gather always stays inside its group",
        "memory_efficient_linear": "backward fetches the weights of every module again",
        "pipeline_loading_checkpoint": "a checkpoint is always loaded piece by piece",
        "override_module_apply": "Module.apply is not replaced",
        "log_trace_cache_warnings": "a changed order of modules costs one late fetch and does not invalidate the trace",
        "enable_sanity_checks": "there are no slower checks to switch on",
        "save_muon_momentum_buffer_in_memory": "momentum is kept where offload_optimizer puts the optimizer states",
    },
    "zero_optimization.offload_optimizer": {
        "fast_init": "optimizer states are always created directly on their device",
        "super_offload": Inert("updates on the CPU always run in the background, with exact results", default=False),
        "cpuadam_cores_perc": "it belongs to SuperOffload, whose worker processes do not exist here",
        "update_in_backward": Refused(
            "this key no longer exists, because the engine always does this: it keeps results of updates in the "
            "memory of used gradients and writes them during backward; remove the key",
            (),
        ),
    },
    "aio": {
        "tune": "the defaults are what measured fastest; other values are set by hand",
        "use_gds": Refused(
            "GPUDirect Storage is not available; set it to false: the engine uses io_uring with O_DIRECT"
        ),
    },
    "activation_checkpointing": {
        "partition_activations": "there is only one model-parallel rank, so saved inputs cannot be split over several",
    },
    "checkpoint": {
        "checkpoint_serialization": "there is only one format of checkpoints",
    },
    "elasticity": {"min_time": "the scheduler of the cluster decides when ranks change"},
    "weight_quantization": _keys(
        "num_bits q_type q_groups", "post_init_quant and quantized_initialization say how weights are coded"
    ),
    "comms_logger": {"debug": "collectives are counted by purpose, not by caller"},
    "flops_profiler": {
        "recompute_fwd_factor": "operations are always counted as they run, including those of recomputation",
    },
    "autotuning": {
        "enabled": "the launcher's --autotuning decides",
        **_keys("max_train_batch_size min_train_batch_size", TUNED_BATCH),
        **_keys("fast tuner_type tuner_early_stopping tuner_num_trials", TUNER),
        "mp_size": "tensor parallelism is not available",
        "model_info_path": PLANNED,
    },
    "pipeline": _keys(
        "stages partition seed_layers pipe_partitioned grad_partitioned use_reentrant",
        "the arguments of PipelineModule decide this; tensors between stages are always sent whole",
    ),
    "hybrid_engine": {
        "inference_tp_size": Refused(
            "tensor parallelism is not available; set it to 1: the engine streams weights that do not fit", (1, 0)
        ),
        "pin_parameters": "the engine pins host memory wherever that makes copies faster",
        **_keys("tp_gather_partition_size enable_cuda_graph", OWN_GENERATION),
    },
}

COMPRESSION = "it belongs to compression training, which is off"
EFFICIENCY = "it belongs to data efficiency, which is off"
MIXTURE = "it belongs to mixture of quantization, which is off"
TENSORS = "it belongs to tensor parallelism, which is off"
BEFOREHAND = "the model beforehand, for example with torchao: the engine trains a model with a quantised base"
COMPRESSION_IS_OFF = _off("compression training", f"quantise or prune {BEFOREHAND}")
OWN_SAMPLER = _off("data efficiency", "choose samples with a sampler of your own DataLoader")
SPARSE = "sparse attention is not available; remove the block, and use torch.nn.attention.flex_attention in the model"
TENSORS_SIZE = "tensor parallelism is not available; set it to 1, and shard weights with zero_optimization.stage 3"
TENSORS_GROUP = {"tp_size": Refused(TENSORS_SIZE, (1, 0)), **_keys("tp_grain_size mpu tp_group", TENSORS)}
TECHNIQUES = (
    "compression_training.weight_quantization",
    "compression_training.activation_quantization",
    "compression_training.sparse_pruning",
    "compression_training.row_pruning",
    "compression_training.head_pruning",
    "compression_training.channel_pruning",
)

# Dotted path of a block in which no key acts -> its keys.
FEATURES: Mapping[str, Mapping[str, Row]] = {
    # ---- refused when they are switched on ----
    "amp": {
        **_off("Apex AMP", "use bf16, fp16 or torch_autocast"),
        **_keys(
            """opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale
            cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale""",
            "it belongs to Apex AMP, which is off",
        ),
    },
    "data_efficiency": {**OWN_SAMPLER, "seed": EFFICIENCY},
    "data_efficiency.data_sampling": _keys("enabled num_epochs num_workers pin_memory", EFFICIENCY),
    "data_efficiency.data_sampling.curriculum_learning": {
        **OWN_SAMPLER,
        **_keys("data_cluster_path curriculum_metrics", EFFICIENCY),
    },
    "data_efficiency.data_sampling.dynamic_batching": {
        **OWN_SAMPLER,
        **_keys(
            """metrics_path lr_scaling_method min_batch_size max_batch_size sequence_picking_order max_tokens
            verbose""",
            EFFICIENCY,
        ),
    },
    "data_efficiency.data_routing": {"enabled": EFFICIENCY},
    "data_efficiency.data_routing.random_ltd": {
        **_off("data efficiency", "drop tokens in the model's own code"),
        **_keys(
            """total_layer_num random_ltd_layer_num random_ltd_layer_id model_mask_name model_type hidden_state_order
            micro_batch_size global_batch_size""",
            EFFICIENCY,
        ),
    },
    "data_efficiency.data_routing.random_ltd.random_ltd_schedule": _keys(
        "min_value max_value schedule_type", EFFICIENCY
    ),
    "data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config": _keys(
        "seq_per_step require_steps", EFFICIENCY
    ),
    "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule": _keys(
        "enabled total_layer_tokens warmup_type warmup_layer_tokens", EFFICIENCY
    ),
    "compression_training": {},
    "compression_training.layer_reduction": {
        **COMPRESSION_IS_OFF,
        **_keys("keep_number_layer module_name_prefix teacher_layer other_module_name", COMPRESSION),
    },
    **{technique: {"different_groups": COMPRESSION} for technique in TECHNIQUES},
    **{
        f"{technique}.shared_parameters": {
            **COMPRESSION_IS_OFF,
            **_keys(
                """quantizer_kernel schedule_offset schedule_offset_end schedule_offset_stride quantize_groups
                quantize_verbose quantization_type quantize_weight_in_forward rounding range_calibration method
                block_pattern dense_ratio excluded_modules num_heads""",
                COMPRESSION,
            ),
        }
        for technique in TECHNIQUES
    },
    **{
        f"{technique}.shared_parameters.fp16_mixed_quantize": _keys("enabled quantize_change_ratio", COMPRESSION)
        for technique in TECHNIQUES
    },
    "quantize_training": {
        **_off("mixture of quantization", f"quantise {BEFOREHAND}"),
        **_keys("quantize_verbose quantizer_kernel quantize_groups", MIXTURE),
    },
    "quantize_training.quantize_bits": _keys("start_bits target_bits", MIXTURE),
    "quantize_training.quantize_schedule": _keys("quantize_period schedule_offset", MIXTURE),
    "quantize_training.fp16_mixed_quantize": _keys("enabled quantize_change_ratio", MIXTURE),
    "quantize_training.quantize_algo": _keys("q_type rounding", MIXTURE),
    "sparse_attention": {
        "mode": Refused(SPARSE, ("dense",)),
        **_keys(
            """block different_layout_per_head num_local_blocks num_global_blocks attention
            horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks
            global_block_indices global_block_end_indices num_sliding_window_blocks""",
            Refused(SPARSE, ()),
        ),
    },
    "tensor_parallel": {
        "autotp_size": Refused(TENSORS_SIZE, (0, 1)),
        "tp_size": Refused(TENSORS_SIZE, (1, 0)),
        **_keys(
            """dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend injection_policy_tuple
            partition_config preset_model keep_module_on_host replace_with_kernel_inject""",
            TENSORS,
        ),
    },
    "tensor_parallel.tp": TENSORS_GROUP,
    "expert_parallel": {
        **_off(
            "expert parallelism",
            "keep the experts as modules: each is a unit of its own and is fetched when it is used",
        ),
        **_keys(
            """autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model
            moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm
            route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm
            comm_qp_margin comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k
            load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr
            has_shared_experts shared_experts_pattern shared_experts_gate_pattern expert_activation""",
            "it belongs to expert parallelism, which is off",
        ),
    },
    "zero_optimization.zenflow": _keys(
        """topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio
        full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch""",
        Refused(
            "ZenFlow is not available; remove the block, and rely on the updates that the engine makes in the "
            "background, with exact results",
            (),
        ),
    ),
    # ---- without effect ----
    "inference": {"dtype": "training does not read it; zero.init_inference has its own keys"},
    "inference.tensor_parallel": TENSORS_GROUP,
    "checkpoint.parallel_write": {"pipeline_stage": "each stage of a pipeline always writes its own part"},
    "checkpoint.writer": _keys(
        "type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel decoupled",
        "checkpoints are written by this engine, which takes the buffer sizes from its plan",
    ),
    "autotuning.model_info": _keys("profile num_params hidden_size num_layers", PLANNED),
    "nebula": _keys(
        """enabled persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load
        load_path""",
        "checkpoints are written by this engine; with checkpoint.async_save it writes them in the background",
    ),
    "eigenvalue": _keys(
        "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
        "it controls quantization, which is not available",
    ),
    "timers": {},
    "timers.throughput": _keys("enabled synchronized", "the engine has no throughput timer"),
    "compile": {
        **_keys(
            """enabled disable backend kwargs deepcompile autoep_non_moe free_activation free_activation_threshold
            offload_activation offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log
            offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather
            keep_int_input_tensors keep_all_input_tensors""",
            "it controls passes of DeepCompile, which is not available; compile blocks of the model with "
            "torch.compile instead",
        ),
        "passes": Refused(
            "they place weights, as the stage does, and passes that split a sample over ranks are not available; "
            'remove the others, and for long sequences set activation_checkpointing.activation_device to "cpu" or '
            '"nvme"',
            ("z1", "z3"),
        ),
    },
}
# What the table of all keys says of such a block.
ABOUT = {
    "amp": "NVIDIA Apex.",
    "autotuning.model_info": "What DeepSpeed's tuner foretells runs from.",
    "compile": "DeepCompile passes.",
    "compression_training": "would change the weights.",
    **dict.fromkeys(TECHNIQUES, "One compression technique; the groups carry the user's own names."),
    "data_efficiency": "would choose and shorten the samples. DeepSpeed samples by `curriculum_learning` without "
    "`enabled` too.",
    "eigenvalue": "controls quantization, which is not available here.",
    "expert_parallel": "automatic expert parallelism.",
    "inference": "other libraries read its tensor_parallel.tp_size.",
    "nebula": "Azure's checkpoint service.",
    "quantize_training": "mixture of quantization, which DeepSpeed has removed too.",
    "sparse_attention": "there is no sparse attention kernel here.",
    "zero_optimization.zenflow": "asynchronous optimizer updates, which change the numbers.",
}
# With the blocks in them: DeepSpeed passes over keys that it does not know there.
OPEN = (
    "autotuning.model_info",
    "compression_training",
    "data_efficiency",
    "eigenvalue",
    "nebula",
    "quantize_training",
    "sparse_attention",
)
ALIASES = {"tensor_parallel": {"tensor_parallel": "tp", "kernel_inject": "replace_with_kernel_inject"}}


def inactive_keys(path: str) -> dict[str, Row]:
    """The keys of a block that do nothing, and the blocks in it in which none acts; `path`: "" for the top level."""
    inner = {
        name: InactiveBlock(inactive_keys(full), ABOUT.get(full, ""), full.startswith(OPEN), ALIASES.get(full, {}))
        for full in FEATURES
        for parent, _, name in [full.rpartition(".")]
        if parent == path
    }
    return {**KEYS.get(path, {}), **FEATURES.get(path, {}), **inner}
