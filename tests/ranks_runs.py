"""One cell of the matrix of rank tests: the training, the placement of its bytes, and the comparison of its outcome.

All functions here run inside the ranks of a pool.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from models import ADAMW, make_config, trainability
from ranks_model import LIVE_NUMEL, SAMPLES, Batch, batch, motley
from ranks_plain import Ddp, Opposite, Outcome
from reference import snapshot
from torch import nn

STEPS, COUNT = 20, 3
"""Steps of a run; number of micro-batches that `micro_batches` gives for a step."""
CLIPPING = 0.3
HYPER: dict[str, Any] = {**ADAMW, "betas": (0.9, 0.95), "eps": 1e-3}
"""With torch's eps, an element whose gradients nearly cancel takes a full step in either direction, and the distance of
two runs means nothing. With this eps, a small error of a gradient stays small, and a wrong factor is visible."""


@dataclass(frozen=True, order=True)
class Run:
    """The training, without the placement of its bytes."""

    ranks: int = 2
    accumulation: int = 1
    clipping: float = 0.0
    backwards: int = 1
    """Forward and backward passes before each call of step()."""
    bf16: bool = False
    steps: int = STEPS
    agreed: bool = False
    """All ranks call the same modules."""

    @property
    def name(self) -> str:
        words = [
            f"{self.ranks} rank{'s' * (self.ranks > 1)}",
            f"accumulation {self.accumulation}",
            f"{self.backwards} backward{'s' * (self.backwards > 1)}",
        ]
        words += ["clipped"] * bool(self.clipping) + ["bf16"] * self.bf16 + ["agreed"] * self.agreed
        return ", ".join(words)


@dataclass(frozen=True, order=True)
class Place:
    """The stage and the placement of bytes."""

    stage: int = 3
    params: str = "none"
    states: str = "none"
    shared: bool = True
    """Ranks of one machine may share host memory."""
    cached: float | None = None
    """Host budget: the minimal working set plus this share of the bytes that are then on NVMe. None: no budget."""
    more: tuple[tuple[str, Any], ...] = field(default=())
    """Further keys of `zero_optimization`."""

    @property
    def name(self) -> str:
        words = [f"stage {self.stage}, parameters {self.params}, states {self.states}"]
        words += ["not shared"] * (not self.shared) + [f"cached {self.cached}"] * (self.cached is not None)
        return ", ".join(words + [f"{key} {value}" for key, value in self.more])

    def config(self, run: Run, nvme_path: str, host_bytes: int | None = None) -> dict[str, Any]:
        zero = {"stage": self.stage, "stage3_max_live_parameters": LIVE_NUMEL, **dict(self.more)}
        if not self.shared:
            zero["shared_host_memory"] = False
        budget = {} if host_bytes is None else {"memory_budget": {"host": host_bytes}}
        config = make_config(
            (self.params, self.states),
            nvme_path,
            accumulation=run.accumulation,
            clipping=run.clipping,
            bf16=run.bf16,
            zero=zero,
            optimizer={"type": "AdamW", "params": {**HYPER, "betas": list(HYPER["betas"])}},
            train_micro_batch_size_per_gpu=SAMPLES,
            **budget,
        )
        for block in ("offload_param", "offload_optimizer"):
            if config["zero_optimization"][block]["device"] == "none":
                del config["zero_optimization"][block]
        return config


def train(trainer: Any, run: Run) -> list[float]:
    """The common training loop: `trainer` is an engine or plain torch. Returns the norm of every step."""
    index, norms, rank = 0, [], dist.get_rank()
    for _ in range(run.steps):
        for _ in range(run.accumulation):
            for _ in range(run.backwards):
                trainer.backward(trainer(batch(index, rank, agreed=run.agreed)))
                index += 1
            trainer.step()
        norms.append(trainer.norms[-1] if hasattr(trainer, "norms") else trainer.get_global_grad_norm())
    return norms


def trained(run: Run, place: Place, nvme_path: str) -> tuple[str, Outcome | None]:
    """Train with the engine. Returns a digest of the outcome on each rank, and on rank 0 also the outcome itself."""
    import zero

    quiet()
    model = motley()
    names = trainability(model)
    with zero.initialize(model=model, config=engine_config(run, place, nvme_path))[0] as engine:
        held = outcome_of(engine, names, train(engine, run))
        statistics = engine.statistics()
    if place.stage == 3 and not statistics.gathered_bytes:
        raise AssertionError("no weights were fetched: the run proves nothing")
    if "nvme" in (place.params, place.states) and (place.cached or 0) < 1 and not statistics.nvme_read_bytes:
        raise AssertionError("nothing was read from NVMe: the run proves nothing")
    return digest(held), held if dist.get_rank() == 0 else None


def outcome_of(engine: Any, names: tuple[tuple[str, bool], ...], norms: list[float]) -> Outcome:
    """The engine's values; `names`: from `trainability`, before the engine took the model."""
    return Outcome(snapshot(engine, names), norms)


