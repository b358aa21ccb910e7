"""How long do the stages of a pipeline idle, and how much crosses between them?

A stack of equal layers on 2 stages (or `--stages`), with 2 to 16 micro-batches in a step, next to one rank that runs
all of them. With s stages and m micro-batches that all take equally long a stage idles (s - 1) / (m + s - 1) of the
time. What is measured is 1 - T(1) / (s T(s)) for steps of T(s) seconds, which has the step's own messages in it; with
more ranks than cores it says how busy the machine is, and no more.
"""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

import zero
from benchmarks.common import Report, parser
from zero.pipe import LayerSpec, PipelineModule

SAMPLES = 32


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, rounds=1)
    parsed.add_argument("--stages", type=int, nargs="+", default=[2])
    parsed.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8, 16])
    parsed.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"])
    parsed.add_argument("--width", type=int, default=1024)
    parsed.add_argument("--layers", type=int, default=16)
    parsed.add_argument("--steps", type=int, default=3)
    options = parsed.parse_args()
    report = Report("pipeline_bubble", __doc__, options)
    for micro_batches in options.micro_batches:
        alone = run(1, {**vars(options), "schedule": "1f1b", "count": micro_batches})
        report.figure(f"1 stage, {micro_batches} micro-batches", alone, f"step {alone['step_seconds']:.3f} s")
        for stages, schedule in itertools.product(options.stages, options.schedules):
            figures = run(stages, {**vars(options), "schedule": schedule, "count": micro_batches})
            ideal = (stages - 1) / (micro_batches + stages - 1)
            sent_bytes = figures["sent_bytes"]
            idle = 1 - alone["step_seconds"] / (stages * figures["step_seconds"])
            report.figure(
                f"{stages} stages, {micro_batches} micro-batches, {schedule}",
                {**figures, "idle": idle, "ideal_idle": ideal},
                f"step {figures['step_seconds']:.3f} s, idle {idle:.2f} (ideal {ideal:.2f}), {sent_bytes:,} bytes sent",
            )
    report.finish()


def run(stages: int, spec: dict[str, Any]) -> dict[str, float]:
    """Figures of the first stage's rank."""
    with socket.socket() as listening, tempfile.TemporaryDirectory() as folder:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        listening.close()
        spawn(one_rank, (stages, port, spec, folder), nprocs=stages)
        figures: dict[str, float] = torch.load(Path(folder) / "figures.pt")
        return figures


def one_rank(rank: int, stages: int, port: int, spec: dict[str, Any], folder: str) -> None:
    """Train, and leave the figures in `folder`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", port, stages, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=stages)
    width = spec["width"]
    layers = [LayerSpec(nn.Linear, width, width) for _ in range(spec["layers"])]
    model = PipelineModule(layers, stages, loss_fn=nn.functional.mse_loss, seed_layers=True)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": spec["count"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "pipeline": {"schedule": spec["schedule"]},
        "log_level": "error",
    }
    engine: Any = zero.initialize(model=model, config=config)[0]
    data = batches(width)
    engine.train_batch(data)  # shapes and connections
    begin = time.perf_counter()
    for _ in range(spec["steps"]):
        engine.train_batch(data)
    seconds = time.perf_counter() - begin
    if rank == 0:
        # Activations go one way and their gradients the other, both as wide as the layers.
        sent_bytes = 2 * (stages - 1) * spec["count"] * SAMPLES * width * torch.float32.itemsize
        figures = {"step_seconds": seconds / spec["steps"], "sent_bytes": sent_bytes}
        torch.save(figures, Path(folder) / "figures.pt")
    engine.close()
    dist.destroy_process_group()


def batches(width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches without end."""
    while True:
        yield torch.randn(SAMPLES, width), torch.randn(SAMPLES, width)


if __name__ == "__main__":
    main()
