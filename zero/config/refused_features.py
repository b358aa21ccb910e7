"""Blocks of DeepSpeed features that would change the numbers: refused when switched on, harmless otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import model_validator
from typing_extensions import Self

from zero.config.fields import (
    Block,
    Flag,
    InertAny,
    InertFlag,
    InertItems,
    InertNumber,
    InertObject,
    InertText,
    InertWhole,
    Number,
    Only,
    off,
    problem,
)

TENSOR_PARALLEL = "tensor parallelism is not available; set it to 1, and shard weights with zero_optimization.stage 3"
_COMPRESSION = off("compression", "quantise or prune the model before, e.g. with torchao: a quantised base trains")


class Elasticity(Block):
    """`elasticity`: would choose the batch size itself."""

    why: ClassVar[str] = "it belongs to elastic batch sizes, which are off"

    enabled: Annotated[
        Flag, off("elastic batch size", "give train_batch_size: it holds at any number of ranks that divides it")
    ] = False
    max_train_batch_size: InertWhole = None
    micro_batch_sizes: InertItems = None
    min_gpus: InertWhole = None
    max_gpus: InertWhole = None
    min_time: InertWhole = None
    version: InertNumber = None
    prefer_larger_batch: InertFlag = None
    ignore_non_elastic_batch_info: InertFlag = None
    model_parallel_size: InertWhole = None
    num_gpus_per_node: InertWhole = None


class MixedQuantize(Block):
    """`fp16_mixed_quantize`."""

    why: ClassVar[str] = "it belongs to compression training, which is off"

    enabled: InertFlag = None
    quantize_change_ratio: InertNumber = None


class TechniqueShared(Block):
    """`shared_parameters` of a compression technique."""

    why: ClassVar[str] = "it belongs to compression training, which is off"

    enabled: Annotated[Flag, _COMPRESSION] = False
    quantizer_kernel: InertFlag = None
    schedule_offset: InertWhole = None
    schedule_offset_end: InertWhole = None
    schedule_offset_stride: InertWhole = None
    quantize_groups: InertWhole = None
    quantize_verbose: InertFlag = None
    quantization_type: InertText = None
    quantize_weight_in_forward: InertFlag = None
    rounding: InertText = None
    fp16_mixed_quantize: MixedQuantize | None = None
    range_calibration: InertText = None
    method: InertText = None
    block_pattern: InertText = None
    dense_ratio: InertNumber = None
    excluded_modules: InertItems = None
    num_heads: InertWhole = None


class Technique(Block):
    """One compression technique; the groups carry the user's own names."""

    why: ClassVar[str] = "it belongs to compression training, which is off"

    shared_parameters: TechniqueShared | None = None
    different_groups: InertObject = None


class LayerReduction(Block):
    """`compression_training.layer_reduction`."""

    why: ClassVar[str] = "it belongs to compression training, which is off"

    enabled: Annotated[Flag, _COMPRESSION] = False
    keep_number_layer: InertWhole = None
    module_name_prefix: InertText = None
    teacher_layer: InertItems = None
    other_module_name: InertItems = None


class CompressionTraining(Block):
    """`compression_training`: would change the weights."""

    layer_reduction: LayerReduction | None = None
    weight_quantization: Technique | None = None
    activation_quantization: Technique | None = None
    sparse_pruning: Technique | None = None
    row_pruning: Technique | None = None
    head_pruning: Technique | None = None
    channel_pruning: Technique | None = None


class WeightQuantization(Block):
    """`weight_quantization`: on in DeepSpeed as soon as the block exists."""

    why: ClassVar[str] = "it belongs to weight quantization, which is off"

    enabled: InertFlag = None
    num_bits: InertWhole = None
    q_type: InertText = None
    q_groups: InertWhole = None
    quantized_initialization: InertObject = None
    post_init_quant: InertObject = None

    @model_validator(mode="after")
    def _refused(self) -> Self:
        if self.model_fields_set and self.enabled is not False:
            raise problem(
                "no such block, or enabled: false",
                fix="quantized weights are not available; remove it, and give a base that is quantised already",
            )
        return self


class QuantizeBits(Block):
    """`quantize_training.quantize_bits`."""

    why: ClassVar[str] = "it belongs to mixture of quantization, which is off"

    start_bits: InertWhole = None
    target_bits: InertWhole = None


class QuantizeSchedule(Block):
    """`quantize_training.quantize_schedule`."""

    why: ClassVar[str] = "it belongs to mixture of quantization, which is off"

    quantize_period: InertWhole = None
    schedule_offset: InertWhole = None


class QuantizeAlgorithm(Block):
    """`quantize_training.quantize_algo`."""

    why: ClassVar[str] = "it belongs to mixture of quantization, which is off"

    q_type: InertText = None
    rounding: InertText = None


class QuantizeTraining(Block):
    """`quantize_training`: mixture of quantization, which DeepSpeed has removed too."""

    why: ClassVar[str] = "it belongs to mixture of quantization, which is off"

    enabled: Annotated[
        Flag, off("mixture of quantization", "quantise the model before, e.g. with torchao: a quantised base trains")
    ] = False
    quantize_verbose: InertFlag = None
    quantizer_kernel: InertFlag = None
    quantize_bits: QuantizeBits | None = None
    quantize_schedule: QuantizeSchedule | None = None
    quantize_groups: InertWhole = None
    fp16_mixed_quantize: MixedQuantize | None = None
    quantize_algo: QuantizeAlgorithm | None = None


