"""`deepspeed.initialize`: ours, with the habits that DeepSpeed's clients count on."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist

import zero
from zero import ranks
from zero.compat.lent_names import lend_names
from zero.compat.logs import logger
from zero.compat.version import VERSION
from zero.config import tolerating_unknown_keys
from zero.distributed.joining import init_distributed
from zero.params.released import save_released_as_empty

SIGNATURE = inspect.signature(zero.initialize)


@functools.wraps(zero.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`zero.initialize`, after the ranks have met, one or many; top-level keys that nobody knows are a warning.

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
    with tolerating_unknown_keys():
        engine, optimizer, loader, scheduler = zero.initialize(**given)
    save_released_as_empty()
    lend_names(engine, given["optimizer"])
    say_if_nothing_is_clipped(engine)
    return engine, optimizer, loader, scheduler


def say_if_nothing_is_clipped(engine: Any) -> None:
    """DeepSpeed's own default has changed, and a run that was made with one does not equal a run with the other."""
    absent = "gradient_clipping" not in engine.config
    if absent and engine.updater is not None and ranks.rank() == 0:
        logger.warning(
            "gradient_clipping is not in the configuration, so gradients are not clipped; DeepSpeed 0.19.8 would clip "
            "them to a norm of 1.0 (give it to have that), earlier ones would not"
        )


def say_who_answers() -> None:
    """The line that DeepSpeed logs, on the first rank, and who it is really."""
    if ranks.rank() == 0:
        told = f"DeepSpeed info: version={VERSION}, git-hash=none, git-branch=none"
        logger.info("%s (this is zero-infinity %s under the name of DeepSpeed)", told, zero.__version__)
