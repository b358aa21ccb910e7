"""One contestant of a training question, once, in a process of its own: `python -m benchmarks.train_worker SPEC`.

SPEC is JSON: `contestant` (ours, plain, resident, activations, newton_schulz, disk), `shape`, `warmup`, `steps`, and
what the functions below ask for.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _zeropower_via_newtonschulz

import zero
from benchmarks.loop import emit, peak_rss_bytes, saved_bytes, timed_steps
from benchmarks.models import GPT, Samples
from benchmarks.shapes import Shape
from offload.accelerator import compute_device
from offload.array.tiered_array import Disk
from offload.io.aio import AioOptions, open_aio
from offload.io.swapfile import SwapSpace
from offload.memory.host_memory import map_host, retain_heap, tensor_over, trim_heap
from offload.sizes import PAGE_BYTES, align_up
from zero.optim.muon import is_hidden_matrix

RECORD_BYTES = 48 << 20
"""A sub-group's optimizer state and weights: what a step moves at once."""
RECORDS_IN_FLIGHT = 4
NS_STEPS, COEFFICIENTS = 5, (DEFAULT_A, DEFAULT_B, DEFAULT_C)
MATMULS = 20


def ours(spec: dict[str, Any]) -> dict[str, Any]:
    """Train with this project's engine. `config`: the JSON; `path`: folder of the swap files, None without."""
    shape, config, path = Shape(**spec["shape"]), spec["config"], spec.get("path")
    begin = time.perf_counter()
    with zero.Init(config_dict_or_path=config):
        model = GPT(shape)
    engine = zero.initialize(model=model, config=config)[0]
    emit("ready", seconds=time.perf_counter() - begin)
    samples = Samples(shape, engine.device)
    micro_batches = iter(samples.next, None)
    before = engine.statistics()

    def step() -> None:
        nonlocal before
        if engine.global_steps == spec["warmup"]:
            before = engine.statistics()
        engine.train_batch(micro_batches)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()

    with engine:
        measured = timed_steps(step, warmup=spec["warmup"], steps=spec["steps"], path=path)
        after = engine.statistics()
        spans = {
            name: (getattr(after, name) - getattr(before, name)) / spec["steps"]
            for name in (
                *("forward_seconds", "backward_seconds", "optimizer_seconds", "exposed_wait_seconds"),
                *("nvme_read_bytes", "nvme_write_bytes", "nvme_read_seconds", "nvme_write_seconds"),
                *("prefetch_hits", "prefetch_late", "prefetch_misses"),
            )
        }
        return {
            **measured,
            **spans,
            "plan_bytes": {tier: engine.plan.tier_bytes(tier) for tier in ("device", "host", "nvme")},
            "plan_rows": [(row.tier, row.array, row.nbytes) for row in engine.plan.rows],
            "baseline_rss_bytes": engine.plan.baseline_bytes,
            "sub_groups": len(engine.plan.sub_groups),
            "backend": after.aio_backend,
            "isa": after.isa,
        }


def plain(spec: dict[str, Any]) -> dict[str, Any]:
    """The compute floor: forward and backward of plain torch with resident weights, no optimizer.

    Gradients are dropped, which spares adding to them, and what they lay in is kept, which spares page faults.
    """
    shape = Shape(**spec["shape"])
    model, samples = GPT(shape), Samples(shape)
    model = model.bfloat16() if spec.get("bf16", True) else model
    retain_heap()
    forward: list[float] = []

    def step() -> None:
        model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        loss = model(samples.next())
        forward.append(time.perf_counter() - begin)
        loss.backward()

    measured = timed_steps(step, warmup=spec["warmup"], steps=spec["steps"])
    return {**measured, "forward_seconds": statistics.mean(forward[spec["warmup"] :])}


def resident(spec: dict[str, Any]) -> dict[str, Any]:
    """A step of plain torch with nothing offloaded: fp32 weights under bf16 autocast, clipping, torch's fused AdamW.

    Memory that is freed stays with the process, which spares page faults.
    """
    shape = Shape(**spec["shape"])
    model, samples = GPT(shape), Samples(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    retain_heap()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=spec["bf16"]):
            loss = model(samples.next())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return timed_steps(step, warmup=spec["warmup"], steps=spec["steps"])


