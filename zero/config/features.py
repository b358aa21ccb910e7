"""Blocks of DeepSpeed's features that this library lacks, as one table: an enabled block is refused, or has no effect.

A feature that would change the results is refused, with advice what to do instead. A feature that does not change them
(a service, a separate profiler, passes of a compiler) is checked, listed once as inactive with the reason, and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import create_model, model_validator
from typing_extensions import Self

from zero.config.fields import (
    ConfigBlock,
    Flag,
    Inert,
    InertAny,
    InertCount,
    InertFlag,
    InertInteger,
    InertItems,
    InertNumber,
    InertObject,
    InertText,
    Number,
    Only,
    problem,
    reads,
)


def _parse_passes(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("a list")
    if any(name not in ("z1", "z3") for name in value):
        raise problem(
            '"z1" and "z3" only',
            fix="passes that split a sample over ranks are not available; remove the others, and for long sequences "
            'set activation_checkpointing.activation_device to "cpu" or "nvme"',
        )
    return tuple(value)


KINDS: Mapping[str, Any] = {
    "any": InertAny,
    "count": InertCount,
    "flag": InertFlag,
    "items": InertItems,
    "number": InertNumber,
    "object": InertObject,
    "passes": Annotated[
        tuple[str, ...] | None,
        Inert('"z1" and "z3" place weights, as the stage does; others split a sample over ranks and are refused'),
        reads(_parse_passes),
    ],
    "text": InertText,
    "whole": InertInteger,
}
TENSOR_PARALLEL = "tensor parallelism is not available; set it to 1, and shard weights with zero_optimization.stage 3"


@dataclass(frozen=True)
class Unless:
    """Refuse a block that sets any key, unless one of its keys switches it off."""

    expected: str
    key: str | None = None  # The key that can switch it off; None: there is none.
    value: object = None


class _Refused(ConfigBlock):
    """A block that is refused because of its content as a whole, not because of a single key."""

    unless: ClassVar[Unless]
    fix: ClassVar[str]

    @model_validator(mode="after")
    def _check_is_off(self) -> Self:
        key = self.unless.key
        if self.model_fields_set and (key is None or getattr(self, key) != self.unless.value):
            raise problem(self.unless.expected, fix=self.fix)
        return self


@dataclass(frozen=True)
class Feature:
    keys: str  # Keys without effect: a kind with a colon, then the names of the keys of that kind.
    about: str = ""
    off: str = ""  # Name of the feature that the keys belong to, and that is off; empty: that of the enclosing block.
    instead: str = ""  # What to do instead. Refuses `enabled`, or the block; empty: neither.
    why: str = ""  # Why the keys have no effect; empty: the feature is off, or for the reason of the enclosing block.
    unless: Unless | None = None  # Refuses the block and not `enabled`, which is one of `keys` or is not there.
    sizes: Mapping[str, float] = field(default_factory=dict)  # Tensor-parallel sizes and their defaults.
    blocks: Mapping[str, Feature] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False  # As `ConfigBlock.is_open`; the blocks in it too.


_BEFOREHAND = "the model beforehand, for example with torchao: the engine trains a model with a quantised base"
_COMPRESS = f"quantise or prune {_BEFOREHAND}"
_OWN_SAMPLER = "choose samples with a sampler of your own DataLoader"
_MIXED_QUANTIZE = Feature("flag: enabled number: quantize_change_ratio")
_TECHNIQUE = Feature(
    "object: different_groups",
    about="One compression technique; the groups carry the user's own names.",
    blocks={
        "shared_parameters": Feature(
            """flag: quantizer_kernel whole: schedule_offset schedule_offset_end schedule_offset_stride quantize_groups
            flag: quantize_verbose text: quantization_type flag: quantize_weight_in_forward text: rounding
            range_calibration method block_pattern number: dense_ratio items: excluded_modules whole: num_heads""",
            instead=_COMPRESS,
            blocks={"fp16_mixed_quantize": _MIXED_QUANTIZE},
        )
    },
)
_TENSOR_PARALLEL_GROUP = Feature(
    "whole: tp_grain_size any: mpu tp_group", off="tensor parallelism", sizes={"tp_size": 1}
)

# Key of the block -> its description.
FEATURES: Mapping[str, Feature] = {
    # ---- refused when they are switched on --------------------------------------------------------
    "amp": Feature(
        """text: opt_level cast_model_type flag: patch_torch_functions any: keep_batchnorm_fp32 flag: master_weights
        any: loss_scale text: cast_model_outputs whole: num_losses verbosity number: min_loss_scale max_loss_scale""",
        about="NVIDIA Apex.",
        off="Apex AMP",
        instead="use bf16, fp16 or torch_autocast",
    ),
    "compression_training": Feature(
        "",
        about="would change the weights.",
        off="compression training",
        is_open=True,
        blocks={
            "layer_reduction": Feature(
                "whole: keep_number_layer text: module_name_prefix items: teacher_layer other_module_name",
                instead=_COMPRESS,
            ),
            "weight_quantization": _TECHNIQUE,
            "activation_quantization": _TECHNIQUE,
            "sparse_pruning": _TECHNIQUE,
            "row_pruning": _TECHNIQUE,
            "head_pruning": _TECHNIQUE,
            "channel_pruning": _TECHNIQUE,
        },
    ),
    "data_efficiency": Feature(
        "whole: seed",
        about="would choose and shorten the samples. DeepSpeed samples by `curriculum_learning` without `enabled` too.",
        off="data efficiency",
        is_open=True,
        instead=_OWN_SAMPLER,
        blocks={
            "data_sampling": Feature(
                "flag: enabled whole: num_epochs num_workers flag: pin_memory",
                blocks={
                    "curriculum_learning": Feature(
                        "text: data_cluster_path object: curriculum_metrics", instead=_OWN_SAMPLER
                    ),
                    "dynamic_batching": Feature(
                        """text: metrics_path lr_scaling_method whole: min_batch_size max_batch_size
                        text: sequence_picking_order whole: max_tokens flag: verbose""",
                        instead=_OWN_SAMPLER,
                    ),
                },
            ),
            "data_routing": Feature(
                "flag: enabled",
                blocks={
                    "random_ltd": Feature(
                        """whole: total_layer_num random_ltd_layer_num items: random_ltd_layer_id
                        text: model_mask_name model_type hidden_state_order whole: micro_batch_size
                        global_batch_size""",
                        instead="drop tokens in the model's own code",
                        blocks={
                            "random_ltd_schedule": Feature(
                                "whole: min_value max_value text: schedule_type",
                                blocks={"schedule_config": Feature("whole: seq_per_step require_steps")},
                            ),
                            "layer_token_lr_schedule": Feature(
                                "flag: enabled count: total_layer_tokens text: warmup_type count: warmup_layer_tokens"
                            ),
                        },
                    )
                },
            ),
        },
    ),
    "expert_parallel": Feature(
        """whole: autoep_size expert_tensor_parallel_size flag: validate_folding_routing async_split_plan
        text: preset_model moe_layer_pattern expert_pattern router_pattern flag: use_grouped_mm
        disable_triton_grouped_mm route_norm number: route_scale text: score_apply combine_impl row_weighting_impl
        gate_up_impl comm_backend whole: comm_num_sm comm_qp_margin comm_max_tokens_per_rank num_expert_groups
        num_limited_groups text: score_func any: top_k number: load_balance_coeff routed_scaling_factor
        text: expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr flag: has_shared_experts
        text: shared_experts_pattern shared_experts_gate_pattern expert_activation""",
        about="automatic expert parallelism.",
        off="expert parallelism",
        instead="keep the experts as modules: each is a unit of its own and is fetched when it is used",
    ),
    "quantize_training": Feature(
        "flag: quantize_verbose quantizer_kernel whole: quantize_groups",
        about="mixture of quantization, which DeepSpeed has removed too.",
        off="mixture of quantization",
        is_open=True,
        instead=f"quantise {_BEFOREHAND}",
        blocks={
            "quantize_bits": Feature("whole: start_bits target_bits"),
            "quantize_schedule": Feature("whole: quantize_period schedule_offset"),
            "fp16_mixed_quantize": _MIXED_QUANTIZE,
            "quantize_algo": Feature("text: q_type rounding"),
        },
    ),
    "sparse_attention": Feature(
        """text: mode whole: block flag: different_layout_per_head whole: num_local_blocks num_global_blocks
        text: attention flag: horizontal_global_attention whole: num_different_global_patterns num_random_blocks
        items: local_window_blocks global_block_indices global_block_end_indices whole: num_sliding_window_blocks""",
        about="there is no sparse attention kernel here.",
        off="sparse attention",
        is_open=True,
        instead="use torch.nn.attention.flex_attention in the model",
        unless=Unless('no sparse_attention block, or "mode": "dense" in it', "mode", "dense"),
    ),
    "tensor_parallel": Feature(
        """text: dtype flag: tp_overlap_comm vocab_parallel_lm_head text: vocab_parallel_ce_backend
        items: injection_policy_tuple object: partition_config text: preset_model flag: keep_module_on_host
        replace_with_kernel_inject""",
        off="tensor parallelism",
        sizes={"autotp_size": 0, "tp_size": 1},
        blocks={"tp": _TENSOR_PARALLEL_GROUP},
        aliases={"tensor_parallel": "tp", "kernel_inject": "replace_with_kernel_inject"},
    ),
    "zenflow": Feature(
        """number: topk_ratio any: select_strategy select_interval update_interval flag: overlap_step offload
        number: auto_ratio whole: full_warm_up_rounds number: pt_reserved_cores_perc whole: steps_per_epoch""",
        about="asynchronous optimizer updates, which change the numbers.",
        off="ZenFlow",
        instead="rely on the updates that the engine makes in the background, with exact results",
        unless=Unless("no zenflow block"),
    ),
    # ---- without effect ---------------------------------------------------------------------------
    "compile": Feature(
        """flag: enabled disable text: backend object: kwargs flag: deepcompile autoep_non_moe free_activation
        count: free_activation_threshold flag: offload_activation offload_activation_pin_memory offload_opt_states
        double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce
        sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes: passes""",
        about="DeepCompile passes.",
        why="it controls passes of DeepCompile, which is not available; compile blocks of the model with "
        "torch.compile instead",
    ),
    "eigenvalue": Feature(
        """flag: enabled verbose whole: max_iter number: tol stability whole: gas_boundary_resolution text: layer_name
        whole: layer_num""",
        about="controls quantization, which is not available here.",
        is_open=True,
        why="it controls quantization, which is not available",
    ),
    "inference": Feature(
        "text: dtype",
        about="other libraries read its tensor_parallel.tp_size.",
        why="training does not read it; zero.init_inference has its own keys",
        blocks={"tensor_parallel": _TENSOR_PARALLEL_GROUP},
    ),
    "nebula": Feature(
        """flag: enabled text: persistent_storage_path number: persistent_time_interval
        whole: num_of_version_in_retention flag: enable_nebula_load text: load_path""",
        about="Azure's checkpoint service.",
        is_open=True,
        why="checkpoints are written by this engine; with checkpoint.async_save it writes them in the background",
    ),
    "parallel_write": Feature("flag: pipeline_stage", why="each stage of a pipeline always writes its own part"),
    "timers": Feature(
        "", why="the engine has no throughput timer", blocks={"throughput": Feature("flag: enabled synchronized")}
    ),
    "writer": Feature(
        """text: type any: io_buffer_size flag: io_buffer_double number: io_multiplier flag: show_statistics
        text: data_parallel flag: decoupled""",
        why="checkpoints are written by this engine, which takes the buffer sizes from its plan",
    ),
}


def _declare_keys(feature: Feature, off: str) -> Iterator[tuple[str, Any, Any]]:
    """Key, type and default of each key of a block."""
    if feature.instead and feature.unless is None:
        fix = f"{off} is not available; set it to false, and {feature.instead}"
        yield "enabled", Annotated[Flag, Only((False,), fix)], False
    for key, default in feature.sizes.items():
        yield key, Annotated[Number, Only((1, 0), TENSOR_PARALLEL)], default
    kind: Any = None
    for word in feature.keys.split():
        if word.endswith(":"):
            kind = KINDS[word[:-1]]
        else:
            yield word, kind, None


def _make_block(name: str, feature: Feature, off: str = "", why: str = "", is_open: bool = False) -> type[ConfigBlock]:
    """Make the block and its inner blocks. Each has a name in this module, so that configurations can be pickled."""
    off, is_open = feature.off or off, feature.is_open or is_open
    why = f"it belongs to {feature.off}, which is off" if feature.off else feature.why or why
    why = f"its block is refused: {feature.off} is not available" if feature.unless else why
    fields: dict[str, Any] = {key: (kind, default) for key, kind, default in _declare_keys(feature, off)}
    for key, inner in feature.blocks.items():
        fields[key] = (_make_block(f"{name}_{key}", inner, off, why, is_open) | None, None)
    block: Any = create_model(name, __base__=_Refused if feature.unless else ConfigBlock, __module__=__name__, **fields)
    block.__doc__ = feature.about
    block.why = why
    block.aliases = feature.aliases
    block.unless = feature.unless
    block.is_open = is_open
    block.fix = f"{off} is not available; remove the block, and {feature.instead}"
    if feature.unless:
        block.__doc__ = f"{feature.about} Refused; expected is {feature.unless.expected}: {block.fix}."
    globals()[name] = block
    return block  # type: ignore[no-any-return]


for _name, _feature in FEATURES.items():
    _make_block(_name, _feature)


if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # The block of a feature, for the block that declares its key.
