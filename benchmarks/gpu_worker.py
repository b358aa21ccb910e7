"""One contestant of the GPU training question, once, in a process of its own: `python -m benchmarks.gpu_worker SPEC`.

SPEC is JSON: `contestant` (ours, plain), `shape`, `llama` (see `make_model`), `warmup`, `steps`; ours also `config`,
`path`, and `trace`, a file for the timeline of one more step, or null. Runs on the CPU where there is no GPU, which
says that it works and nothing about speed.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

import zero
from benchmarks.gpu import RecomputingGPT, StreamWaits, device_figures, make_model, quick_initialisation, tell_done
from benchmarks.loop import emit, timed_steps
from benchmarks.models import Samples
from benchmarks.shapes import Shape
from offload.accelerator import compute_device, synchronize
from offload.errors import BudgetError
from offload.streams import shares_host_memory
from zero.assembly.model_plan import plan_model
from zero.config import load_config
from zero.plan.machine import read_machine
from zero.plan.traffic import step_traffic

COUNTED = (
    "exposed_wait_seconds",
    "forward_seconds",
    "backward_seconds",
    "optimizer_seconds",
    "gathered_bytes",
    "nvme_read_bytes",
    "nvme_write_bytes",
)
"""Of the engine's statistics, reported for each step."""


def tell_plan(spec: dict[str, Any]) -> None:
    """What the model takes and a step moves, before anything is built.

    Raises:
        BudgetError: this machine does not have it.
    """
    with torch.device("meta"):
        model = make_model(Shape(**spec["shape"]), spec.get("llama"))
    config, device = load_config(spec["config"]), compute_device()
    layout, plan = plan_model(model, config, read_machine(device), device)
    free = shutil.disk_usage(spec["path"]).free
    if plan.swap_bytes > free:
        raise BudgetError(f"the plan needs {plan.swap_bytes:,} bytes of the disk, {free:,} are free")
    traffic = step_traffic(plan, layout, on_gpu=not shares_host_memory(device))
    emit(
        "plan",
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        rows=[(row.tier, row.array, row.nbytes) for row in plan.rows],
        traffic=asdict(traffic),
    )


def ours(spec: dict[str, Any]) -> None:
    """Train with this project's engine."""
    tell_plan(spec)
    shape, config = Shape(**spec["shape"]), spec["config"]
    begin = time.perf_counter()
    with zero.Init(config_dict_or_path=config), quick_initialisation():
        model = make_model(shape, spec.get("llama"))
    engine = zero.initialize(model=model, config=config)[0]
    emit("ready", seconds=time.perf_counter() - begin)
    samples = Samples(shape, engine.device)
    before = engine.statistics()

    def step() -> dict[str, Any]:
        nonlocal before
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(samples.next()))
            engine.step()
        synchronize()
        after = engine.statistics()
        figures = {name: getattr(after, name) - getattr(before, name) for name in COUNTED}
        before = after
        return {**figures, "device_wait_seconds": waits.seconds(), **device_figures()}

    with engine, StreamWaits(engine.device) as waits:
        tell_done(timed_steps(step, warmup=spec["warmup"], steps=spec["steps"], path=spec["path"]))
        if spec.get("trace"):
            with engine.trace(spec["trace"]):
                step()


def plain(spec: dict[str, Any]) -> None:
    """Torch with everything on the device: weights, gradients and AdamW's states in bf16."""
    shape, device = Shape(**spec["shape"]), compute_device()
    with torch.device("meta"):
        model = RecomputingGPT(shape).bfloat16()
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    samples = Samples(shape, device)
    emit("ready", seconds=0.0)

    def step() -> dict[str, Any]:
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model(samples.next()).backward()
        synchronize()
        computed = time.perf_counter() - begin
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        synchronize()
        return {"compute_seconds": computed, **device_figures()}

    tell_done(timed_steps(step, warmup=spec["warmup"], steps=spec["steps"]))


def main() -> None:
    """Run the contestant that the specification names; it prints its figures."""
    spec = json.loads(sys.argv[1])
    try:
        {"ours": ours, "plain": plain}[spec["contestant"]](spec)
    except BudgetError as error:
        emit("refused", why=str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
