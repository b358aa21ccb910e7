"""The micro-batches of one batch: reading them, taking the loss of a model's output, running them side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from offload.errors import ConfigError, StateError
from zero.cache.micro_batch_scheduler import MicroBatchScheduler

LossOf = Callable[[Any], torch.Tensor]


def next_batch(data_iter: Iterator[Any], count: int) -> list[Any]:
    """The next `count` micro-batches. Raises StateError: there are fewer; ConfigError: `data_iter` is no iterator."""
    if not hasattr(data_iter, "__next__"):
        raise ConfigError(
            f"data_iter: expected an iterator, got {type(data_iter).__name__}, which would begin anew in each call; "
            "make one before the loop: data_iter = iter(zero.RepeatingLoader(loader))"
        )
    batches = list(itertools.islice(data_iter, count))
    if len(batches) < count:
        raise StateError(
            f"data_iter ended after {len(batches)} of {count} micro-batches; give it whole batches, or restart it at "
            "its end with zero.RepeatingLoader"
        )
    return batches


def loss_by_call(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    """Call the model and return its loss. Items of a dict are passed by name, items of a tuple or list in order.

    Raises ConfigError: the output is no loss and has no `loss`.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(output).__name__
        raise ConfigError(
            "train_batch: expected the model to return a scalar loss, or an output with the attribute loss, got "
            f"{got}; pass loss_of"
        )
    return loss


def run_interleaved(
    scheduler: MicroBatchScheduler,
    forwards: Sequence[Callable[[], torch.Tensor]],
    backward: Callable[[torch.Tensor], None],
    backward_context: AbstractContextManager[None],
) -> list[torch.Tensor]:
    """Forward and backward of several micro-batches, which take turns at each unit.

    Args:
        scheduler: the engine's turns.
        forwards: each runs one micro-batch and returns its loss.
        backward: runs backward from a loss.
        backward_context: context around all backwards; entered before the first.

    Returns:
        The losses, detached.
    """
    with ExitStack() as begun:
        contexts = iter([backward_context])

        def work(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
            loss = forward()
            for context in contexts:  # has an item for the first backward only
                begun.enter_context(context)
            backward(loss)
            return loss.detach()

        return scheduler.run([partial(work, forward) for forward in forwards])
