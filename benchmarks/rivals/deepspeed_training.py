"""DeepSpeed's turn of a training question, once, in a process of its own.

`python -m benchmarks.rivals.deepspeed_training SPEC`: as `benchmarks.train_worker`, with DeepSpeed's own JSON, or with
`recomputing` as `benchmarks.gpu_worker`: a GPT whose blocks are recomputed. `operators`: those it needs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.gpu import RecomputingGPT, device_figures, quick_initialisation
from benchmarks.loop import emit, peak_rss_bytes, timed_steps
from benchmarks.machine import version
from benchmarks.models import GPT, Samples
from benchmarks.rivals import deepspeed_setup
from benchmarks.shapes import Shape


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Train for `warmup + steps` steps on the tiers that `config` names."""
    with deepspeed_setup.quietly():
        import deepspeed  # type: ignore[import-untyped]

        begin = time.perf_counter()
        shape, config = Shape(**spec["shape"]), spec["config"]
        recomputing = spec.get("recomputing", False)
        with deepspeed.zero.Init(config_dict_or_path=config), quick_initialisation() if recomputing else nullcontext():
            model = RecomputingGPT(shape) if recomputing else GPT(shape)
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        ready = time.perf_counter() - begin
    emit("ready", seconds=ready)
    samples = Samples(shape, engine.device)

    def step() -> dict[str, Any]:
        with deepspeed_setup.quietly():
            for _ in range(config.get("gradient_accumulation_steps", 1)):
                engine.backward(engine(samples.next()))
                engine.step()
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
        return device_figures()

    return timed_steps(step, warmup=spec["warmup"], steps=spec["steps"], path=spec.get("path"))


def free_port() -> str:
    """A port nobody listens on, so that two runs can share a machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def main() -> None:
    """Train as the specification says and print the figures."""
    spec = json.loads(sys.argv[1])
    os.environ.setdefault("MASTER_PORT", free_port())
    deepspeed_setup.require(*spec.get("operators", ("async_io", "cpu_adam")))
    torch.manual_seed(0)
    result = train(spec)
    emit("done", **result, peak_rss_bytes=peak_rss_bytes(), deepspeed=version("deepspeed"))


if __name__ == "__main__":
    main()
