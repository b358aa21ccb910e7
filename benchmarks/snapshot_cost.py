"""What do snapshots on NVMe cost a step: where nothing is cached, and where a share of the state is in memory?

The same stack of Linears under three engines, turn by turn: without snapshots, with one every 10 steps, and with one
every step. A turn is 10 steps of the whole loop. Where nothing is cached a snapshot writes no state, so the mark is
2 % of the step; where weights live in host memory it writes them through, and the ratio says what that costs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero
from benchmarks.common import Report, measure, parser
from offload.files.snapshot_files import remove_snapshot

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from probe import snapshots_of

STEPS = 10
MUST = 1.02


class Loop:
    """An engine and its loop.

    Args:
        options: of the command line.
        every: steps between snapshots; 0: none.
        weights: device of offload_param.
    """

    def __init__(self, options: argparse.Namespace, every: int, weights: str) -> None:
        path = {"nvme_path": str(options.path)}
        states: dict[str, Any] = {"device": "nvme", **path}
        if every:
            states["snapshot"] = {"every": every, "name": f"cost-{weights}-{every}"}
        config = {
            "train_micro_batch_size_per_gpu": options.rows,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": weights, **(path if weights == "nvme" else {})},
                "offload_optimizer": states,
                "stage3_param_persistence_threshold": 0,
            },
        }
        with zero.Init(config_dict_or_path=config):
            model = nn.Sequential(*(nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)))
        self.engine = zero.initialize(model=model, config=config)[0]
        self._input = torch.randn(options.rows, options.width, dtype=torch.bfloat16)
        if every and self.engine.load_snapshot() is not None:
            raise SystemExit(f"{options.path} holds a snapshot of an earlier run: zero snapshots rm")

    def run(self) -> Mapping[str, Any]:
        """Ten steps."""
        snapshots = snapshots_of(self.engine)
        before, begin = snapshots.seconds if snapshots else 0.0, time.perf_counter()
        for _ in range(STEPS):
            self.engine.backward(self.engine(self._input).float().square().mean())
            self.engine.step()
        seconds = (time.perf_counter() - begin) / STEPS
        return {"seconds": seconds, "snapshot_seconds": ((snapshots.seconds if snapshots else 0.0) - before) / STEPS}

    def close(self) -> None:
        """Close it; its snapshot stays."""
        self.engine.close()


def main() -> None:
    """Measure, print and write."""
    arguments = parser(__doc__, disk=True)
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--rows", type=int, default=256)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    report = Report("snapshot_cost", __doc__, options, [options.path])
    for weights in ("nvme", "cpu"):
        ask(report, options, weights)
    report.finish()


def ask(report: Report, options: argparse.Namespace, weights: str) -> None:
    """One tier of the weights."""
    loops: dict[str, Loop] = {}
    try:
        for name, every in (("none", 0), ("every 10", 10), ("every 1", 1)):
            loops[name] = Loop(options, every, weights)
        candidates: dict[str, Callable[[], Mapping[str, Any]]] = {name: loop.run for name, loop in loops.items()}
        series = measure(f"weights on {weights}", candidates, rounds=options.rounds, disk=options.path)
    finally:
        for loop in loops.values():
            loop.close()
        for every in (1, 10):
            with contextlib.suppress(ValueError):
                remove_snapshot(options.path, f"cost-{weights}-{every}")
    report.keep(series)
    for name in ("every 10", "every 1"):
        ratios = series.ratios(lambda r, name=name: r[name].seconds / r["none"].seconds)  # type: ignore[misc]
        report.mark(f"weights on {weights}: {name} / none", ratios, at_most=MUST if weights == "nvme" else None)
        shares = series.ratios(lambda r, name=name: r[name].figures["snapshot_seconds"] / r[name].seconds)  # type: ignore[misc]
        most = MUST - 1 if weights == "nvme" else None
        report.mark(f"weights on {weights}: {name}: share of a step spent on snapshots", shares, at_most=most)


if __name__ == "__main__":
    main()
