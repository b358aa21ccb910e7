"""`deepspeed.initialize`: ours, with the habits that DeepSpeed's clients count on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

import zero
from zero.compat.lent_names import lend_names
from zero.compat.logs import logger
from zero.compat.operators import VERSION
from zero.config import reading_as_deepspeed
from zero.params.released import save_released_as_empty
from zero.ranks import world
from zero.ranks.joining import init_distributed

SIGNATURE = inspect.signature(zero.initialize)


@functools.wraps(zero.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`zero.initialize`, after the ranks have met, one or many, and with the defaults of DeepSpeed.

    Top-level keys that nobody knows are a warning.

    Raises:
        ConfigError: every problem of the configuration at once.
        BudgetError: the plan does not fit; nothing was allocated.
        StateError: `dist_init_required` is False and there is no process group: each rank would train alone.
    """
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if not dist.is_initialized():
        init_distributed(distributed_port=given["distributed_port"], dist_init_required=given["dist_init_required"])
    say_who_answers()
    for name in ("config", "config_params"):
        given[name] = _without_idle_states(given[name], given["optimizer"])
    with reading_as_deepspeed():
        engine, optimizer, loader, scheduler = zero.initialize(**given)
    save_released_as_empty()
    lend_names(engine, given["optimizer"])
    return engine, optimizer, loader, scheduler


def _without_idle_states(config: Any, optimizer: Any) -> Any:
    """A dict without what acts on states alone, if it names no optimizer and none was passed; else what was given.

    Clients edit their trainer's configuration for a model that only looks: an optimizer of type None, or stage 0 with
    an offload_optimizer left in (TRL to 1.8). DeepSpeed makes no states of either; stage 0 would be refused here.
    """
    if optimizer is not None or not isinstance(config, Mapping):
        return config
    named = config.get("optimizer")
    if named is not None and (not isinstance(named, Mapping) or named.get("type", "") is not None):
        return config
    kept = {key: value for key, value in config.items() if key != "optimizer"}
    block = kept.get("zero_optimization")
    if isinstance(block, Mapping) and block.get("stage") == 0:
        kept["zero_optimization"] = {key: value for key, value in block.items() if key != "offload_optimizer"}
    return kept


def say_who_answers() -> None:
    """The line that DeepSpeed logs, on the first rank, and who it is really."""
    if world.rank() == 0:
        told = f"DeepSpeed info: version={VERSION}, git-hash=none, git-branch=none"
        logger.info("%s (this is zero-infinity %s under the name of DeepSpeed)", told, zero.__version__)
