"""What DeepSpeed has and this library has not: every name, and what to do instead."""

from __future__ import annotations

from torch import nn

from zero.compat.missing import missing_class, missing_function

TENSORS = "tensor parallelism is not implemented; stage 3 shards weights over the same ranks without it"
SEQUENCES = "sequence parallelism is not implemented; use torch.distributed.tensor.experimental.context_parallel"
PIPELINES = "pipelines are not implemented; stage 3 with offload needs none, or use torch.distributed.pipelining"
EXPERTS = (
    "DeepSpeed's MoE layers are not implemented; a model's own experts (ModuleList, or packed as transformers has "
    "them) are units here and only those that are called move"
)
COMPRESSION = "compression training is not implemented; quantise the base with bitsandbytes or torchao, or the result"
ONE_BIT = "1-bit optimizers are not implemented; use AdamW, with communication_data_type for less traffic"
KERNELS = "DeepSpeed's kernels are not part of it; torch's scaled_dot_product_attention and torch.compile do that"
INFERENCE = "inference kernels are not implemented; deepspeed.init_inference streams a model larger than memory"
HYBRID = "the hybrid engine is not implemented; engine.generation() keeps weights from token to token"
ELASTICITY = "elastic batch sizes are not implemented; checkpoints load on any number of ranks"
AUTOTUNING = 'autotuning is not implemented; "auto" values, `zero plan` and `zero tune` choose sizes'
LINEAR = "it is not implemented; use peft for LoRA, and a quantised base"
DATA = "the data efficiency library is not implemented; hand a sampler to the loader"
UNIVERSAL = "it is not needed: a checkpoint loads at any stage, tier and number of ranks as it is"
SWAPPERS = "DeepSpeed's swappers are not part of it; zero_optimization.offload_param and offload_optimizer are"

tp_model_init = missing_function("tp_model_init", TENSORS)
set_autotp_mode = missing_function("set_autotp_mode", TENSORS)

UlyssesSPAttentionHF = missing_class("runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF", SEQUENCES)
UlyssesSPAttentionHF.register_with_transformers = missing_function("UlyssesSPAttentionHF.register", SEQUENCES)
UlyssesSPDataLoaderAdapter = missing_class("runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter", SEQUENCES)
SequenceTiledCompute = missing_class("runtime.sequence_parallel.ulysses_sp.SequenceTiledCompute", SEQUENCES)
TiledMLP = missing_class("runtime.sequence_parallel.ulysses_sp.TiledMLP", SEQUENCES)
TiledFusedLogitsLoss = missing_class("runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss", SEQUENCES)
sequence_tiled_compute = missing_function("runtime.sequence_parallel.ulysses_sp.sequence_tiled_compute", SEQUENCES)
DistributedAttention = missing_class("sequence.layer.DistributedAttention", SEQUENCES, nn.Module)

PipelineModule = missing_class("pipe.PipelineModule", PIPELINES, nn.Module)
LayerSpec = missing_class("pipe.LayerSpec", PIPELINES)
TiedLayerSpec = missing_class("pipe.TiedLayerSpec", PIPELINES, LayerSpec)
PipelineEngine = missing_class("runtime.pipe.engine.PipelineEngine", PIPELINES)
ProcessTopology = missing_class("runtime.pipe.topology.ProcessTopology", PIPELINES)
PipeDataParallelTopology = missing_class("runtime.pipe.topology.PipeDataParallelTopology", PIPELINES, ProcessTopology)
PipeModelDataParallelTopology = missing_class(
    "runtime.pipe.topology.PipeModelDataParallelTopology", PIPELINES, ProcessTopology
)
PipelineParallelGrid = missing_class("runtime.pipe.topology.PipelineParallelGrid", PIPELINES)

MoE = missing_class("moe.layer.MoE", EXPERTS, nn.Module)
Experts = missing_class("moe.experts.Experts", EXPERTS, nn.Module)
TopKGate = missing_class("moe.sharded_moe.TopKGate", EXPERTS, nn.Module)
MOELayer = missing_class("moe.sharded_moe.MOELayer", EXPERTS, nn.Module)

init_compression = missing_function("compression.compress.init_compression", COMPRESSION)
redundancy_clean = missing_function("compression.compress.redundancy_clean", COMPRESSION)
student_initialization = missing_function("compression.compress.student_initialization", COMPRESSION)

