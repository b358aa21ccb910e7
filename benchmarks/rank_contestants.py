"""Who trains in the multi-rank questions, with what JSON, and how the ranks are started."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Candidate, run_child
from benchmarks.contestants import RIVAL_BUFFER_NUMEL
from benchmarks.shapes import SHAPES, Shape

OURS, RIVAL = "benchmarks.ranks_worker", "benchmarks.rivals.deepspeed_ranks"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""A thread a rank, and gloo over loopback, for everybody."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A ZeRO stage, and where what can be offloaded at that stage goes: "none", "cpu" or "nvme"."""

    stage: int
    tier: str = "none"

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.tier}"


CELLS = {str(cell): cell for cell in (Cell(1), Cell(2), Cell(3), Cell(3, "cpu"), Cell(3, "nvme"))}


def ranks_config(cell: Cell, path: Path | str, shape: Shape) -> dict[str, Any]:
    """The JSON that both engines get: bf16 with an fp32 master, AdamW, clipping; all else at its default."""
    zero: dict[str, Any] = {"stage": cell.stage}
    if cell.tier != "none":
        offload = {"device": cell.tier, **({"nvme_path": str(path)} if cell.tier == "nvme" else {})}
        zero |= {
            block: dict(offload) for block in ("offload_optimizer", "offload_param")[: 2 if cell.stage == 3 else 1]
        }
    return {
        "train_micro_batch_size_per_gpu": shape.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": zero,
    }


def rival_ranks_config(cell: Cell, path: Path | str, shape: Shape, settings: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's.

    Args:
        cell: stage and tier.
        path: folder for its files.
        shape: of the model.
        settings: some of `rival_rank_settings`. `torch_adam` belongs to the optimizer, `pipeline_*` and
            `buffer_count` to offload_optimizer, all else to zero_optimization.
    """
    config = ranks_config(cell, path, shape)
    zero = config["zero_optimization"]
    if cell.tier == "nvme":
        # It fetches parameter by parameter, so the largest one must fit a buffer.
        largest_numel = max(4 * shape.width**2, shape.vocabulary * shape.width)
        zero["offload_param"]["buffer_size"] = max(RIVAL_BUFFER_NUMEL, largest_numel)
    for name, value in settings.items():
        if name == "torch_adam":
            config["optimizer"]["params"][name] = value
        elif name in ("pipeline_read", "pipeline_write", "buffer_count"):
            zero["offload_optimizer"][name] = value
        else:
            zero[name] = value
    return config


def rival_rank_settings(cell: Cell) -> dict[str, dict[str, Any]]:
    """What DeepSpeed is tried with, by name; "default" has none."""
    small = {"reduce_bucket_size": 20_000_000}
    if cell.stage < 3:
        small["allgather_bucket_size"] = 20_000_000
        overlap = {"overlap_comm": True}
    else:
        overlap = {"overlap_comm": False}  # there it is on by default
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        f"overlap_comm {overlap['overlap_comm']}": overlap,
        "buckets of 20 M": small,
        f"buckets of 20 M, overlap_comm {overlap['overlap_comm']}": {**small, **overlap},
    }
    if cell.stage == 3:
        settings["prefetch of 200 M"] = {"stage3_prefetch_bucket_size": 200_000_000}
    if cell.tier == "none":
        settings["torch_adam"] = {"torch_adam": True}
    if cell.tier == "nvme":
        settings["pipelined"] = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
        settings["sub-groups of 20 M"] = {"sub_group_size": 20_000_000}
        settings["sub-groups and buckets of 20 M, overlap_comm False"] = {
            "sub_group_size": 20_000_000,
            **small,
            **overlap,
        }
    return settings


def add_rank_arguments(parsed: argparse.ArgumentParser, *, warmup: int, steps: int) -> None:
    """The arguments that the multi-rank questions share."""
    parsed.add_argument("--shape", choices=list(SHAPES), default="110M")
    parsed.add_argument("--ranks", type=int, default=2, help="processes on this machine (2)")
    parsed.add_argument("--tokens", type=int, default=128, help="in one sample; a rank has one sample a step (128)")
    parsed.add_argument("--warmup", type=int, default=warmup, help=f"steps discarded in each process ({warmup})")
    parsed.add_argument("--steps", type=int, default=steps, help=f"steps timed in each process ({steps})")


class RankBench:
    """Makes the candidates of a multi-rank question from its arguments; each run starts all ranks anew."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.shape = replace(SHAPES[options.shape], sequence=options.tokens, batch=1)
        self.ranks: int = options.ranks
        self.path = Path(options.path).resolve()
        self.counts = {"warmup": options.warmup, "steps": options.steps}

    def ours(self, cell: Cell) -> Candidate:
        """This project's engine."""
        return lambda: self.run(OURS, contestant="ours", config=ranks_config(cell, self.path, self.shape))

    def rival(self, cell: Cell, settings: Mapping[str, Any], *, profile: bool = False) -> Candidate:
        """DeepSpeed. Its files stay where they are when it ends, so they get a folder of their own."""

        def run() -> dict[str, Any]:
            with tempfile.TemporaryDirectory(prefix="rival-", dir=self.path) as folder:
                config = rival_ranks_config(cell, folder, self.shape, settings)
                return {**self.run(RIVAL, config=config, profile=profile), "settings": dict(settings)}

        return run

    def reference(self) -> Candidate:
        """Plain torch, data-parallel."""
        config = ranks_config(Cell(0), self.path, self.shape)
        return lambda: self.run(OURS, contestant="reference", config=config)

    def floor(self, contestant: str) -> Candidate:
        """What ranks compute ("plain") or move ("wires"), alone."""
        return lambda: self.run(OURS, contestant=contestant)

    def run(self, module: str, *, ranks: int | None = None, **spec: Any) -> dict[str, Any]:
        """Start `module` on all ranks and return the figures that rank 0 prints last."""
        spec = {**spec, **self.counts, "path": str(self.path), "shape": asdict(self.shape)}
        count = str(ranks or self.ranks)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, "-m"]
        figures = run_child([*launcher, module, json.dumps(spec)], env=ENVIRONMENT)
        figures.pop("event", None)
        return figures
