"""The configuration of `zero.init_inference`: DeepSpeed's inference keys, and which of them mean something here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import ConfigError
from zero.config.fields import short_json
from zero.config.known_keys import nearest
from zero.config.loading import load_config
from zero.config.precision_block import DTYPES, parse_dtype
from zero.config.quantization_block import Codes, parse_codes
from zero.config.schema import Config
from zero.config.sources import read_source

ALIASES = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "injection_dict": "injection_policy",
    "zero_optimization": "zero",
}
# Blocks of a training config that mean the same here.
SHARED_BLOCKS = ("memory_budget", "aio", "weight_quantization")


def _is_on(value: object) -> bool:
    return bool(value.get("enabled", True)) if isinstance(value, Mapping) else bool(value)


def _above_one(*keys: str) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        if not isinstance(value, Mapping):
            return isinstance(value, (int, float)) and value > 1
        return any(isinstance(value.get(key), (int, float)) and value[key] > 1 for key in keys)

    return check


_TENSOR_PARALLEL = (
    "tensor parallelism is not available; to stream a model that does not fit on the device, set "
    'zero.offload_param.device to "cpu" or "nvme"'
)
# Key -> (does this value ask for it?, why not and what instead).
REFUSED: dict[str, tuple[Callable[[object], bool], str]] = {
    "tensor_parallel": (_above_one("tp_size"), _TENSOR_PARALLEL),
    "mp_size": (_above_one(), _TENSOR_PARALLEL),
    "moe": (_above_one("ep_size"), "expert parallelism is not available; set ep_size to 1"),
    "ep_size": (_above_one(), "expert parallelism is not available; set it to 1"),
    "set_empty_params": (
        _is_on,
        "build the model under zero.Init instead: its weights are then never all in memory at once",
    ),
    "save_mp_checkpoint_path": (_is_on, "init_inference does not write a checkpoint; save the model yourself"),
}

# They ask for other kernels that compute the same; published scripts set the first without a need.
KERNELS = (
    *("replace_with_kernel_inject", "injection_policy", "injection_policy_tuple"),
    *("enable_cuda_graph", "use_triton", "triton_autotune"),
)
_IGNORED_WORDS = """
    return_tuple max_out_tokens max_tokens min_out_tokens min_tokens triangular_masking tm replace_method
    training_mp_size transposed_mode keep_module_on_host ep_group ep_mp_group moe_experts moe_type mpu args
    checkpoint_config ckpt_config base_dir
"""
IGNORED = (*KERNELS, *_IGNORED_WORDS.split())  # Known to DeepSpeed's kernels or launcher, without effect here.


@dataclass(frozen=True)
class InferenceOptions:
    """The options of `init_inference`."""

    training_config: Config  # The other options, as the engine reads them.
    dtype: torch.dtype | None  # None: as the model is.
    checkpoint: str | None  # A folder of .safetensors files.
    quantization: Mapping[str, Codes]  # Part of a module's name -> how its weight is coded.
    ignored: tuple[str, ...]  # Keys that have no effect.


def read_inference(
    config: str | os.PathLike[str] | Mapping[str, Any] | None, keywords: Mapping[str, Any]
) -> InferenceOptions:
    """Read and check a configuration and the keywords beside it.

    Raises:
        ConfigError: lists every problem.
    """
    problems: list[str] = []
    options = _merge(config, keywords, problems)
    for key, value in options.items():
        is_requested, instead = REFUSED.get(key, (None, ""))
        if is_requested is not None and is_requested(value):
            problems.append(f"{key}: got {short_json(value)}; {instead}")
    dtype = _dtype(options.get("dtype"), problems)
    checkpoint = options.get("checkpoint")
    if checkpoint is not None and not isinstance(checkpoint, (str, os.PathLike)):
        problems.append(f"checkpoint: expected a folder of .safetensors files, got {short_json(checkpoint)}")
    zero = options.get("zero")
    if zero is not None and not isinstance(zero, Mapping):
        problems.append(f'zero: expected an object such as {{"offload_param": {{...}}}}, got {short_json(zero)}')
    codes = _quantization(options.get("quant"), problems)
    if problems:
        raise ConfigError("\n  ".join(["init_inference:", *problems]))
    training_config = _training_config(options, dtype)
    block = training_config.weight_quantization
    return InferenceOptions(
        training_config,
        dtype,
        None if checkpoint is None else os.fspath(checkpoint),
        {**({} if block is None else block.rules), **codes},
        tuple(key for key in options if key in IGNORED or key in REFUSED),
    )


def _merge(
    config: str | os.PathLike[str] | Mapping[str, Any] | None, keywords: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """Both under canonical names, what is None left out."""
    content = {} if config is None else read_source(config, problems)[1]
    known = ["dtype", "zero", "checkpoint", "quant", *SHARED_BLOCKS, *REFUSED, *IGNORED]
    merged: dict[str, Any] = {}
    for source in (content, keywords):
        for written, value in source.items():
            key = ALIASES.get(written, written)
            if key not in known:
                near = nearest(str(written), [*known, *ALIASES])
                hint = f"; the nearest known key is {near[0]!r}" if near else "; known keys: " + ", ".join(known[:5])
                problems.append(f"{written}: unknown key{hint}")
            elif value is not None:
                if key in merged and merged[key] != value:
                    problems.append(f"{written}: given twice, as {short_json(merged[key])} and {short_json(value)}")
                merged[key] = value
    return merged


def _dtype(value: object, problems: list[str]) -> torch.dtype | None:
    if value is None:
        return None
    try:
        return DTYPES[parse_dtype(value)]
    except ValueError:
        problems.append(f"dtype: expected torch.float32, torch.bfloat16 or torch.float16, got {value!r}")
        return None


def _quantization(value: object, problems: list[str]) -> dict[str, Codes]:
    """Of DeepSpeed's `quant`: all weights of nn.Linear, in groups of the default size."""
    if not value or not _is_on(value):
        return {}
    block = value if isinstance(value, Mapping) else {}
    weight = block.get("weight", {})
    activation = block.get("activation")
    if isinstance(activation, Mapping) and activation.get("enabled"):
        problems.append("quant.activation.enabled: activations are not quantised; set it to false")
    if not isinstance(weight, Mapping):
        problems.append(f"quant.weight: expected an object, got {short_json(weight)}")
        return {}
    if not _is_on(weight):
        return {}
    rule = {
        "num_bits": weight.get("num_bits", 8),
        "symmetric": weight.get("q_type", "symmetric") == "symmetric",
        "group_size": weight.get("group_size", Codes().group_size),
    }
    try:
        return {"": parse_codes(rule)}
    except ValueError as error:
        problems.append(f"quant.weight: expected {error}")
        return {}


def _training_config(options: Mapping[str, Any], dtype: torch.dtype | None) -> Config:
    """A training config that trains nothing: the engine has one way to read where things live."""
    zero = {key: value for key, value in options.get("zero", {}).items() if key != "offload_optimizer"}
    source = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, **zero},
        "bf16": {"enabled": dtype == torch.bfloat16},
        **{key: options[key] for key in SHARED_BLOCKS if key in options},
    }
    loaded = load_config(source)
    if "zero_optimization.offload_param.device" in loaded.inactive:
        raise ConfigError(
            'zero.offload_param: expected "stage": 3 in the block zero, because weights are sharded only at stage 3; '
            "leave stage out"
        )
    return loaded
