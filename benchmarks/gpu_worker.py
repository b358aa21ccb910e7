"""One contestant of the GPU training question, once, in a process of its own: `python -m benchmarks.gpu_worker SPEC`.

SPEC is JSON: `contestant` (ours, plain), `shape`, `warmup`, `steps`; ours also `config` and `path`. Runs on the CPU
where there is no GPU, which says that it works and nothing about speed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import zero
from benchmarks.gpu import RecomputingGPT, device_figures, quick_initialisation
from benchmarks.loop import emit, peak_rss_bytes, timed_steps
from benchmarks.models import Samples
from benchmarks.shapes import Shape


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ours(spec: dict[str, Any]) -> dict[str, Any]:
    """Train with this project's engine."""
    shape, config = Shape(**spec["shape"]), spec["config"]
    begin = time.perf_counter()
    with zero.Init(config_dict_or_path=config), quick_initialisation():
        model = RecomputingGPT(shape)
    engine = zero.initialize(model=model, config=config)[0]
    emit("ready", seconds=time.perf_counter() - begin)
    samples = Samples(shape, engine.device)
    allocated: list[int] = []

    def step() -> None:
        engine.backward(engine(samples.next()))
        engine.step()
        synchronize()
        allocated.append(device_figures()["allocations"])

    with engine:
        measured = timed_steps(step, warmup=spec["warmup"], steps=spec["steps"], path=spec.get("path"))
        after = engine.statistics()
        return {
            **measured,
            "plan_rows": [(row.tier, row.plane, row.nbytes) for row in engine.plan.rows],
            "exposed_wait_seconds": after.exposed_wait_seconds,
            "allocations_after_each_step": allocated,
        }


def plain(spec: dict[str, Any]) -> dict[str, Any]:
    """Torch with everything on the device: weights, gradients and AdamW's states in bf16."""
    shape = Shape(**spec["shape"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = RecomputingGPT(shape).bfloat16()
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    samples = Samples(shape, device)
    emit("ready", seconds=0.0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(samples.next()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        synchronize()

    return timed_steps(step, warmup=spec["warmup"], steps=spec["steps"])


def main() -> None:
    """Run the contestant that the specification names and print its figures."""
    spec = json.loads(sys.argv[1])
    result = {"ours": ours, "plain": plain}[spec["contestant"]](spec)
    emit("done", **result, **device_figures(), peak_rss_bytes=peak_rss_bytes(), torch=torch.__version__)


if __name__ == "__main__":
    main()
