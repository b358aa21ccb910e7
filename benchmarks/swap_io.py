"""How fast do sub-group records move, by backend, and what is the floor of a step on this disk?

Reads and writes of record-sized ranges through the swap space, as the optimizer step does them, with
huge-page buffers. The floor of a step is bytes read / read speed + bytes written / write speed: the
disk moves mixed traffic no faster than one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable

import torch

from benchmarks.common import interleaved, report
from offload.aio import AioOptions, open_aio
from offload.errors import ConfigError
from offload.pinned import map_host, tensor_over
from offload.planes import Disk
from offload.swapfile import SwapSpace


def open_disk(backend: str, path: str, nbytes: int) -> Disk | None:
    """A disk on one backend; None where the kernel lacks it."""
    try:
        aio = open_aio(AioOptions(backend=backend))
    except ConfigError as error:
        print(f"# {backend} is left out: {error}")
        return None
    return Disk(aio, SwapSpace([path], nbytes))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="folder on the disk in question")
    parser.add_argument("--records", type=int, default=16)
    parser.add_argument("--record-bytes", type=int, default=48 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    total = options.records * options.record_bytes
    buffers = [tensor_over(map_host(options.record_bytes)) for _ in range(4)]
    loop = asyncio.new_event_loop()

    def mover(disk: Disk, write: bool) -> Callable[[], None]:
        async def lane(buffer: torch.Tensor, first: int) -> None:
            for record in range(first, options.records, len(buffers)):
                move = disk.write if write else disk.read
                await move(record * options.record_bytes, buffer)

        async def everything() -> None:
            await asyncio.gather(*(lane(buffer, first) for first, buffer in enumerate(buffers)))

        return lambda: loop.run_until_complete(everything())

    disks = {name: open_disk(name, options.path, total) for name in ("io_uring", "libaio", "threads", "aiofiles")}
    candidates = {
        f"{name} {'write' if write else 'read'}": mover(disk, write)
        for write in (True, False)
        for name, disk in disks.items()
        if disk is not None
    }
    for name, samples in interleaved(candidates, options.rounds).items():
        median = sorted(samples)[len(samples) // 2]
        report("how fast do records move?", name, samples, GB_per_second=round(total / median / 1e9, 3))
    for disk in disks.values():
        if disk is not None:
            disk.aio.close()
            disk.swap.close()


if __name__ == "__main__":
    main()
