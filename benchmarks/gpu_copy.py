"""How near are copies between our pinned host memory and a GPU to what PCIe gives, that is to large runtime copies?

Ours go through the pool's memory (mapped on huge pages, then registered) and the engine's own streams, with an event
each. What PCIe gives is cudaMemcpyAsync of 256 MiB, in memory that the runtime has allocated itself; its copies of our
size stand beside, and say how much of a distance is the size's. Exits with status 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.common import Candidate, Report, RivalMissing, Round, measure, parser
from benchmarks.gpu import require_gpu
from benchmarks.rivals.cudart import Cudart
from offload.memory.pool import BlockPool
from offload.streams import DeviceStreams

DIRECTIONS = {"to the device": "to_device", "to the host": "to_host", "both ways": "both_ways"}
"""And the names of their rates in the JSON."""
TRANSFER_BYTES = (512 << 10, 2 << 20, 8 << 20, 32 << 20)
LARGE_BYTES = 256 << 20
MUST = 0.95
"""Of what PCIe gives."""


def ours(
    device: torch.device, transfer_bytes: int, total_bytes: int, direction: str, until: ExitStack
) -> Callable[[], None]:
    """One run moves `total_bytes` in transfers of `transfer_bytes`; the memory is freed when `until` ends."""
    streams = DeviceStreams(device)
    host = BlockPool("host", 2 * transfer_bytes, "none", torch.device("cpu"), pinned=True)
    memory = BlockPool("device", 2 * transfer_bytes, "none", device)
    for resource in (memory, host, streams):  # closed the other way round: first nothing moves any more
        until.callback(resource.close)
    hosts = [host.allocate(transfer_bytes, "benchmark").data for _ in range(2)]
    devices = [memory.allocate(transfer_bytes, "benchmark").data for _ in range(2)]

    async def run() -> None:
        events = []
        for _ in range(total_bytes // transfer_bytes):
            if direction != "to the host":
                events.append(streams.copy_to_device(devices[0], hosts[0]))
            if direction != "to the device":
                events.append(streams.copy_to_host(hosts[1], devices[1]))
        await streams.synchronize(*events[-2:])

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


def size_name(nbytes: int) -> str:
    """Such as "0.5 MiB"."""
    return f"{nbytes / (1 << 20):g} MiB"


def ask(report: Report, device: torch.device, options: argparse.Namespace, direction: str) -> None:
    """One direction: every size of ours and of the runtime's, turn by turn."""
    total_bytes = options.total_bytes
    with ExitStack() as until:
        candidates: dict[str, Candidate] = {
            f"ours, {size_name(nbytes)}": ours(device, nbytes, total_bytes, direction, until)
            for nbytes in options.transfer_bytes
        }
        try:
            for nbytes in (*options.transfer_bytes, LARGE_BYTES):
                candidates[f"runtime, {size_name(nbytes)}"] = runtime(device, nbytes, total_bytes, direction)
        except RivalMissing as error:
            report.lack("cudaMemcpyAsync", str(error))
        series = measure(direction, candidates, rounds=options.rounds, warmups=2)
    moved_bytes = total_bytes * (2 if direction == "both ways" else 1)
    report.keep(series, moved_bytes)
    large = f"runtime, {size_name(LARGE_BYTES)}"
    if large not in candidates or not series.has(large):
        return
    rates = report.figures.setdefault("rates", {})
    rates[DIRECTIONS[direction]] = moved_bytes / series.median(large)
    for nbytes in options.transfer_bytes:
        name = size_name(nbytes)
        ratios = series.ratios(partial(speed_over, large, f"ours, {name}"))
        report.mark(f"{name} {direction}: ours / PCIe", ratios, at_least=MUST)
        if series.has(f"runtime, {name}"):
            ratios = series.ratios(partial(speed_over, large, f"runtime, {name}"))
            report.mark(f"{name} {direction}: the runtime's / PCIe", ratios)


def speed_over(floor: str, name: str, this: Round) -> float:
    """How much of the floor's speed a candidate had in one round."""
    return this[floor].seconds / this[name].seconds


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--transfer-bytes", type=int, nargs="+", default=list(TRANSFER_BYTES))
    arguments.add_argument("--total-bytes", type=int, default=1 << 30)
    options = arguments.parse_args()
    device = require_gpu()
    report = Report("gpu_copy", __doc__, options)
    for direction in DIRECTIONS:
        ask(report, device, options, direction)
        report.finish()


if __name__ == "__main__":
    main()
