"""Every model class that transformers can build, with a configuration that makes it tiny.

Nothing is listed here: the classes are those of transformers' auto mappings, and a configuration is the default one of
its class, with every number made small whose name says that it is a size. What cannot be built so is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import initialization
from transformers.models.auto import configuration_auto, modeling_auto

NUMEL_MAX = 12_000_000
SIZES: tuple[tuple[str, int], ...] = (
    (r"(token_ids?|token_index|_idx|_index|offset)$", 0),  # below: kept, or the last word
    (r"vocab|type_size|num_embeddings|codebook_size|num_codevectors", 128),
    (r"experts_per|topk|top_k|n_group|num_experts_per", 2),
    (r"experts", 4),
    (r"head_dim|nope|rope_dim|lora_rank|kv_channels", 16),
    (r"heads|n_head|num_key_value|num_kv|num_groups$|num_conv_pos_embedding_groups", 2),
    (r"layers?$|depths?$|num_blocks|n_blocks|repeat|num_stages$|blocks$", 2),
    (r"position|max_.*len|seq_len|n_ctx|context_length|max_seq", 128),
    (r"image_size|input_size$|img_size", 32),
    (r"patch", 8),
    (r"intermediate|ffn|n_inner|mlp_dim|feed_forward|ff_dim|d_ff", 64),
    (r"dim|d_model|size|width|hidden|channels|embe?d|units|filters|planes|n_state|features|queries|rank", 32),
)
"""(pattern of a name, the largest value it gets); the first pattern that is found counts."""
KEPT = re.compile(
    "feat_extract|kernel|stride|num_channels|_ratio|factor|num_labels|window|in_channels|num_mel|_every|interval|bins"
)
DROPPED = (
    *("layer_types", "mlp_layer_types", "block_types", "per_layer_config", "out_features", "out_indices"),
    *("stage_names", "transformers_version", "_name_or_path", "architectures"),
)
"""What a configuration makes anew from its sizes."""


def model_classes() -> dict[str, list[str]]:
    """Model type -> the names of its classes, without those that only combine others."""
    found: dict[str, set[str]] = {}
    for mapping in (n for n in dir(modeling_auto) if n.startswith("MODEL") and n.endswith("_MAPPING_NAMES")):
        for kind, names in getattr(modeling_auto, mapping).items():
            found.setdefault(kind, set()).update(names if isinstance(names, (list, tuple)) else [names])
    return {kind: sorted(names) for kind, names in sorted(found.items()) if names}


def tiny_config(kind: str, name: str) -> Any:
    """A small configuration with which the class can be built, or the reason why there is none, as a ValueError."""
    config_class = configuration_auto.CONFIG_MAPPING[kind]
    model_class = getattr(transformers, name)
    reasons = []
    for shrink in (_all_sizes, _widths, _counts, _nothing):
        try:
            config = _shrunk(config_class, shrink)
            with torch.device("meta"), initialization.no_init_weights(), initialization.meta_device_safe_creation_ops():
                numel = sum(p.numel() for p in model_class(config).parameters())
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error)[:80]}")
            continue
        if 0 < numel <= NUMEL_MAX:
            return _shrunk(config_class, shrink)
        reasons.append(f"{numel:,} parameters")
    raise ValueError("; ".join(reasons))


def _shrunk(config_class: Any, shrink: Callable[[str, int], int]) -> Any:
    default = config_class()
    return config_class.from_dict(_dict(default.to_dict(), shrink))


def _dict(values: dict[str, Any], shrink: Callable[[str, int], int]) -> dict[str, Any]:
    small = {}
    for key, value in values.items():
        if shrink is not _nothing and key in DROPPED:
            continue
        small[key] = _value(key, value, shrink)
    return small


def _value(key: str, value: Any, shrink: Callable[[str, int], int]) -> Any:
    if isinstance(value, dict):
        return _dict(value, shrink) if key.endswith("config") else value
    if isinstance(value, (list, tuple)):
        return [_value(key, item, shrink) for item in value]
    return shrink(key, value) if type(value) is int else value


def _all_sizes(key: str, value: int) -> int:
    if KEPT.search(key):
        return value
    for pattern, most in SIZES:
        if re.search(pattern, key):
            return min(value, most or 127)
    return value


def _widths(key: str, value: int) -> int:
    """All but the number of layers, which lists have to have the length of."""
    return value if re.search(SIZES[6][0], key) else _all_sizes(key, value)


def _counts(key: str, value: int) -> int:
    """Fewer layers, experts and words, but the widths stay: they have to fit each other."""
    for pattern, most in (SIZES[0], SIZES[1], SIZES[3], SIZES[6]):
        if re.search(pattern, key) and not KEPT.search(key):
            return min(value, most or 127)
    return value


def _nothing(key: str, value: int) -> int:
    return value


def easy_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Inputs for a forward, as far as the names of what the model takes say what they are."""
    main = model.main_input_name
    config = model.config.get_text_config() if main == "input_ids" else model.config
    inputs: dict[str, torch.Tensor] = {}
    if main == "input_ids":
        inputs[main] = torch.arange(1, 9)[None] % min(getattr(config, "vocab_size", 64), 64)
    elif main == "pixel_values":
        side = getattr(config, "image_size", 32) or 32
        side = side if isinstance(side, (list, tuple)) else (side, side)
        inputs[main] = torch.rand(1, getattr(config, "num_channels", 3), *side)
    elif main == "input_values":
        inputs[main] = torch.rand(1, 2000)
    else:
        raise ValueError(main)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.arange(1, 5)[None]
    return inputs
