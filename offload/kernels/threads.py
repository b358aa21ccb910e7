"""Measures how many threads are useful for an optimizer update.

Memory bandwidth limits an update, and one core can often use all of it: a second thread then only takes a core from
other computations. Threads are not bound to cores. They take their work in small parts from one counter, so that a
busy core costs no more than its share, and they end after a moment without work.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping

import torch

from offload.kernels import kernels
from offload.kernels.moments import Moments
from offload.kernels.segment import Segment
from offload.memory.host_memory import map_host, tensor_over
from offload.system.process import core_of

SCRATCH_NUMEL = 3 << 20
"""42 MB with bf16 weights: more than the caches of most machines, and a few milliseconds of work."""
WORTH_MEASURING_NUMEL = 32 * SCRATCH_NUMEL
"""For fewer elements an update takes as long as the measurement."""
GAIN_MIN = 1.1
"""A larger number of threads is taken only if it is faster by this factor."""
SECONDS_MAX = 0.03
ROUNDS = 3


def update_threads(numel: int, limit: int) -> int:
    """Threads for updates of `numel` elements in total, at most `limit`; measured once per process (under 50 ms)."""
    limit = min(limit, physical_cores())
    if numel < WORTH_MEASURING_NUMEL or limit < 2:
        return max(limit, 1)
    return _measure_threads(limit)


def kernel_threads(*, on_cpu: bool) -> int:
    """Threads that kernels on the host may use: as many as torch may.

    If the user set no number, torchrun gives torch one thread, so that ranks do not compete for cores. Ranks that
    compute on devices do not need the cores: then kernels get this rank's share of them.

    Args:
        on_cpu: the model computes on the host too.
    """
    threads = max(torch.get_num_threads(), 1)
    if on_cpu or "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("OMP_NUM_THREADS") != "1":
        return threads
    return max(physical_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def physical_cores() -> int:
    """Number of cores that this process may run on; the hardware threads of one core count once."""
    return len({core_of(cpu) for cpu in os.sched_getaffinity(0)})


def fewest_sufficient(seconds: Mapping[int, float]) -> int:
    """The fewest threads that no larger number beats by `GAIN_MIN`.

    Args:
        seconds: number of threads -> seconds, not empty.
    """
    return min(count for count, duration in seconds.items() if duration <= GAIN_MIN * min(seconds.values()))


def measure(step: Callable[[int], None], limit: int) -> dict[int, float]:
    """Least seconds of `step(threads)` for 1, 2, 4, ... and `limit` threads; stops early when time is up."""
    counts = sorted({*(1 << k for k in range(limit.bit_length()) if 1 << k < limit), limit})
    begin = time.perf_counter()
    seconds: dict[int, float] = {}
    for _ in range(ROUNDS):
        for count in counts:
            start = time.perf_counter()
            step(count)
            seconds[count] = min(seconds.get(count, float("inf")), time.perf_counter() - start)
        if time.perf_counter() - begin > SECONDS_MAX:
            break
    return seconds


@functools.cache
def _measure_threads(limit: int) -> int:
    return fewest_sufficient(measure(scratch_update(SCRATCH_NUMEL, torch.float32), limit))


def scratch_update(numel: int, state_dtype: torch.dtype) -> Callable[[int], None]:
    """Adam's update, by a number of threads, of bf16 weights with split masters that nobody has."""
    width = torch.bfloat16.itemsize * numel
    memory = tensor_over(map_host(3 * width + Moments.nbytes(state_dtype, numel)))
    weight, gradient = memory[:width].view(torch.bfloat16), memory[width : 2 * width].view(torch.bfloat16)
    remainder = memory[2 * width : 3 * width].view(torch.int16)
    moments = Moments.from_buffer(memory[3 * width :], state_dtype, numel, 0, 0)
    gradient.fill_(1.0)
    segments = [Segment(0, numel)]
    return lambda threads: kernels.adamw(weight, remainder, moments, gradient, segments, threads=threads)
