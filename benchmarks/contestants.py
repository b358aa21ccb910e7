"""Who trains in the training questions, and with what JSON: each run is a process of its own."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common import COMPUTE_WALL_MAX, Candidate, Round, Rule, run_child
from benchmarks.rivals.deepspeed_setup import BEST_SETTINGS, SUB_GROUP_SIZES
from benchmarks.shapes import SHAPES, Shape

OURS, RIVAL = "benchmarks.train_worker", "benchmarks.rivals.deepspeed_training"
RIVAL_BUFFER_NUMEL = 100_000_000
"""DeepSpeed's default `buffer_size` of offload_param."""

RIVAL_SUB_GROUP_NUMEL = 1_000_000_000
"""Its default `sub_group_size`."""

OF_ZERO = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
"""Of its settings, those that stand beside `offload_optimizer`; all of them small: its leanest."""


def training_config(
    tier: str, path: Path | str, shape: Shape, *, bf16: bool = True, micro_batches: int = 1
) -> dict[str, Any]:
    """The JSON that both engines get: weights and optimizer states on `tier`, AdamW, clipping."""
    offload = {"device": tier, **({"nvme_path": str(path)} if tier == "nvme" else {})}
    return {
        "train_micro_batch_size_per_gpu": shape.batch,
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": bf16},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": dict(offload),
            "offload_optimizer": dict(offload),
            "stage3_param_persistence_threshold": 0,
        },
    }


def our_config(
    tier: str,
    path: Path | str,
    shape: Shape,
    budget: Mapping[str, Any] | None = None,
    optimizer: str = "AdamW",
    **trained: Any,
) -> dict[str, Any]:
    """Ours: lean unless a `memory_budget` is given; another optimizer has AdamW's parameters.

    `trained`: as of `training_config`.
    """
    config = training_config(tier, path, shape, **trained)
    config["optimizer"]["type"] = optimizer
    return config if budget is None else {**config, "memory_budget": dict(budget)}


def rival_config(
    tier: str, path: Path | str, shape: Shape, settings: Mapping[str, Any], **trained: Any
) -> dict[str, Any]:
    """DeepSpeed's; `settings` are some of `rival_settings`, and `buffer_size` [elements] of its parameter buffers.

    `trained`: as of `training_config`.
    """
    config = training_config(tier, path, shape, **trained)
    zero = config["zero_optimization"]
    if tier == "nvme":
        # It fetches parameter by parameter, so the largest one must fit a buffer.
        largest_numel = max(4 * shape.width**2, shape.vocabulary * shape.width)
        zero["offload_param"]["buffer_size"] = max(settings.get("buffer_size", RIVAL_BUFFER_NUMEL), largest_numel)
    for name, value in settings.items():
        if name != "buffer_size":
            (zero if name in OF_ZERO else zero["offload_optimizer"])[name] = value
    return config


def rival_settings(tier: str) -> dict[str, dict[str, Any]]:
    """What DeepSpeed is tried with, by name. Only its NVMe path can be pipelined."""
    best = {name: dict(settings) for name, settings in BEST_SETTINGS.items() if tier == "nvme" or not settings}
    sizes = [numel for numel in SUB_GROUP_SIZES if numel != RIVAL_SUB_GROUP_NUMEL]  # that one is "default"
    settings_by_name = {**best, **{f"sub_group_size {numel:,}": {"sub_group_size": numel} for numel in sizes}}
    return (
        {**settings_by_name, "leanest": {name: min(SUB_GROUP_SIZES) for name in OF_ZERO}}
        if tier == "nvme"
        else settings_by_name
    )


def add_arguments(parsed: argparse.ArgumentParser, *, shape: str = "336M", warmup: int = 3, steps: int = 4) -> None:
    """The arguments that the training questions share."""
    parsed.add_argument("--shape", choices=list(SHAPES), default=shape)
    parsed.add_argument("--warmup", type=int, default=warmup, help=f"steps discarded in each process ({warmup})")
    parsed.add_argument("--steps", type=int, default=steps, help=f"steps timed in each process ({steps})")
    parsed.add_argument("--lock", default=None, metavar="FILE", help="held during each run: measurements take turns")


