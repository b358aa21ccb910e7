"""What does a training step of a 7 B-parameter GPT cost under a 16 GB device budget, and how much memory does it take?

Ours with weights and states in host memory, then on NVMe with a host cache, next to FSDP2 with CPUOffloadPolicy; and
without offload, ours and plain torch, where that fits. Each contestant is a process of its own with a time limit; one
that does not end in time counts with the steps it has done. Exits with status 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Report, parser
from benchmarks.gpu import SHAPES, require_gpu
from benchmarks.shapes import Shape

DEVICE_BUDGET_BYTES = 9_000_000_000
"""Of the engine; activations, logits and torch's libraries come on top, 16 GB together."""
DEVICE_LIMIT_BYTES = 16_000_000_000
HOST_BUDGET_BYTES = 70_000_000_000
"""With NVMe: what a 7 B model's 98 GB do not fit into."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A process, and its share of the time."""

    name: str
    module: str
    spec: dict[str, Any]
    share: float


def our_config(tier: str, path: Path, shape: Shape, device_bytes: int | None, host_bytes: int | None) -> dict[str, Any]:
    """The engine's JSON with weights and states on `tier`."""
    where = {"device": tier, **({"nvme_path": str(path)} if tier == "nvme" else {})}
    budgets = {"device": device_bytes, "host": host_bytes}
    return {
        "train_micro_batch_size_per_gpu": shape.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": dict(where), "offload_optimizer": dict(where)},
        "memory_budget": {name: nbytes for name, nbytes in budgets.items() if nbytes is not None},
    }


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """In the order of their interest: the last ones may find no time left."""
    shape, path = SHAPES[options.shape], Path(options.path).resolve()
    common = {"shape": asdict(shape), "warmup": options.warmup, "steps": options.steps}

    def ours(tier: str, device_bytes: int | None, host_bytes: int | None) -> dict[str, Any]:
        config = our_config(tier, path, shape, device_bytes, host_bytes)
        return {**common, "contestant": "ours", "config": config, "path": str(path)}

    worker, rival, device_bytes = "benchmarks.gpu_worker", "benchmarks.rivals.fsdp2", options.device_bytes
    return [
        Contestant("ours, cpu", worker, ours("cpu", device_bytes, None), 0.25),
        Contestant("FSDP2, fp32 masters", rival, {**common, "dtype": "float32"}, 0.3),
        Contestant("ours, nvme", worker, ours("nvme", device_bytes, options.host_bytes), 0.4),
        Contestant("FSDP2, all bf16", rival, {**common, "dtype": "bfloat16"}, 0.4),
        Contestant("ours, no offload", worker, ours("none", None, None), 0.6),
        Contestant("torch, no offload", worker, {**common, "contestant": "plain"}, 1.0),
    ]


def run(contestant: Contestant, seconds: float) -> dict[str, Any]:
    """What it said within `seconds`: its figures, or with "why" those of the steps it has done."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", contestant.module, json.dumps(contestant.spec)],
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        )
        try:
            why = f"ended with status {child.wait(timeout=max(seconds, 1.0))}"
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            why = f"not done after {seconds:.0f} s"
        out.seek(0)
        err.seek(0)
        return summarize(out.read(), err.read(), why)


def summarize(said: str, complaints: str, why: str) -> dict[str, Any]:
    """The figures of a contestant from its JSON lines."""
    events = []
    for line in said.splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue  # a library talks too
    by_name = {event.get("event"): event for event in events if isinstance(event, dict)}
    if "done" in by_name:
        found = dict(by_name["done"])
    else:
        found = {"step_seconds": [event["seconds"] for event in events if event.get("event") == "step"]}
        found["why"] = f"{why}: {' | '.join(complaints.strip().splitlines()[-3:])}"
    found["ready_seconds"] = by_name.get("ready", {}).get("seconds")
    found.pop("event", None)
    return found


def judge(report: Report, results: dict[str, dict[str, Any]]) -> None:
    """Ratios of step times and the memory limit."""
    for name, found in results.items():
        if "cpu" in name or "nvme" in name:
            peak = found.get("peak_reserved_bytes")
            if peak:
                report.mark(f"{name}: peak device memory / 16 GB", [peak / DEVICE_LIMIT_BYTES], at_most=1.0)
    for ours in ("ours, cpu", "ours, nvme", "ours, no offload"):
        for rival in ("FSDP2, fp32 masters", "FSDP2, all bf16", "torch, no offload"):
            mine, theirs = (results.get(name, {}).get("step_seconds") for name in (ours, rival))
            if mine and theirs:
                median = statistics.median(theirs)
                report.mark(f"step time, {ours} / {rival}", [seconds / median for seconds in mine])


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__, rounds=1, disk=True)
    arguments.add_argument("--shape", choices=list(SHAPES), default="7B")
    arguments.add_argument("--warmup", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--device-bytes", type=int, default=DEVICE_BUDGET_BYTES, help="memory_budget.device of ours")
    arguments.add_argument("--host-bytes", type=int, default=HOST_BUDGET_BYTES, help="memory_budget.host with NVMe")
    arguments.add_argument("--seconds", type=float, default=480.0, help="for all contestants together")
    options = arguments.parse_args()
    require_gpu()
    report = Report("gpu_step", __doc__, options, folders=[options.path])
    report.figure("parameters", SHAPES[options.shape].numel)
    results: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + options.seconds
    for contestant in contestants(options):
        left = end - time.monotonic()
        if left < 10:
            report.lack(contestant.name, "no time left")
            continue
        found = results[contestant.name] = run(contestant, left * contestant.share)
        if "why" in found:
            report.lack(contestant.name, found["why"])
        if found["step_seconds"]:
            text = f"{statistics.median(found['step_seconds']):.3f} s"
            peak = found.get("peak_reserved_bytes")
            text += f", peak device memory {peak / 1e9:.2f} GB" if peak else ""
            report.figure(contestant.name, found, text)
    judge(report, results)
    report.finish()


if __name__ == "__main__":
    main()
