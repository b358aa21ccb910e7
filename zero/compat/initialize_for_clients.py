"""`deepspeed.initialize`: ours, with the behaviour and the attributes of the engine that DeepSpeed's clients need."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

import zero
from offload.accelerator import compute_device
from offload.errors import ConfigError
from zero.assembly.log import NOTICE
from zero.assembly.run_state import random_state, restore_random_state
from zero.compat.engine_names import add_deepspeed_names
from zero.compat.logs import logger
from zero.compat.operators import VERSION
from zero.config import reading_as_deepspeed
from zero.dist import world
from zero.dist.initialization import init_distributed
from zero.engine.engine import ZeroEngine
from zero.optim.optimizer import ZeroOptimizer
from zero.params.released_parameter import save_released_as_empty

SIGNATURE = inspect.signature(zero.initialize)


@functools.wraps(zero.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`zero.initialize` with the defaults of DeepSpeed; it initialises torch.distributed first if needed.

    Unknown top-level keys only cause a warning. Raises ConfigError: names all problems of the configuration at once.
    Raises BudgetError: the plan does not fit; nothing was allocated. Raises StateError: `dist_init_required` is False
    and there is no process group: each rank would train alone.
    """
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    if not dist.is_initialized():
        init_distributed(
            distributed_port=arguments["distributed_port"], dist_init_required=arguments["dist_init_required"]
        )
    set_local_rank(arguments["args"])
    log_version()
    for name in ("config", "config_params"):
        arguments[name] = _drop_idle_states(arguments[name], arguments["optimizer"])
    with reading_as_deepspeed():
        engine, optimizer, loader, scheduler = zero.initialize(**arguments)
    save_released_as_empty()
    adapt_trainer()
    add_deepspeed_names(engine, arguments)
    return engine, optimizer, loader, scheduler


def _drop_idle_states(config: Any, optimizer: Any) -> Any:
    """The config without settings for optimizer states, if it names no optimizer and none was passed; else unchanged.

    Clients edit their trainer's configuration for a model that is not trained: they set an optimizer of type None, or
    stage 0 but leave offload_optimizer in (TRL to 1.8). DeepSpeed makes no states then; stage 0 would be refused here.
    """
    if optimizer is not None or not isinstance(config, Mapping):
        return config
    named = config.get("optimizer")
    if named is not None and (not isinstance(named, Mapping) or named.get("type", "") is not None):
        return config
    changed = {key: value for key, value in config.items() if key != "optimizer"}
    block = changed.get("zero_optimization")
    if isinstance(block, Mapping) and block.get("stage") == 0:
        changed["zero_optimization"] = {key: value for key, value in block.items() if key != "offload_optimizer"}
    return changed


def log_version() -> None:
    """Log DeepSpeed's line on the first rank, with a note that this is zero-infinity."""
    if world.rank() == 0:
        version_line = f"DeepSpeed info: version={VERSION}, git-hash=none, git-branch=none"
        logger.info("%s (this is zero-infinity %s, imported under the name deepspeed)", version_line, zero.__version__)


def set_local_rank(args: Any) -> None:
    """Set `args.local_rank` as the environment says, if the script has that argument: launchers may not pass it.

    Raises ConfigError: the script was started with another number.
    """
    if not hasattr(args, "local_rank") or "LOCAL_RANK" not in os.environ:
        return
    argument, local_rank = args.local_rank, world.local_rank()
    if isinstance(argument, int) and argument >= 0 and argument != local_rank:
        raise ConfigError(
            f"initialize: args.local_rank: expected LOCAL_RANK of the environment, {local_rank}, got {argument}"
        )
    args.local_rank = local_rank


class _ChecksAttribute(type):
    """Metaclass: `isinstance` checks for an attribute, not for a base class."""

    attribute: str

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ZeroOptimizer) and hasattr(instance, cls.attribute)


class DeepSpeedZeroOptimizer(metaclass=_ChecksAttribute):
    """The optimizer of stages 1 and 2: it has the shards of the fp32 masters as an attribute."""

    attribute = "single_partition_of_fp32_groups"


class DeepSpeedZeroOptimizer_Stage3(metaclass=_ChecksAttribute):
    """The optimizer of stage 3: it has the shards of the fp32 masters as an attribute."""

    attribute = "fp32_partitioned_groups_flat"


# ---- transformers' Trainer goes on after calls that end or rewind a run -----------------------


def adapt_trainer() -> None:
    """Wrap the methods of transformers' Trainer, if it has been imported. Idempotent."""
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is not None and not hasattr(trainer._wrap_model, "__wrapped__"):
        trainer._wrap_model = _wrap_again(trainer._wrap_model)
        trainer._load_best_model = _load_and_go_on(trainer._load_best_model)


def _wrap_again(wrap_model: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer._wrap_model`, which wraps the model again if its engine was destroyed.

    `train()` begins with accelerate's `free_memory()`, which destroys the engine of an evaluation or training before.
    But the Trainer keeps it, and wraps nothing that is wrapped; with DeepSpeed a second training fails.
    """

    @functools.wraps(wrap_model)
    def wrap(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, ZeroEngine) and model.run.closed:
            logging.getLogger("zero").log(
                NOTICE,
                "the Trainer's engine was destroyed by accelerator.free_memory(): the model gets a new engine, which "
                "goes on from its present weights, with fresh optimizer states",
            )
            model = self.model_wrapped = self.model
        return wrap_model(self, model, *args, **kwargs)

    return wrap


def _load_and_go_on(load_best_model: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer._load_best_model`, which keeps the random state: our checkpoints have it, but the run goes on."""

    @functools.wraps(load_best_model)
    def load(self: Any) -> None:
        state = random_state(compute_device())
        load_best_model(self)
        restore_random_state(state, compute_device())

    return load
