"""Blocks of DeepSpeed features that this engine does not have and that leave the numbers alone.

Profilers, loggers, monitors, services: they are checked, listed once as inactive, and not read.
"""

from __future__ import annotations

from typing import ClassVar

from zero.config.fields import (
    Block,
    InertAny,
    InertCount,
    InertFlag,
    InertItems,
    InertNumber,
    InertObject,
    InertText,
    InertWhole,
)


class ModelInfo(Block):
    """`autotuning.model_info`."""

    why: ClassVar[str] = "the autotuner reads it, and there is none: the plan chooses sizes from the budgets"

    profile: InertFlag = None
    num_params: InertCount = None
    hidden_size: InertWhole = None
    num_layers: InertWhole = None


class Autotuning(Block):
    """`autotuning`: read by DeepSpeed's launcher, not by an engine."""

    why: ClassVar[str] = "the autotuner reads it, and there is none: the plan chooses sizes from the budgets"

    enabled: InertFlag = None
    fast: InertFlag = None
    results_dir: InertText = None
    exps_dir: InertText = None
    overwrite: InertFlag = None
    start_profile_step: InertWhole = None
    end_profile_step: InertWhole = None
    metric: InertText = None
    metric_path: InertText = None
    tuner_type: InertText = None
    tuner_early_stopping: InertWhole = None
    tuner_num_trials: InertNumber = None
    arg_mappings: InertObject = None
    max_train_batch_size: InertWhole = None
    min_train_batch_size: InertWhole = None
    max_train_micro_batch_size_per_gpu: InertWhole = None
    min_train_micro_batch_size_per_gpu: InertWhole = None
    num_tuning_micro_batch_sizes: InertWhole = None
    mp_size: InertWhole = None
    model_info: ModelInfo | None = None
    model_info_path: InertText = None


class Nebula(Block):
    """`nebula`: Azure's checkpoint service."""

    why: ClassVar[str] = "checkpoints are written by this engine; checkpoint.async_save does so behind training"

    enabled: InertFlag = None
    persistent_storage_path: InertText = None
    persistent_time_interval: InertNumber = None
    num_of_version_in_retention: InertWhole = None
    enable_nebula_load: InertFlag = None
    load_path: InertText = None


class Pipeline(Block):
    """`pipeline`: read by a PipelineModule only."""

    why: ClassVar[str] = "a PipelineModule reads it, and pipelines are not available"

    stages: InertAny = None
    partition: InertText = None
    seed_layers: InertFlag = None
    activation_checkpoint_interval: InertWhole = None
    pipe_partitioned: InertFlag = None
    grad_partitioned: InertFlag = None
    use_reentrant: InertFlag = None


class HybridEngine(Block):
    """`hybrid_engine`: faster generation during training."""

    why: ClassVar[str] = "generation uses the same weights as training, and nothing is injected"

    enabled: InertFlag = None
    max_out_tokens: InertWhole = None
    inference_tp_size: InertWhole = None
    release_inference_cache: InertFlag = None
    pin_parameters: InertFlag = None
    tp_gather_partition_size: InertWhole = None
    enable_cuda_graph: InertFlag = None


class Eigenvalue(Block):
    """`eigenvalue`: steers quantization, which is not here."""

    why: ClassVar[str] = "it steers quantization, which is not available"

    enabled: InertFlag = None
    verbose: InertFlag = None
    max_iter: InertWhole = None
    tol: InertNumber = None
    stability: InertNumber = None
    gas_boundary_resolution: InertWhole = None
    layer_name: InertText = None
    layer_num: InertWhole = None


class ThroughputTimer(Block):
    """`timers.throughput`."""

    why: ClassVar[str] = "throughput is not timed"

    enabled: InertFlag = None
    synchronized: InertFlag = None


class Timers(Block):
    """`timers`."""

    throughput: ThroughputTimer | None = None


class Compile(Block):
    """`compile`: DeepCompile passes."""

    why: ClassVar[str] = "it steers passes of DeepCompile; compile blocks of the model with torch.compile instead"

    enabled: InertFlag = None
    disable: InertFlag = None
    backend: InertText = None
    kwargs: InertObject = None
    deepcompile: InertFlag = None
    autoep_non_moe: InertFlag = None
    free_activation: InertFlag = None
    free_activation_threshold: InertCount = None
    offload_activation: InertFlag = None
    offload_activation_pin_memory: InertFlag = None
    offload_opt_states: InertFlag = None
    double_buffer: InertFlag = None
    symmetric_memory: InertFlag = None
    debug_log: InertFlag = None
    offload_parameters: InertFlag = None
    sync_before_reduce: InertFlag = None
    sync_after_reduce: InertFlag = None
    sync_before_allgather: InertFlag = None
    sync_after_allgather: InertFlag = None
    keep_int_input_tensors: InertFlag = None
    keep_all_input_tensors: InertFlag = None
    passes: InertItems = None