class Bench:
    """Makes the candidates of one question from its arguments.

    Attributes:
        inside: what a child process is started with, to run in a control group say.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.shape = SHAPES[options.shape]
        self.path = Path(options.path).resolve()
        self.counts = {"warmup": options.warmup, "steps": options.steps}
        self.inside: tuple[str, ...] = ()
        self._lock: tuple[str, ...] = () if options.lock is None else ("flock", options.lock)
        self._bf16 = getattr(options, "dtype", "bf16") == "bf16"
        self._trained = {"bf16": self._bf16, "micro_batches": getattr(options, "micro_batches", 1)}

    def ours(
        self,
        tier: str,
        budget: Mapping[str, Any] | None = None,
        shape: Shape | None = None,
        optimizer: str = "AdamW",
        *,
        vertical: bool = False,
    ) -> Candidate:
        """This project's engine."""
        shape = shape or self.shape
        config = our_config(tier, self.path, shape, budget, optimizer, **self._trained)
        config |= {"vertical_accumulation": True} if vertical else {}
        return lambda: self._run(OURS, shape, contestant="ours", config=config, path=str(self.path))

    def rival(self, tier: str, settings: Mapping[str, Any], shape: Shape | None = None) -> Candidate:
        """DeepSpeed. Its files stay where they are when it ends, so they get a folder of their own."""
        shape = shape or self.shape

        def run() -> dict[str, Any]:
            with tempfile.TemporaryDirectory(prefix="rival-", dir=self.path) as folder:
                config = rival_config(tier, folder, shape, settings, **self._trained)
                return self._run(RIVAL, shape, config=config, path=str(self.path))

        return run

    def compute_floor(self, shape: Shape | None = None) -> Candidate:
        """Forward and backward in plain torch."""
        return lambda: self._run(OURS, shape or self.shape, contestant="plain", bf16=self._bf16)

    def resident(self) -> Candidate:
        """A whole step in plain torch, all of it in memory."""
        return lambda: self._run(OURS, self.shape, contestant="resident", bf16=self._bf16)

    def disk_floor(self, read_bytes: float, write_bytes: float) -> Candidate:
        """The bytes of a step, read alone and then written alone."""
        sizes = {"read_bytes": round(read_bytes), "write_bytes": round(write_bytes)}
        return lambda: self._run(OURS, self.shape, contestant="disk", path=str(self.path), **sizes)

    def newton_schulz(self) -> Candidate:
        """The orthogonalizations of a step with Muon, and nothing else."""
        return lambda: self._run(OURS, self.shape, contestant="newton_schulz")

    def activations(self, shape: Shape) -> Candidate:
        """Memory that a step of plain torch takes beside weights and gradients."""
        return lambda: self._run(OURS, shape, contestant="activations")

    def _run(self, module: str, shape: Shape, **spec: Any) -> dict[str, Any]:
        spec = {**spec, **self.counts, "shape": asdict(shape)}
        figures = run_child(["-m", module, json.dumps(spec)], prefix=(*self._lock, *self.inside))
        figures.pop("event", None)
        return figures


def floor_contended(name: str, threads: int = 2) -> Rule:
    """`common.compute_contended` asked of the timed steps alone: starting a process runs on one thread."""

    def rule(this: Round, tried: Sequence[Round]) -> str | None:
        run = this[name]
        cpu_seconds = run.figures["cpu_seconds_per_step"]
        if run.seconds * threads <= COMPUTE_WALL_MAX * cpu_seconds:
            return None
        return f"{name}: {run.seconds:.3f} s a step for {cpu_seconds:.3f} CPU seconds on {threads} threads"

    return rule


def longer(shape: Shape, tokens: int) -> Shape:
    """The same model with that many tokens in a step."""
    return replace(shape, sequence=tokens // shape.batch)
