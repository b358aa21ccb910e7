"""One training loop, one reference, one comparison: most tests compare an engine with these.

`trainer` is an engine or the reference; both have the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache, lru_cache
from typing import Any

import torch
from models import ADAMW, build, tokens, trainability
from probe import units_read_once
from reference import Hyper, Reference, differences, snapshot
from torch import Tensor, nn

HYPER = Hyper(ADAMW["lr"], (0.9, 0.95), 1e-8, 0.1)  # type: ignore[arg-type]
"""ADAMW, in the form that the reference takes."""


def micro_batch(trainer: Any, index: int, loss_of: Callable[[Any, int], Tensor] | None = None) -> Tensor:
    """Train on one micro-batch: `tokens(index)`, or that of `loss_of(trainer, index)`. Returns its loss."""
    loss = trainer(tokens(index)) if loss_of is None else loss_of(trainer, index)
    trainer.backward(loss)
    told = loss.detach()
    del loss  # so that no graph exists during the step
    trainer.step()
    return told


def train(trainer: Any, *indices: int, loss_of: Callable[[Any, int], Tensor] | None = None) -> Any:
    """Train on these micro-batches; returns the trainer."""
    for index in indices:
        micro_batch(trainer, index, loss_of)
    return trainer


def losses_of(trainer: Any, *indices: int, loss_of: Callable[[Any, int], Tensor] | None = None) -> list[float]:
    """Like `train`; returns the losses."""
    return [micro_batch(trainer, index, loss_of).item() for index in indices]


def reference_of(model: str | nn.Module = "gpt", **more: Any) -> Reference:
    """The reference with ADAMW; `more`: its other fields."""
    return Reference(build(model) if isinstance(model, str) else model, lambda name: HYPER, **more)


def reference_run(*indices: int, model: str = "gpt", **more: Any) -> Reference:
    """`train(reference_of(model, **more), *indices)`; each such run is computed only once in a process.

    `more` must be numbers: with a stateful object, such as a loss scale, runs could not be shared.
    """
    held = deepcopy(_run(indices, model, tuple(sorted(more.items()))))
    reference = reference_of(model, **more)
    for name, parameter in reference.model.named_parameters():
        parameter.data = held["weights"][name]
    for name, buffer in reference.model.named_buffers():
        buffer.copy_(held["buffers"][name])
    vars(reference).update(held["fields"])
    return reference


@lru_cache(maxsize=64)
def _run(indices: tuple[int, ...], model: str, more: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The values that training changes in a reference; a longer run continues a shorter one."""
    trained = reference_run(*indices[:-1], model=model, **dict(more)) if indices else reference_of(model, **dict(more))
    train(trained, *indices[-1:])
    return {
        "weights": {name: parameter.detach() for name, parameter in trained.model.named_parameters()},
        "buffers": dict(trained.model.named_buffers()),
        "fields": {name: vars(trained)[name] for name in ("states", "grads", "norms", "coefficients", "micro_steps")},
    }


@cache
def names_of(model: str) -> tuple[tuple[str, bool], ...]:
    """(name, trainable) of every parameter."""
    return trainability(build(model))


def values(trainer: Any, model: str = "gpt") -> dict[str, Tensor]:
    """Weights, masters, moments and step counts."""
    return snapshot(trainer, names_of(model))


def unequal(ours: Any, theirs: Any, model: str = "gpt") -> list[str]:
    """The values in which two trainers of the model differ, bit for bit."""
    return differences(values(ours, model), values(theirs, model))


def masters(engine: Any, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The masters of every parameter, or of these."""
    wanted = [name for name, _ in engine.module.named_parameters()] if names is None else names
    with units_read_once(engine):
        return {name: engine.full_master(name) for name in wanted}


def same_bits(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))
