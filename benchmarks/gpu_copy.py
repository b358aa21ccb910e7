"""How fast are copies between our pinned host memory and a GPU, next to cudaMemcpyAsync of the same size?

Ours go through the arena's memory (mapped on huge pages, then registered) and the engine's own streams, with a fence
each. The runtime's use memory that it has allocated itself. Exits with status 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import torch

from benchmarks.common import Report, RivalMissing, measure, parser
from benchmarks.gpu import require_gpu
from benchmarks.rivals.cudart import Cudart
from offload.arena import Arena
from offload.streams import DeviceStreams

DIRECTIONS = ("to the device", "to the host", "both ways")


def ours(
    device: torch.device, transfer_bytes: int, total_bytes: int, direction: str, until: ExitStack
) -> Callable[[], None]:
    """One run moves `total_bytes` in transfers of `transfer_bytes`; the memory is kept until `until` ends."""
    streams = DeviceStreams(device)
    host = Arena("host", 2 * transfer_bytes, "none", torch.device("cpu"), pinned=True)
    memory = Arena("device", 2 * transfer_bytes, "none", device)
    for resource in (memory, host, streams):  # closed the other way round: first nothing moves any more
        until.callback(resource.close)
    hosts = [host.lease(transfer_bytes, "benchmark").data for _ in range(2)]
    devices = [memory.lease(transfer_bytes, "benchmark").data for _ in range(2)]

    async def run() -> None:
        fences = []
        for _ in range(total_bytes // transfer_bytes):
            if direction != "to the host":
                fences.append(streams.copy_in(devices[0], hosts[0]))
            if direction != "to the device":
                fences.append(streams.copy_out(hosts[1], devices[1]))
        await streams.reached(*fences[-2:])

    return lambda: asyncio.run(run())


def runtime(device: torch.device, transfer_bytes: int, total_bytes: int, direction: str) -> Callable[[], None]:
    """The same with the runtime alone. Raises RivalMissing."""
    copying, fetching = Cudart(), Cudart()
    hosts = [torch.empty(transfer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(transfer_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def run() -> None:
        for _ in range(total_bytes // transfer_bytes):
            if direction != "to the host":
                copying.copy(devices[0], hosts[0])
            if direction != "to the device":
                fetching.copy(hosts[1], devices[1])
        copying.wait()
        fetching.wait()

    return run


def ask(report: Report, device: torch.device, options: argparse.Namespace, transfer_bytes: int, direction: str) -> None:
    """One size and direction."""
    given = device, transfer_bytes, options.total_bytes, direction
    with ExitStack() as until:
        compare(report, options.rounds, given, until)


def compare(report: Report, rounds: int, given: tuple[torch.device, int, int, str], until: ExitStack) -> None:
    """Both, turn by turn."""
    _, transfer_bytes, total_bytes, direction = given
    candidates = {"ours": ours(*given, until)}
    try:
        candidates["cudaMemcpyAsync"] = runtime(*given)
    except RivalMissing as error:
        report.lack("cudaMemcpyAsync", str(error))
    name = f"{transfer_bytes >> 20} MiB {direction}"
    series = measure(name, candidates, rounds=rounds, warmups=2)
    moved_bytes = total_bytes * (2 if direction == "both ways" else 1)
    report.keep(series, moved_bytes)
    report.figure(f"{name}: GB/s, ours", round(moved_bytes / series.median("ours") / 1e9, 2))
    if len(candidates) > 1 and series.has("cudaMemcpyAsync"):
        ratios = series.ratios(lambda r: r["cudaMemcpyAsync"].seconds / r["ours"].seconds)
        report.mark(f"{name}: GB/s, ours / cudaMemcpyAsync", ratios)


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--transfer-bytes", type=int, nargs="+", default=[2 << 20, 32 << 20, 256 << 20])
    arguments.add_argument("--total-bytes", type=int, default=1 << 30)
    options = arguments.parse_args()
    device = require_gpu()
    report = Report("gpu_copy", __doc__, options)
    for transfer_bytes in options.transfer_bytes:
        for direction in DIRECTIONS:
            ask(report, device, options, transfer_bytes, direction)
    report.finish()


if __name__ == "__main__":
    main()
