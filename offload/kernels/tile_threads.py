"""Threads for torch's operations over tiles: several tiles at a time, each on a single thread.

[Note: one each] torch spreads an operation over OpenMP's threads, which meet after every operation and spin while they
wait. If another thread computes on one of their cores, a tile takes many times as long. Square roots are spread from
2,048 elements on. So each tile runs in its own thread, for which torch uses no further threads.
`torch.set_num_threads` would set this for all threads that begin later; OpenMP's own call sets it for the calling one.

Torch's operations release the GIL, but the Python code between them does not. So tiles are four times as large as the
largest operation that torch leaves to one thread.
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
"""For fewer elements, to start the threads takes as long as the work."""


def run_in_tile_threads(work: Callable[[], None], threads: int) -> None:
    """Call `work` in `threads` threads, where torch uses no further threads; returns when all are done.

    Raises Exception: what `work` raised in one of them.
    """
    futures = [_pool().submit(work) for _ in range(threads)]
    wait(futures)
    for future in futures:
        future.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads are kept: each new one would allocate memory that the process then keeps."""
    return ThreadPoolExecutor(os.cpu_count(), "zero-tiles", initializer=_use_one_thread)


os.register_at_fork(after_in_child=_pool.cache_clear)


def has_tile_threads() -> bool:
    """True if torch computes with OpenMP, and its library can be found."""
    return _set_own_threads() is not None


def tiles_of(begin: int, end: int, numel: int) -> Iterator[slice]:
    """[begin, end) in runs of `numel`; the last may be shorter."""
    return (slice(lo, min(lo + numel, end)) for lo in range(begin, end, numel))


def _use_one_thread() -> None:
    set_own_threads = _set_own_threads()
    if set_own_threads is not None:
        torch.get_num_threads()  # torch's first query in a thread sets the number, so it must happen before
        set_own_threads(1)


@functools.cache
def _set_own_threads() -> Callable[[int], None] | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).omp_set_num_threads
    except (OSError, AttributeError):
        return None
