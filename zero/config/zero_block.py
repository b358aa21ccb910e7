"""The `zero_optimization` block: what is sharded, where it lives, and how far ahead it is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from zero.config.fields import (
    Block,
    Count,
    Deprecated,
    Flag,
    InertAny,
    InertCount,
    InertFlag,
    InertNumber,
    InertObject,
    InertWhole,
    Number,
    Only,
    Whole,
    choice,
    problem,
    reads,
)

DEEPSPEED_LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
"""What DeepSpeed's `leaf_module.classes` is without the key; here nothing is a leaf unasked."""

Device = Literal["none", "cpu", "nvme"]
StateDtype = Literal["fp32", "bf16", "8bit"]


def _parse_paths(value: object) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    folders = tuple(path for path in paths if isinstance(path, str) and path)
    if not folders or len(set(folders)) != len(paths):
        raise ValueError("a folder, or a list of different folders to stripe over")
    return folders


Paths = Annotated[tuple[str, ...], reads(_parse_paths)]


def _parse_words(value: object) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [None]
    if not all(isinstance(word, str) and word for word in words):
        raise ValueError("a name, or a list of names")
    return tuple(dict.fromkeys(str(word) for word in words))


Words = Annotated[tuple[str, ...], reads(_parse_words)]


class _Offload(Block):
    device: Annotated[Device, choice("none", "cpu", "nvme")] = "none"
    """Tier the bytes live in while they are not used."""
    nvme_path: Paths | None = None
    """Folders for swap files; more than one are striped. Whether they exist is checked by the plan."""
    pin_memory: Flag = True

    @model_validator(mode="after")
    def _nvme_needs_a_path(self) -> Self:
        if self.device == "nvme" and self.nvme_path is None:
            raise problem(
                'a folder, because device is "nvme"',
                fix="name a folder on the NVMe file system, or a list of them",
                at="nvme_path",
                got="nothing",
                keys=("device", "nvme_path"),
            )
        return self


class OffloadParamConfig(_Offload):
    """`offload_param`: the 16-bit (or fp32) weights."""

    buffer_count: Annotated[Whole, Field(ge=1)] | None = None
    """With buffer_size: cap of the parameter arena."""
    buffer_size: Annotated[Count, Field(ge=1)] | None = None
    """[elements]"""
    max_in_cpu: Count | None = None
    """[elements] kept in host memory as a cache of the NVMe tier."""


