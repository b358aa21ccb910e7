"""DeepSpeed's aio handle on the same file, with the best of its settings.

[Note: its buffers] It locks memory of 4 KiB pages. How fast a transfer is depends on how many of them happen to
be neighbours: on one machine reads ran at 0.8 or at 2.4 GB/s with nothing changed but the buffer. Large
buffers are luckier, because the kernel hands out its scattered pages first. So every run draws new ones.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import RivalMissing
from benchmarks.rivals import deepspeed_setup

BLOCK_BYTES = (1 << 20, 2 << 20, 8 << 20)
PARALLEL = (1, 2)
"""intra_op_parallelism: threads that share one transfer; 4 were not better."""
TRIES = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one handle; submission is batched and events overlap, which is faster than not."""

    transfer_bytes: int
    """Size of its buffers: one call moves one."""
    block_bytes: int
    depth: int
    parallel: int

    def __str__(self) -> str:
        return (
            f"{self.transfer_bytes >> 20} MiB a call, block_size {self.block_bytes >> 20} MiB, "
            f"queue_depth {self.depth}, intra_op_parallelism {self.parallel}"
        )


class DeepSpeedAio:
    """One handle for reads and one for writes, as its swapper has, and buffers it has locked itself.

    Args:
        path: an existing file.

    Raises:
        RivalMissing: the operator is not there.
    """

    def __init__(self, path: str) -> None:
        import torch

        self._op = deepspeed_setup.require("async_io")["async_io"]
        self._path = path
        self._like = torch.empty(0, dtype=torch.uint8)
        self._noise = torch.empty(16 << 20, dtype=torch.uint8).random_()

    def best(self, kind: str, nbytes: int, transfers_bytes: Sequence[int], depth: int) -> Settings:
        """The settings that move `nbytes` fastest, of all blocks and thread counts."""
        seconds: dict[Settings, float] = {}
        grid = [
            Settings(transfer_bytes, block_bytes, depth, parallel)
            for transfer_bytes, block_bytes, parallel in itertools.product(transfers_bytes, BLOCK_BYTES, PARALLEL)
        ]
        for settings in grid * TRIES:
            took = self.run(kind, nbytes, settings)["seconds"]
            seconds[settings] = min(took, seconds.get(settings, took))
        return min(seconds, key=seconds.__getitem__)

    def run(self, kind: str, nbytes: int, settings: Settings) -> dict[str, float]:
        """Move `nbytes`: "read", "write", or "mixed" (half of each, side by side); the seconds it took.

        Raises:
            RivalMissing: a transfer failed.
        """
        fields = settings.block_bytes, settings.depth, False, True, settings.parallel
        reader, writer = self._op.aio_handle(*fields), self._op.aio_handle(*fields)
        # It copies through a buffer of its own unless it has locked the memory itself.
        buffers = [reader.new_cpu_locked_tensor(settings.transfer_bytes, self._like) for _ in range(2)]
        try:
            for at in range(0, settings.transfer_bytes, self._noise.numel()):
                part = buffers[1][at : at + self._noise.numel()]
                part.copy_(self._noise[: part.numel()])
            half = nbytes // 2
            begin = time.perf_counter()
            if kind == "mixed":
                self._start(writer, "write", half, half, buffers[1])
                self._start(reader, "read", 0, half, buffers[0])
                writer.wait()
                reader.wait()
            else:
                handle = reader if kind == "read" else writer
                self._start(handle, kind, 0, nbytes, buffers[kind == "write"])
                handle.wait()
            return {"seconds": time.perf_counter() - begin}
        finally:
            for buffer in buffers:
                reader.free_cpu_locked_tensor(buffer)

    def _start(self, handle: Any, kind: str, offset: int, nbytes: int, buffer: Any) -> None:
        """Queue all calls; they share one buffer, as nobody looks at what is read."""
        move = handle.async_pread if kind == "read" else handle.async_pwrite
        for begin in range(offset, offset + nbytes, buffer.numel()):
            part = buffer[: min(buffer.numel(), offset + nbytes - begin)]
            if move(part, self._path, begin) != 0:
                raise RivalMissing(f"async_io: {kind} of {part.numel():,} bytes failed")
