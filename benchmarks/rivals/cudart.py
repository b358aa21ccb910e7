"""cudaMemcpyAsync itself, by way of the runtime library that torch has loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from benchmarks.common import RivalMissing

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


class Cudart:
    """The runtime's copy on a stream of its own.

    Raises:
        RivalMissing: the library is not in this process.
    """

    def __init__(self) -> None:
        torch.cuda.init()
        names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
        if not names:
            raise RivalMissing("torch has loaded no libcudart")
        self._copy = ctypes.CDLL(sorted(names)[0]).cudaMemcpyAsync
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Have `source` copied to `target`, of the same size; returns at once.

        Raises:
            RivalMissing: the runtime refused.
        """
        kind = HOST_TO_DEVICE if target.device.type == "cuda" else DEVICE_TO_HOST
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        status = self._copy(target.data_ptr(), source.data_ptr(), source.nbytes, kind, stream)
        if status != 0:
            raise RivalMissing(f"cudaMemcpyAsync: status {status}")

    def wait(self) -> None:
        """Return once all is copied."""
        self._stream.synchronize()