class OffloadOptimizerConfig(_Offload):
    """`offload_optimizer`: the master weights and the moments."""

    buffer_count: Annotated[Whole, Field(ge=2)] | None = None
    """Records in flight: one is loaded while another is stored."""
    pipeline_read: Flag = False
    pipeline_write: Flag = False
    fast_init: InertFlag = None
    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Share of the states that is offloaded; the rest stays on the device and is updated there."""
    super_offload: Annotated[Flag, Only((False,), "SuperOffload is not available; set it to false")] = False
    cpuadam_cores_perc: InertNumber = None
    state_dtype: Annotated[StateDtype, choice("fp32", "bf16", "8bit")] = "fp32"
    """Ours: what the two moments are stored as. bf16 and 8bit move fewer bytes, and change the numbers."""
    update_in_backward: Flag = False
    """Ours: update inside backward into a second slot; costs the space of the states again."""


class LeafModuleConfig(Block):
    """`leaf_module`: modules that are fetched as one, with everything below them."""

    classes: Words = ()
    """Names of classes, bare or fully qualified."""
    names: Words = ()
    """As in `named_modules()`."""
    name_suffixes: Words = ()


class ZenFlowConfig(Block):
    """`zenflow`: asynchronous optimizer updates, which change the numbers."""

    topk_ratio: InertNumber = None
    select_strategy: InertAny = None
    select_interval: InertAny = None
    update_interval: InertAny = None
    overlap_step: InertFlag = None
    offload: InertFlag = None
    auto_ratio: InertNumber = None
    full_warm_up_rounds: InertWhole = None
    pt_reserved_cores_perc: InertNumber = None
    steps_per_epoch: InertWhole = None

    @model_validator(mode="after")
    def _refused(self) -> Self:
        if self.model_fields_set:
            raise problem("no zenflow block", fix="ZenFlow is not available; remove it")
        return self


def _quantized() -> Only:
    return Only((False,), "quantized communication changes the numbers and is not available; set it to false")


class ZeroConfig(Block):
    """`zero_optimization`. Sizes are in elements, as in DeepSpeed; None means that the engine derives them."""

    aliases: ClassVar[Mapping[str, str]] = {
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
    }

    stage: Annotated[Whole, Only((3,), "stages 0-2 are not available yet; set it to 3")] = 3
    offload_param: OffloadParamConfig = OffloadParamConfig()
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    sub_group_size: Count | None = None
    """Most elements one optimizer step handles at once. 0 is read as None: an empty sub-group holds nothing."""
    stage3_prefetch_bucket_size: Count | None = None
    stage3_param_persistence_threshold: Count = 100_000
    """Parameters with fewer elements stay gathered."""
    stage3_max_live_parameters: Count | None = None
    stage3_max_reuse_distance: Count | None = None

    cpu_offload: Annotated[Flag, Deprecated('use offload_optimizer.device "cpu"')] = False
    cpu_offload_param: Annotated[Flag, Deprecated('use offload_param.device "cpu"')] = False
    cpu_offload_use_pin_memory: Annotated[Flag | None, Deprecated("use pin_memory of the offload blocks")] = None

    zero_quantized_weights: Annotated[Flag, _quantized()] = False
    zero_quantized_nontrainable_weights: Annotated[Flag, _quantized()] = False
    zero_quantized_gradients: Annotated[Flag, _quantized()] = False
    zero_hpz_partition_size: Annotated[
        Whole, Only((1, 0), "hierarchical partitioning is not available; set it to 1")
    ] = 1
    mics_shard_size: Annotated[Number, Only((-1, 0, 1), "MiCS is not available; set it to -1")] = -1
    zenflow: ZenFlowConfig | None = None

    contiguous_gradients: InertFlag = None
    reduce_scatter: InertFlag = None
    reduce_bucket_size: InertCount = None
    use_multi_rank_bucket_allreduce: InertFlag = None
    allgather_partitions: InertFlag = None
    allgather_bucket_size: InertCount = None
    overlap_comm: InertFlag = None
    compute_grad_norm: InertFlag = None
    load_from_fp32_weights: InertFlag = None
    elastic_checkpoint: InertFlag = None
    stage3_model_persistence_threshold: InertCount = None
    stage3_gather_16bit_weights_on_model_save: InertFlag = None
    stage3_module_granularity_threshold: InertCount = None
    stage3_use_all_reduce_for_fetch_params: InertFlag = None
    stage3_allgather_sequential: InertFlag = None
    ignore_unused_parameters: InertFlag = None
    legacy_stage1: InertFlag = None
    round_robin_gradients: InertFlag = None
    parameter_alignment: InertFlag = None
    zeropp_loco_param: InertObject = None
    mics_hierarchical_params_gather: InertFlag = None
    memory_efficient_linear: InertFlag = None
    pipeline_loading_checkpoint: InertFlag = None
    override_module_apply: InertFlag = None
    log_trace_cache_warnings: InertFlag = None
    enable_sanity_checks: InertFlag = None
    save_muon_momentum_buffer_in_memory: InertFlag = None
    leaf_module: LeafModuleConfig | None = None

    @model_validator(mode="after")
    def _deprecated_offload(self) -> Self:
        pin = {} if self.cpu_offload_use_pin_memory is None else {"pin_memory": self.cpu_offload_use_pin_memory}
        update: dict[str, Block] = {}
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            block: OffloadParamConfig | OffloadOptimizerConfig = getattr(self, new)
            if not getattr(self, old):
                continue
            if "device" in block.model_fields_set and block.device != "cpu":
                raise problem(
                    f'{new}.device "cpu", which is what it stands for', at=old, got=f'true and "{block.device}"',
                    fix=f"remove {old}", keys=(old,),
                )  # fmt: skip
            update[new] = block.model_copy(update={"device": "cpu", **pin})
        if self.sub_group_size == 0:
            return self.model_copy(update={**update, "sub_group_size": None})
        return self.model_copy(update=update) if update else self
