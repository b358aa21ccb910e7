"""What each rank of a multi-rank question does, whoever's engine it runs: meet, train on its own tokens, sum up."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.loop import peak_rss_bytes, timed_steps
from benchmarks.models import GPT, Samples
from benchmarks.shapes import Shape

BATCHES = 2
"""Batches of a rank, taken in turn: what is seen again can be learnt, so that the loss falls if training works."""
SPANS = ("forward", "backward", "optimizer")


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """With the other ranks over gloo, one thread each, on loopback. Threads of a group that is left open may abort."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def model_of(shape: Shape) -> GPT:
    """The same weights in every process."""
    torch.manual_seed(0)
    return GPT(shape)


class Turns:
    """The steps of one rank and how long their parts took.

    Args:
        engine: called with tokens it gives the loss; has `backward` and `step`.
        shape: of the model.
    """

    def __init__(self, engine: Any, shape: Shape) -> None:
        samples = Samples(shape, seed=dist.get_rank())
        self._engine, self._batches = engine, [samples.next() for _ in range(BATCHES)]
        self.losses: list[float] = []
        self.spans: dict[str, list[float]] = {name: [] for name in SPANS}

    def __call__(self) -> None:
        """One step."""
        tokens = self._batches[len(self.losses) % BATCHES]
        with self._span("forward"):
            loss: Tensor = self._engine(tokens)
        with self._span("backward"):
            self._engine.backward(loss)
        with self._span("optimizer"):
            self._engine.step()
        self.losses.append(loss.item())

    @contextlib.contextmanager
    def _span(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.spans[name].append(time.perf_counter() - begin)


def train(engine: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """`warmup + steps` steps on every rank; `loop.timed_steps`' figures of all of them together.

    With `profile` in the specification the timed steps run under torch's profiler and the figures have
    `collective_seconds` (per step, by name) instead of times worth reporting.

    Args:
        engine: as `Turns` takes it.
        spec: `shape`, `warmup`, `steps`; perhaps `path` and `profile`.

    Returns:
        Figures of all ranks: see `together`.
    """
    warmup, steps = spec["warmup"], spec["steps"]
    turns = Turns(engine, Shape(**spec["shape"]))
    dist.barrier()
    figures: dict[str, Any] = {}
    if spec.get("profile"):
        for _ in range(warmup):
            turns()
        figures = collectives(turns, steps)
    else:
        figures = timed_steps(turns, warmup=warmup, steps=steps, path=spec.get("path"))
    for name, seconds in turns.spans.items():
        figures[f"{name}_seconds"] = sum(seconds[warmup:]) / steps
    return together({**figures, "losses": turns.losses, "peak_rss_bytes": peak_rss_bytes()})


def collectives(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Seconds a step spends in each collective of gloo, on whichever thread, while `turn` runs `steps` times."""
    begin = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            step()
    seconds = (time.perf_counter() - begin) / steps
    seconds_by_name: Counter[str] = Counter()
    for event in profile.events():
        if event.name.startswith("gloo:"):
            seconds_by_name[event.name.removeprefix("gloo:")] += event.time_range.elapsed_us() / 1e6 / steps
    return {"seconds": seconds, "collective_seconds": dict(seconds_by_name)}


def together(figures_of_rank: dict[str, Any]) -> dict[str, Any]:
    """The figures of all ranks in one: those of the slowest, losses as their mean, memory and CPU time as their sum.

    `by_rank` has what each measured itself. A collective: every rank calls it and gets the same.
    """
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, figures_of_rank)
    merged = dict(max(ranks, key=lambda figures: float(figures["seconds"])))
    for name in ("peak_rss_bytes", "cpu_seconds_per_step", "process_read_bytes", "process_write_bytes"):
        if name in merged:
            merged[name] = sum(figures[name] for figures in ranks)
    if "losses" in merged:
        merged["losses"] = [sum(losses) / len(ranks) for losses in zip(*(r["losses"] for r in ranks), strict=True)]
    merged["by_rank"] = [{name: figures[name] for name in ("seconds", "peak_rss_bytes")} for figures in ranks]
    return merged
