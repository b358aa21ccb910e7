"""Torch's FSDP2 with CPU offload, once, in a process of its own: `python -m benchmarks.rivals.fsdp2 SPEC`.

SPEC is JSON: `shape`, `warmup`, `steps`, `dtype` of what the host holds ("float32": fp32 masters, gradients and
states, computed in bf16; "bfloat16": all of it in bf16). One rank. Where there is no GPU it runs on the CPU without
offload, which says that it works and nothing about speed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu import RecomputingGPT, fill_with_noise, tell_done
from benchmarks.loop import emit, timed_steps
from benchmarks.models import Samples
from benchmarks.shapes import Shape


def sharded_model(shape: Shape, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Each block and the root a unit of its own, as torch's documentation has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model = RecomputingGPT(shape).to(dtype)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }
    if device.type == "cuda":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        fill_with_noise(parameter.to_local())  # type: ignore[attr-defined]  # a DTensor
    return model


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Train for `warmup + steps` steps."""
    begin = time.perf_counter()
    shape, dtype = Shape(**spec["shape"]), getattr(torch, spec["dtype"])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    # Norms of what lies on the host are reduced there.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        model = sharded_model(shape, dtype, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        samples = Samples(shape, device)
        emit("ready", seconds=time.perf_counter() - begin)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(samples.next()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return timed_steps(step, warmup=spec["warmup"], steps=spec["steps"])
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Train and print the figures."""
    tell_done(train(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
