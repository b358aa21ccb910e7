"""One contestant of a multi-rank question, once: `python -m torch.distributed.run ... -m benchmarks.ranks_worker SPEC`.

SPEC is JSON: `contestant` (ours, reference, plain, wires), `shape`, `warmup`, `steps`, and what the functions below
ask for.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero
from benchmarks import rank_loop
from benchmarks.loop import emit, peak_rss_bytes
from benchmarks.shapes import Shape
from offload.memory.host_memory import retain_heap

BUCKET_NUMEL = 25_000_000
"""What one collective moves at once: a usual bucket."""


def ours(spec: dict[str, Any]) -> dict[str, Any]:
    """Train with this project's engine; `config`: the JSON."""
    engine = zero.initialize(model=rank_loop.model_of(Shape(**spec["shape"])), config=spec["config"])[0]
    with engine:
        figures = rank_loop.train(engine, spec)
        return {**figures, "plan_rows": [(row.tier, row.array, row.nbytes) for row in engine.plan.rows]}


class Plain:
    """The compute floor as an engine: forward and backward of plain torch, no optimizer, nothing between ranks.

    Gradients are dropped, which spares adding to them, and what they lay in is kept, which spares page faults.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, tokens: Tensor) -> Tensor:
        self._model.zero_grad(set_to_none=True)
        loss: Tensor = self._model(tokens)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Nothing: this is a floor."""


class DataParallel:
    """What everybody means to compute, as an engine: plain torch, bf16 weights with fp32 masters, gradients averaged.

    Args:
        model: with fp32 weights, the masters.
        config: the engines' JSON; its optimizer and its clipping are used.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        self._masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        self._optimizer = torch.optim.AdamW(self._masters, **config["optimizer"]["params"])
        self._clip = config["gradient_clipping"]
        self._model = model.bfloat16()

    def __call__(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self._model(tokens)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        pairs = list(zip(self._model.parameters(), self._masters, strict=True))
        for parameter, master in pairs:
            gradient = torch.as_tensor(parameter.grad).float() / dist.get_world_size()
            dist.all_reduce(gradient)
            master.grad = gradient
        torch.nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._optimizer.step()
        for parameter, master in pairs:
            parameter.data.copy_(master.data)
            parameter.grad = None


def reference(spec: dict[str, Any]) -> dict[str, Any]:
    """The losses that everybody should see; `config`: the JSON."""
    return rank_loop.train(DataParallel(rank_loop.model_of(Shape(**spec["shape"])), spec["config"]), spec)


def plain(spec: dict[str, Any]) -> dict[str, Any]:
    """What both ranks compute, at the same time, on a thread each."""
    engine = Plain(rank_loop.model_of(Shape(**spec["shape"])).bfloat16())
    retain_heap()
    return rank_loop.train(engine, spec)


def wires(spec: dict[str, Any]) -> dict[str, Any]:
    """What moving the model's weights between the ranks costs, in seconds for all of them in bf16.

    `gloo_*`: its collectives in buckets. `copy`: each rank copies all weights in its own memory, as it would copy
    them out of memory that ranks share. `sum`: each rank reads its half of two ranks' gradients and writes their sum.
    `seconds` is that of an all-gather.
    """
    numel, world = Shape(**spec["shape"]).numel, dist.get_world_size()
    part_numel = BUCKET_NUMEL // world
    bucket = torch.ones(part_numel * world, dtype=torch.bfloat16)
    bucket_part = torch.ones(part_numel, dtype=torch.bfloat16)
    buckets = numel / bucket.numel()
    first_half, second_half = (
        torch.ones(numel // world, dtype=torch.bfloat16),
        torch.ones(numel // world, dtype=torch.bfloat16),
    )
    source, target = torch.ones(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.bfloat16)
    candidates: dict[str, tuple[Callable[[], Any], float]] = {
        "gloo_all_reduce": (lambda: dist.all_reduce(bucket), buckets),
        "gloo_all_gather": (lambda: dist.all_gather_into_tensor(bucket, bucket_part), buckets),
        "gloo_reduce_scatter": (lambda: dist.reduce_scatter_tensor(bucket_part, bucket), buckets),
        "copy": (lambda: target.copy_(source), 1.0),
        "sum": (lambda: torch.add(first_half, second_half, out=first_half), 1.0),
    }
    figures = {}
    for name, (run, times) in candidates.items():
        run()
        seconds = []
        for _ in range(spec["steps"]):
            dist.barrier()
            begin = time.perf_counter()
            run()
            seconds.append((time.perf_counter() - begin) * times)
        figures[f"{name}_seconds"] = statistics.median(seconds)
    return rank_loop.together(
        {"seconds": figures["gloo_all_gather_seconds"], "peak_rss_bytes": peak_rss_bytes(), **figures}
    )


CONTESTANTS = {"ours": ours, "reference": reference, "plain": plain, "wires": wires}


def main() -> None:
    """Run the contestant that the specification names and print its figures."""
    spec = json.loads(sys.argv[1])
    with rank_loop.meeting():
        result = CONTESTANTS[spec["contestant"]](spec)
    emit("done", **result, torch=torch.__version__)


if __name__ == "__main__":
    main()
