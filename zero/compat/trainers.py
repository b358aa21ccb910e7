"""transformers' Trainer goes on after calls that end or rewind a run: its methods that do not expect it are wrapped."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from offload.accelerator import compute_device
from zero.engine.engine import ZeroEngine
from zero.reports.log import NOTICE
from zero.snapshots.run_state import random_state, restore_random_state

logger = logging.getLogger("zero")


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
            logger.log(
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
