"""Finds the learning-rate scheduler that an engine steps: the one passed by the user, else the configuration's."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.errors import ConfigError
from zero.config import Config
from zero.config.scheduler_block import constructor_parameters

logger = logging.getLogger("zero")


def scheduler_for(scheduler: Any, optimizer: torch.optim.Optimizer | None, config: Config) -> Any:
    """The scheduler that the engine steps once after each optimizer step; None: there is none, or no optimizer.

    As in DeepSpeed, a scheduler that the user passes has priority over the configuration's.

    Raises ConfigError: the object cannot be stepped, its class does not accept the values, or a callable was passed
    without an optimizer.

    Args:
        scheduler: argument of `initialize`: an object with `step()`, a callable that makes one from the optimizer, or
            None.
        optimizer: the engine's. It has the param groups of an optimizer that the user passed.
        config: its `scheduler` block is the other source.
    """
    block = config.scheduler
    configured = block is not None and block.type is not None
    if scheduler is not None and configured:
        logger.info(
            "scheduler: the lr_scheduler that was passed to initialize is used instead of the one in the config"
        )
    if scheduler is not None and not _is_factory(scheduler):
        return _check_same_optimizer(check_scheduler(scheduler), optimizer)
    if scheduler is not None and optimizer is None:
        raise ConfigError("lr_scheduler: expected an optimizer too, got none; add one to the config or pass one")
    if scheduler is not None:
        schedule = check_scheduler(scheduler(optimizer))
        if not hasattr(schedule, "step"):
            raise ConfigError(f"lr_scheduler: expected a callable that returns an object with step(), got {schedule!r}")
        return schedule
    return None if optimizer is None or not configured else _from_config(optimizer, config)


def _check_same_optimizer(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return `scheduler`; raises ConfigError if it changes rates of another optimizer only."""
    own_optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is not None and isinstance(own_optimizer, torch.optim.Optimizer):
        group_ids = {id(group) for group in optimizer.param_groups}
        if group_ids.isdisjoint(map(id, own_optimizer.param_groups)):
            raise ConfigError(
                f"lr_scheduler: expected a schedule of the optimizer that is used, got a {type(scheduler).__name__} of "
                f"another {type(own_optimizer).__name__}, so it would not change this optimizer's learning rates; pass "
                "that optimizer too, or a callable that makes the schedule: lambda optimizer: ..."
            )
    return scheduler


def _is_factory(scheduler: Any) -> bool:
    return isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step"))


def check_scheduler(scheduler: Any) -> Any:
    """Return `scheduler` if the engine can step it, or if it is a callable that will make one, or None.

    Raises ConfigError: it is none of these.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "lr_scheduler: ReduceLROnPlateau needs a metric at each step; make it yourself over the optimizer that "
            "initialize returns, and call its step(metric)"
        )
    if scheduler is not None and not _is_factory(scheduler) and not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            "lr_scheduler: expected an object with step(), or a callable that gets the optimizer and returns one, got "
            f"{type(scheduler).__name__}"
        )
    return scheduler


def _from_config(optimizer: torch.optim.Optimizer, config: Config) -> Any:
    block = config.scheduler
    if block is None or block.kind is None:
        raise ConfigError(f"scheduler: there is no class named {block and block.type!r}")
    arguments = block.params.user_options
    if config.origin("scheduler.params.warmup_max_lr") == "auto":
        arguments.setdefault("warmup_max_lr", None)
    if lacking := [
        key for key, needed in constructor_parameters(block.kind).items() if needed and key not in arguments
    ]:
        keys = " and ".join(f"scheduler.params.{key}" for key in lacking)
        raise ConfigError(
            f'{keys}: {block.kind.__name__} needs a value, got {arguments}; give one (total_num_steps "auto" is one '
            "pass over the training_data of initialize)"
        )
    try:
        return block.kind(optimizer, **arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"scheduler: {block.kind.__name__} cannot be made from {arguments}: {error}") from error


def step_scheduler(scheduler: Any, arguments: Mapping[str, Any], samples: int) -> None:
    """One step of the scheduler, after an optimizer step.

    Args:
        scheduler: with `step`.
        arguments: the user's arguments of its step.
        samples: number of samples of an optimizer step; for a scheduler that counts them (Megatron's), as in DeepSpeed.
    """
    # The scheduler may belong to the optimizer that the user passed: torch would warn that this was never stepped.
    own_optimizer = getattr(scheduler, "optimizer", None)
    if isinstance(own_optimizer, torch.optim.Optimizer):
        own_optimizer._opt_called = True  # type: ignore[attr-defined]
    if not arguments and _needs_argument(scheduler.step):
        scheduler.step(samples)
    else:
        scheduler.step(**arguments)


def _needs_argument(step: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is inspect.Parameter.empty and p.kind in positional for p in parameters)