class SparseAttention(Block):
    """`sparse_attention`: there is no such kernel here."""

    why: ClassVar[str] = "it belongs to sparse attention, which is off"

    mode: InertText = None
    block: InertWhole = None
    different_layout_per_head: InertFlag = None
    num_local_blocks: InertWhole = None
    num_global_blocks: InertWhole = None
    attention: InertText = None
    horizontal_global_attention: InertFlag = None
    num_different_global_patterns: InertWhole = None
    num_random_blocks: InertWhole = None
    local_window_blocks: InertItems = None
    global_block_indices: InertItems = None
    global_block_end_indices: InertItems = None
    num_sliding_window_blocks: InertWhole = None

    @model_validator(mode="after")
    def _refused(self) -> Self:
        if self.model_fields_set and self.mode != "dense":
            raise problem(
                'no such block, or mode: "dense"',
                fix="sparse attention is not available; remove it, and use flex_attention of torch in the model",
            )
        return self


class Amp(Block):
    """`amp`: NVIDIA Apex."""

    why: ClassVar[str] = "it belongs to Apex AMP, which is off"

    enabled: Annotated[Flag, Only((False,), "Apex AMP is not available; use bf16, fp16 or torch_autocast")] = False
    opt_level: InertText = None
    cast_model_type: InertText = None
    patch_torch_functions: InertFlag = None
    keep_batchnorm_fp32: InertAny = None
    master_weights: InertFlag = None
    loss_scale: InertAny = None
    cast_model_outputs: InertText = None
    num_losses: InertWhole = None
    verbosity: InertWhole = None
    min_loss_scale: InertNumber = None
    max_loss_scale: InertNumber = None


class TensorParallelGroup(Block):
    """`tensor_parallel.tp`."""

    why: ClassVar[str] = "it belongs to tensor parallelism, which is off"

    tp_size: Annotated[Number, Only((1, 0), TENSOR_PARALLEL)] = 1
    tp_grain_size: InertWhole = None
    mpu: InertAny = None
    tp_group: InertAny = None


class TensorParallel(Block):
    """`tensor_parallel`."""

    why: ClassVar[str] = "it belongs to tensor parallelism, which is off"

    aliases: ClassVar[Mapping[str, str]] = {"tensor_parallel": "tp", "kernel_inject": "replace_with_kernel_inject"}

    autotp_size: Annotated[Number, Only((1, 0), TENSOR_PARALLEL)] = 0
    tp_size: Annotated[Number, Only((1, 0), TENSOR_PARALLEL)] = 1
    tp: TensorParallelGroup | None = None
    dtype: InertText = None
    tp_overlap_comm: InertFlag = None
    vocab_parallel_lm_head: InertFlag = None
    vocab_parallel_ce_backend: InertText = None
    injection_policy_tuple: InertItems = None
    partition_config: InertObject = None
    preset_model: InertText = None
    keep_module_on_host: InertFlag = None
    replace_with_kernel_inject: InertFlag = None


class Inference(Block):
    """`inference`: clients read its tensor_parallel.tp_size."""

    why: ClassVar[str] = "training does not read it; zero.init_inference has keys of its own"

    dtype: InertText = None
    tensor_parallel: TensorParallelGroup | None = None


class ProgressiveLayerDrop(Block):
    """`progressive_layer_drop`: would skip layers."""

    why: ClassVar[str] = "it belongs to progressive layer drop, which is off"

    enabled: Annotated[Flag, off("progressive layer drop", "drop layers in the model's forward")] = False
    theta: InertNumber = None
    gamma: InertNumber = None


class ExpertParallel(Block):
    """`expert_parallel`: automatic expert parallelism."""

    why: ClassVar[str] = "it belongs to expert parallelism, which is off"

    enabled: Annotated[
        Flag, off("expert parallelism", "keep experts as modules: each is a unit of its own, fetched when it is used")
    ] = False
    autoep_size: InertWhole = None
    expert_tensor_parallel_size: InertWhole = None
    validate_folding_routing: InertFlag = None
    async_split_plan: InertFlag = None
    preset_model: InertText = None
    moe_layer_pattern: InertText = None
    expert_pattern: InertText = None
    router_pattern: InertText = None
    use_grouped_mm: InertFlag = None
    disable_triton_grouped_mm: InertFlag = None
    route_norm: InertFlag = None
    route_scale: InertNumber = None
    score_apply: InertText = None
    combine_impl: InertText = None
    row_weighting_impl: InertText = None
    gate_up_impl: InertText = None
    comm_backend: InertText = None
    comm_num_sm: InertWhole = None
    comm_qp_margin: InertWhole = None
    comm_max_tokens_per_rank: InertWhole = None
    num_expert_groups: InertWhole = None
    num_limited_groups: InertWhole = None
    score_func: InertText = None
    top_k: InertAny = None
    load_balance_coeff: InertNumber = None
    routed_scaling_factor: InertNumber = None
    expert_w1: InertText = None
    expert_w2: InertText = None
    expert_w3: InertText = None
    num_experts_attr: InertText = None
    top_k_attr: InertText = None
    has_shared_experts: InertFlag = None
    shared_experts_pattern: InertText = None
    shared_experts_gate_pattern: InertText = None
    expert_activation: InertText = None