def newton_schulz(spec: dict[str, Any]) -> dict[str, Any]:
    """The orthogonalizations of a step with Muon, alone: torch's iteration over a matrix of each hidden one's shape.

    `floor_seconds`: as long as their operations take at `flops_per_second`, the better rate of two matmuls of bf16
    matrices of the model's width, one measured before and one after the steps.
    """
    shape, device = Shape(**spec["shape"]), compute_device()
    with torch.device("meta"):
        shapes = [tuple(p.shape) for name, p in GPT(shape).named_parameters() if is_hidden_matrix(name, p)]
    matrices = {matrix_shape: torch.randn(matrix_shape, device=device) for matrix_shape in shapes}

    def step() -> None:
        for matrix_shape in shapes:
            _zeropower_via_newtonschulz(matrices[matrix_shape], COEFFICIENTS, NS_STEPS, EPS)
        if device.type == "cuda":
            torch.cuda.synchronize()

    rates = [matmul_flops_per_second(shape.width, device)]
    measured = timed_steps(step, warmup=spec["warmup"], steps=spec["steps"])
    rates.append(matmul_flops_per_second(shape.width, device))
    flops = sum(NS_STEPS * (4 * m * n + 2 * m * m) * m for m, n in map(sorted, shapes))
    return {**measured, "flops": flops, "flops_per_second": max(rates), "floor_seconds": flops / max(rates)}


def matmul_flops_per_second(width: int, device: torch.device) -> float:
    """Of a bf16 matrix of (width, 4 width) times its transpose: the best of some."""
    wide = torch.randn(width, 4 * width, device=device).bfloat16()
    best = math.inf
    for _ in range(MATMULS):
        begin = time.perf_counter()
        wide @ wide.T
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 8 * width**3 / best


def activations(spec: dict[str, Any]) -> dict[str, Any]:
    """Memory of a step of plain torch beside weights and gradients: `activation_bytes`.

    One layer is run for real and its process watched: that gives the fixed part, what torch's libraries take at first
    use included. Each further layer adds what autograd keeps for it.
    """
    shape = Shape(**spec["shape"])
    samples = Samples(shape)
    models = [GPT(replace(shape, layers=layers)).bfloat16() for layers in (1, 2)]
    saved = [saved_bytes(model, partial(_loss, model, samples)) for model in models]
    del models
    trim_heap()
    model = GPT(replace(shape, layers=1)).bfloat16()
    trim_heap()
    # From the first step on gradients stay, so the growth below has none of them in it.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    for _ in range(spec["warmup"] + spec["steps"]):
        model(samples.next()).backward()
    grown = peak_rss_bytes() - before
    return {
        "seconds": 0.0,
        "activation_bytes": grown + (shape.layers - 1) * (saved[1] - saved[0]),
        "grown_bytes": grown,
    }


def _loss(model: GPT, samples: Samples) -> torch.Tensor:
    loss: torch.Tensor = model(samples.next())
    return loss


def disk(spec: dict[str, Any]) -> dict[str, Any]:
    """The I/O floor: `read_bytes` read, then `write_bytes` written, with nothing else going on.

    Records of the step's size through this project's I/O engine, after all of the file has been written with
    random bytes. `seconds` is the median of their sum over the rounds.
    """
    sizes = {"write": spec["write_bytes"], "read": spec["read_bytes"]}
    records = max(-(-max(sizes.values()) // RECORD_BYTES), 1)
    buffers = [tensor_over(map_host(RECORD_BYTES)) for _ in range(RECORDS_IN_FLIGHT)]
    for buffer in buffers:
        buffer.random_(0, 256)
    device = Disk(
        open_aio(AioOptions(backend=os.environ.get("ZERO_AIO_BACKEND", "auto"))),
        SwapSpace([spec["path"]], records * RECORD_BYTES),
    )
    loop = asyncio.new_event_loop()

    async def move_lane(first: int, *, write: bool, nbytes: int) -> None:
        for begin in range(first * RECORD_BYTES, nbytes, len(buffers) * RECORD_BYTES):
            part = buffers[first][: min(RECORD_BYTES, nbytes - begin)]
            await (device.write(begin, part) if write else device.read(begin, part))

    async def everything(*, write: bool, nbytes: int) -> None:
        await asyncio.gather(*(move_lane(first, write=write, nbytes=nbytes) for first in range(len(buffers))))

    def run_once(kind: str, nbytes: int) -> float:
        begin = time.perf_counter()
        loop.run_until_complete(everything(write=kind == "write", nbytes=nbytes))
        return time.perf_counter() - begin

    try:
        run_once("write", records * RECORD_BYTES)
        rounds = [
            {kind: run_once(kind, align_up(nbytes, PAGE_BYTES)) for kind, nbytes in sizes.items()}
            for _ in range(spec["steps"])
        ]
    finally:
        device.aio.close()
        device.swap.close()
        loop.close()
    sums = [sum(seconds.values()) for seconds in rounds]
    return {
        "seconds": statistics.median(sums),
        **{f"{kind}_seconds": [seconds[kind] for seconds in rounds] for kind in sizes},
    }


def main() -> None:
    """Run the contestant that the specification names and print its figures."""
    spec = json.loads(sys.argv[1])
    torch.manual_seed(0)
    contestants = (ours, plain, resident, activations, newton_schulz, disk)
    result = {contestant.__name__: contestant for contestant in contestants}[spec["contestant"]](spec)
    emit("done", **result, peak_rss_bytes=peak_rss_bytes(), torch=torch.__version__)


if __name__ == "__main__":
    main()
