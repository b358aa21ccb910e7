"""`deepspeed.elasticity`: batch sizes for any number of ranks, as functions of the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from offload.errors import ConfigError
from zero.config.elasticity import Elasticity, elastic_batch
from zero.config.loading import load_config
from zero.config.sources import parse_json

KEY, SCHEDULER_VARIABLE = "elasticity", "DEEPSPEED_ELASTICITY_CONFIG"


class ElasticityError(ConfigError):
    """An error in elastic batch sizes."""


class ElasticityConfigError(ElasticityError):
    """The configuration is impossible; the text is the reason."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """This number of ranks cannot share the batch."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    return bool(ds_config.get(KEY, {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """The batch size, the numbers of ranks that can share it, and with `return_microbatch` the micro-batch of a rank.

    Args:
        ds_config: configuration with an enabled `elasticity` block.
        target_deepspeed_version: accepted; the rule is the same for all versions.
        world_size: number of ranks; 0: that of the variable WORLD_SIZE where one is needed, by version 0.2 or for
            the micro-batch, else none.
        return_microbatch: return it too; as in DeepSpeed, it is also returned if `world_size` is given.

    Raises:
        ElasticityConfigError: no block, an impossible one, or no number of ranks where one is needed.
        ElasticityIncompatibleWorldSize: `world_size` ranks cannot share the batch.
    """
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"ds_config: expected a dict, got {type(ds_config).__name__}")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError("elasticity: expected a block with enabled set to true; add one")
    block = _block(ds_config[KEY])
    needs_ranks = return_microbatch or block.version == 0.2
    ranks = _ranks_of_environment() if needs_ranks and not world_size else world_size
    try:
        chosen = elastic_batch(block, ranks)
    except ValueError as error:
        kind = ElasticityIncompatibleWorldSize if ranks else ElasticityConfigError
        raise kind(f"elasticity: expected {error}, got {ranks} ranks") from None
    micro = (chosen.micro_batch_size,) if world_size or return_microbatch else ()
    return (chosen.train_batch_size, list(chosen.ranks), *micro)


def _ranks_of_environment() -> int:
    word = os.environ.get("WORLD_SIZE", "")
    if not (word.isascii() and word.isdigit() and int(word)):
        raise ElasticityConfigError(
            "elasticity: expected a number of ranks with version 0.2 or return_microbatch, got 0 and "
            f"WORLD_SIZE={word or 'unset'}; pass world_size, or set the variable"
        )
    return int(word)


def _block(keys: Mapping[str, Any]) -> Elasticity:
    for key in ("max_train_batch_size", "micro_batch_sizes"):
        if key not in keys:
            raise ElasticityConfigError(f"elasticity.{key}: missing; set it")
    try:
        block = load_config({KEY: {**keys, "enabled": False}}).elasticity
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None
    return block or Elasticity()


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Compare the block with the one that the cluster's scheduler was given, in DEEPSPEED_ELASTICITY_CONFIG.

    Raises ElasticityConfigError: they differ, so the numbers of ranks that the scheduler gives would not fit.
    """
    text = os.environ.get(SCHEDULER_VARIABLE)
    if text is None:
        return
    block = _block(runtime_elastic_config_dict)
    scheduled = _block(parse_json(text, SCHEDULER_VARIABLE))
    for key in ("max_train_batch_size", "micro_batch_sizes", "version"):
        value, expected = getattr(block, key), getattr(scheduled, key)
        if value != expected:
            raise ElasticityConfigError(
                f"elasticity.{key}: expected {expected}, as in {SCHEDULER_VARIABLE}, got {value}; use the "
                "configuration that was given to the scheduler"
            )