OnebitAdam = missing_class("runtime.fp16.onebit.adam.OnebitAdam", ONE_BIT)
OnebitLamb = missing_class("runtime.fp16.onebit.lamb.OnebitLamb", ONE_BIT)
ZeroOneAdam = missing_class("runtime.fp16.onebit.zoadam.ZeroOneAdam", ONE_BIT)
FusedLamb = missing_class("ops.lamb.FusedLamb", "LAMB is not implemented; use AdamW")

DeepSpeedTransformerLayer = missing_class("ops.transformer.DeepSpeedTransformerLayer", KERNELS, nn.Module)
DeepSpeedTransformerConfig = missing_class("ops.transformer.DeepSpeedTransformerConfig", KERNELS)
replace_transformer_layer = missing_function("module_inject.replace_transformer_layer", INFERENCE)
replace_module = missing_function("module_inject.replace_module", INFERENCE)
DeepSpeedInferenceConfig = missing_class("inference.config.DeepSpeedInferenceConfig", INFERENCE)
default_inference_config = missing_function("default_inference_config", INFERENCE)
DeepSpeedHybridEngine = missing_class("runtime.hybrid_engine.DeepSpeedHybridEngine", HYBRID)

compute_elastic_config = missing_function("elasticity.compute_elastic_config", ELASTICITY)
elasticity_enabled = missing_function("elasticity.elasticity_enabled", ELASTICITY)
Autotuner = missing_class("autotuning.Autotuner", AUTOTUNING)

OptimizedLinear = missing_class("linear.OptimizedLinear", LINEAR, nn.Module)
LoRAConfig = missing_class("linear.LoRAConfig", LINEAR)
QuantizationConfig = missing_class("linear.QuantizationConfig", LINEAR)
LinearModuleForZeroStage3 = missing_class(
    "runtime.zero.linear.LinearModuleForZeroStage3", "nn.Linear needs no replacement here", nn.Module
)
zero3_linear_wrap = missing_function(
    "runtime.zero.linear.zero3_linear_wrap", "torch.nn.functional.linear needs no replacement here"
)
DeepSpeedDataSampler = missing_class("runtime.data_pipeline.data_sampling.data_sampler.DeepSpeedDataSampler", DATA)
convert_to_random_ltd = missing_function(
    "runtime.data_pipeline.data_routing.helper.convert_to_random_ltd", "random layer drop is not implemented"
)
ds_to_universal = missing_function("checkpoint.ds_to_universal.main", UNIVERSAL)
DeepSpeedCheckpoint = missing_class("checkpoint.DeepSpeedCheckpoint", UNIVERSAL)
enable_universal_checkpoint = missing_function("checkpoint.enable_universal_checkpoint", UNIVERSAL)

ASYNC_IO = "DeepSpeed's aio handle is not part of it; the engine has its own I/O, and `zero tune` measures it"
aio_handle = missing_class("ops.aio.aio_handle", ASYNC_IO)
AsyncPartitionedParameterSwapper = missing_class(
    "runtime.swap_tensor.partitioned_param_swapper.AsyncPartitionedParameterSwapper", SWAPPERS
)
link_hp_params = missing_function("utils.link_hp_params", "masters are found by safe_get_full_fp32_param")
lazy_init_hp_params_optimizer_state = missing_function("utils.lazy_init_hp_params_optimizer_state", SWAPPERS)
ThroughputTimer = missing_class("utils.timer.ThroughputTimer", "engine.statistics() has what it counts")
SynchronizedWallClockTimer = missing_class(
    "utils.timer.SynchronizedWallClockTimer", "engine.statistics() has what it counts"
)
FP16_Optimizer = missing_class("runtime.fp16.fused_optimizer.FP16_Optimizer", "set fp16 in the configuration")
FP16_UnfusedOptimizer = missing_class(
    "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer", "set fp16 in the configuration"
)
BF16_Optimizer = missing_class("runtime.bf16_optimizer.BF16_Optimizer", "set bf16 in the configuration")

SCALER = "the engine scales the loss itself; set fp16 in the configuration, and read optimizer.loss_scale"
LossScaleConfig = missing_class("runtime.fp16.loss_scaler.LossScaleConfig", SCALER)
LossScaleProfile = missing_class("runtime.fp16.loss_scaler.LossScaleProfile", SCALER)
LossScaler = missing_class("runtime.fp16.loss_scaler.LossScaler", SCALER)
DynamicLossScaler = missing_class("runtime.fp16.loss_scaler.DynamicLossScaler", SCALER)
CreateLossScaler = missing_function("runtime.fp16.loss_scaler.CreateLossScaler", SCALER)
