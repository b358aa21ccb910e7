"""Threads for torch's operations over tiles: several at a time, each with one thread of torch's.

[Note: one each] torch spreads an operation over OpenMP's threads, which meet behind every operation and spin for each
other: where somebody else computes on a core, a tile then takes many times as long. Square roots are spread from 2,048
elements on. So tiles run in threads of their own, for which torch takes no others. `torch.set_num_threads` would say so
for every thread that begins later; OpenMP's own call says it for the thread that calls.

Torch's operations let other threads of Python run, but what is between them does not: tiles are four times as large as
torch would leave to one thread by itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch

TILE_NUMEL = 1 << 17
WORTH_THREADS_NUMEL = 4 * TILE_NUMEL
"""For fewer elements, threads take as long to begin."""


def run_alone(work: Callable[[], None], threads: int) -> None:
    """Call `work` from so many threads, each without torch's others; returns when all are done.

    Raises:
        Exception: what `work` raised in one of them.
    """
    running = [_pool().submit(work) for _ in range(threads)]
    wait(running)
    for each in running:
        each.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads that stay: each new one would take memory for what it allocates, and leave it with the process."""
    return ThreadPoolExecutor(os.cpu_count(), "zero-tiles", initializer=_take_one)


os.register_at_fork(after_in_child=_pool.cache_clear)


def can_run_alone() -> bool:
    """True where torch computes with OpenMP, and says where."""
    return _set_own_threads() is not None


def tiles_of(begin: int, end: int, numel: int) -> Iterator[slice]:
    """[begin, end) in runs of `numel`, the last may be shorter."""
    return (slice(lo, min(lo + numel, end)) for lo in range(begin, end, numel))


def _take_one() -> None:
    set_own_threads = _set_own_threads()
    if set_own_threads is not None:
        torch.get_num_threads()  # torch's first look in a thread sets the number: it must not come later
        set_own_threads(1)


@functools.cache
def _set_own_threads() -> Callable[[int], None] | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).omp_set_num_threads
    except (OSError, AttributeError):
        return None