def opened(place: Place, nvme_path: str, model: nn.Module | None = None, **run: Any) -> Any:
    """An engine on this rank, for the model (None: `motley()`) and a `Run` with these fields."""
    import zero

    quiet()
    return zero.initialize(
        model=motley() if model is None else model, config=engine_config(Run(**run), place, nvme_path)
    )[0]


def on_batch(trainer: Any, index: int) -> torch.Tensor:
    """The loss of this rank's batch, for which all ranks call the same modules."""
    loss: torch.Tensor = trainer(batch(index, dist.get_rank(), agreed=True))
    return loss


def micro_batches(step: int, *, agreed: bool) -> list[Batch]:
    """The micro-batches of one batch of this rank; all call the same modules; `agreed`: the same on all ranks."""
    rank = dist.get_rank()
    parts = [batch(index, rank) for index in range(step * COUNT, (step + 1) * COUNT)]
    return [Batch(part.tokens, (step if agreed else rank) % 2) for part in parts]


def engine_config(run: Run, place: Place, nvme_path: str) -> dict[str, Any]:
    """The config for `zero.initialize`."""
    return place.config(run, nvme_path, host_bytes(run, place, nvme_path))


def host_bytes(run: Run, place: Place, nvme_path: str) -> int | None:
    """The host budget for the place's `cached`."""
    import zero

    if place.cached is None:
        return None
    with zero.initialize(model=motley(), config=place.config(run, nvme_path))[0] as engine:
        least = sum(row.nbytes for row in engine.plan.rows if row.tier == "host")
        return int(least + place.cached * sum(row.nbytes for row in engine.plan.rows if row.tier == "nvme"))


def plain(run: Run) -> tuple[Outcome, Outcome] | None:
    """On rank 0: the outcomes of `Ddp` and of `Opposite`."""
    held = []
    for kind in (Ddp, Opposite):
        trainer = kind(motley(), HYPER, run.accumulation, run.clipping)
        train(trainer, run)
        held.append(trainer.outcome())
    return (held[0], held[1]) if dist.get_rank() == 0 else None


def digest(outcome: Outcome) -> str:
    """Equal for outcomes that are equal bit for bit."""
    total = hashlib.sha256(repr(outcome.norms).encode())
    for key, tensor in sorted(outcome.tensors.items()):
        total.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def quiet() -> None:
    """Do not log the plans of hundreds of engines."""
    logging.getLogger("zero").setLevel(logging.WARNING)


def by_either(
    model: nn.Module, place: Place | None, kind: type | None, nvme_path: str, inputs: Callable[[int], tuple[Any, ...]]
) -> Outcome:
    """Eight steps with the engine, or with plain torch if there is no place. `inputs`: step -> the model's inputs."""
    import zero

    quiet()
    names = trainability(model)
    config = None if place is None else engine_config(Run(), place, nvme_path)
    trainer = kind(model, HYPER) if kind else zero.initialize(model=model, config=config)[0]
    norms = []
    for step in range(8):
        trainer.backward(trainer(*inputs(step)))
        trainer.step()
        norms.append(trainer.norms[-1] if kind else trainer.get_global_grad_norm())
    if kind:
        outcome: Outcome = trainer.outcome()
        return outcome
    with trainer:
        return outcome_of(trainer, names, norms)
