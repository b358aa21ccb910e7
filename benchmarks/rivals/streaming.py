"""The floor of an Adam update: a C loop over the same streams, compiled for this very machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import cffi
import torch

from benchmarks.common import RivalMissing

SOURCE = Path(__file__).parent.parent / "streaming.c"
DECLARATION = """
int32_t stream_adam(uint16_t *weight, uint16_t *remainder, uint32_t *exp_avg, uint32_t *exp_avg_sq,
                    const uint16_t *gradient, int64_t numel, int64_t prefetch_numel, int32_t threads);
"""
TYPES = ("uint16_t *", "uint16_t *", "uint32_t *", "uint32_t *", "const uint16_t *")
PREFETCH_NUMEL = (0, 128, 256, 512)
"""Distances that are tried; 0 leaves it to the hardware."""
TRIES = 5


class StreamingBound:
    """Compiles at once, and runs with the prefetch distance that is fastest here.

    Raises:
        RivalMissing: there is no C compiler, or it failed.
    """

    def __init__(self) -> None:
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise RivalMissing("no C compiler")
        self._ffi = cffi.FFI()
        self._ffi.cdef(DECLARATION)
        with tempfile.TemporaryDirectory() as folder:
            library = str(Path(folder) / "streaming.so")
            flags = ["-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
            command = [compiler, *flags, "-o", library, str(SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RivalMissing(f"{compiler} failed: {done.stderr.strip()[-300:]}")
            self._library = self._ffi.dlopen(library)

    def run(self, arrays: Sequence[torch.Tensor], threads: int, prefetch_numel: int) -> None:
        """Go over weight, remainder, two moments and gradient, (N,) each, N a multiple of 64 * threads.

        Raises:
            RuntimeError: a thread could not be started, or the lengths do not fit.
        """
        numel = arrays[0].numel()
        if numel % (64 * threads) or any(array.numel() != numel for array in arrays):
            raise RuntimeError(f"streaming: expected arrays of one length, a multiple of {64 * threads}, got {numel:,}")
        pointers = [self._ffi.cast(kind, array.data_ptr()) for kind, array in zip(TYPES, arrays, strict=True)]
        status = self._library.stream_adam(*pointers, numel, prefetch_numel, threads)
        if status != 0:
            raise RuntimeError(f"streaming: {os.strerror(status)}")

    def best(self, arrays: Sequence[torch.Tensor], threads: int) -> int:
        """The prefetch distance that is fastest."""
        seconds: dict[int, float] = {}
        for distance in PREFETCH_NUMEL * TRIES:
            begin = time.perf_counter()
            self.run(arrays, threads, distance)
            took = time.perf_counter() - begin
            seconds[distance] = min(took, seconds.get(distance, took))
        return min(seconds, key=seconds.__getitem__)
