"""What do states on NVMe cost an FSDP2 step: `zero.OffloadOptimizer` against torch's AdamW under `CPUOffloadPolicy`?

All contestants train the same model under FSDP2's CPUOffloadPolicy, with fp32 weights and gradients in host memory.
They differ in where the optimizer's states are and in what updates. Measured on each rank: the seconds of
`optimizer.step()` and of a whole step, and how much the process has grown at its peak, above what it had before the
model was made.

    python -m benchmarks.offload_optimizer --path /nvme --json offload_optimizer.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import zero
from benchmarks.common import Report, measure, parser
from benchmarks.loop import peak_rss_bytes
from zero.ops.adam import DeepSpeedCPUAdam
from zero.plan.machine import read_machine

TORCH = "torch, host"
OURS: Mapping[str, tuple[str, Any]] = {
    "ours, host": ("cpu", torch.optim.AdamW),
    "ours, NVMe": ("nvme", torch.optim.AdamW),
    "ours, NVMe, our kernel": ("nvme", DeepSpeedCPUAdam),
}
LR = 1e-4
WARMUP = 1


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, rounds=3, disk=True)
    parsed.add_argument("--width", type=int, default=2048)
    parsed.add_argument("--layers", type=int, default=12)
    parsed.add_argument("--ranks", type=int, default=2)
    parsed.add_argument("--steps", type=int, default=3, help="measured ones of a run")
    parsed.add_argument("--worker", nargs=2, metavar=("CONTESTANT", "FOLDER"), help=argparse.SUPPRESS)
    options = parsed.parse_args()
    if options.worker is not None:
        work(options)
        return
    del options.worker
    numel = options.layers * options.width**2
    report = Report("offload_optimizer", __doc__, options, folders=[options.path])
    report.figure("parameters", numel, f"{numel:,} on {options.ranks} ranks")
    runs = {name: partial(run, name, options) for name in (TORCH, *OURS)}
    series = measure("optimizer.step()", runs, rounds=options.rounds)
    report.keep(series)
    for name in (TORCH, *OURS):
        step, peak = series.median(name, "step_seconds"), int(series.median(name, "peak_bytes"))
        text = (
            f"{step:.3f} s a step, each rank grown by {peak / 2**20:,.0f} MiB ({peak * options.ranks / numel:.1f} B/p)"
        )
        report.figure(name, {"step_seconds": step, "peak_bytes": peak}, text)
    for name in OURS:
        report.mark(f"{name}: update / torch's", series.ratios(lambda r, name=name: r[name].seconds / r[TORCH].seconds))
        peaks = series.ratios(lambda r, name=name: r[name].figures["peak_bytes"] / r[TORCH].figures["peak_bytes"])
        report.mark(f"{name}: peak / torch's", peaks)
    report.finish()


def run(name: str, options: argparse.Namespace) -> dict[str, float]:
    """One contestant in processes of its own; of the slowest and of the largest rank."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = [f"--{key}={getattr(options, key)}" for key in ("path", "width", "layers", "ranks", "steps")]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        command = [sys.executable, *launcher, "-m", "benchmarks.offload_optimizer", *sizes, "--worker", name, folder]
        # Large tensors are mappings of their own: what is freed is returned, and the peak is what was in use.
        memory = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **memory, **os.environ}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if process.returncode:
            raise RuntimeError(f"{name}: {process.stderr[-4000:]}")
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).iterdir()]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def work(options: argparse.Namespace) -> None:
    """What each rank does."""
    name, folder = options.worker
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    train(name, mesh, 64, 2, options)  # what the first step loads is part of the baseline
    gc.collect()
    before = read_machine(torch.device("cpu")).rss_bytes
    figures = train(name, mesh, options.width, options.layers, options)
    figures["peak_bytes"] = float(peak_rss_bytes() - before)
    (Path(folder) / str(dist.get_rank())).write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def train(name: str, mesh: DeviceMesh, width: int, layers: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians of the seconds of an update and of a whole step."""
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(std=width**-0.5)  # type: ignore[attr-defined]  # a DTensor
    optimizer = make_optimizer(name, model, options.path)
    batch = torch.randn(4, width, device=mesh.device_type)
    seconds: dict[str, list[float]] = {"seconds": [], "step_seconds": []}
    for _ in range(WARMUP + options.steps):
        begin = time.perf_counter()
        model(batch).square().mean().backward()
        dist.barrier()
        update_begin = time.perf_counter()
        optimizer.step()
        dist.barrier()
        seconds["seconds"].append(time.perf_counter() - update_begin)
        optimizer.zero_grad()
        seconds["step_seconds"].append(time.perf_counter() - begin)
    return {key: statistics.median(values[WARMUP:]) for key, values in seconds.items()}


def make_optimizer(name: str, model: nn.Module, path: Path) -> torch.optim.Optimizer:
    """The contestant's optimizer."""
    if name == TORCH:
        return torch.optim.AdamW(model.parameters(), lr=LR)
    device, optimizer_class = OURS[name]
    offload = {"device": device, "nvme_path": str(path)}
    return zero.OffloadOptimizer(model.parameters(), optimizer_class, lr=LR, offload=offload)


if __name__ == "__main__":
    main()
