"""Do two drives of different speed give the sum of their speeds?

Two loop devices are throttled to different speeds, so that what each can do is known and the machine's own disk is
not the limit. The swap space gets no speeds: it measures them and stripes by what it found. Each drive alone and
both together move as many bytes as their speeds require, records in flight as in an optimizer step.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Report, Round, measure, parser
from benchmarks.throttled import CannotThrottle, ThrottledDisks
from offload.array.tiered_array import Disk
from offload.io.aio import AioOptions, open_aio
from offload.io.swapfile import SwapSpace
from offload.memory.pool import BlockPool

RECORDS_IN_FLIGHT = 4
MUST = 0.90


class Drives:
    """A swap space over some folders, and records that move through it."""

    def __init__(self, folders: Sequence[Path], record_bytes: int, records: int) -> None:
        self.nbytes, self._record_bytes = record_bytes * records, record_bytes
        self.swap = SwapSpace(folders, self.nbytes)
        self._disk = Disk(open_aio(AioOptions()), self.swap)
        pool_bytes = RECORDS_IN_FLIGHT * record_bytes
        register = self._disk.aio.register_memory
        self._pool = BlockPool("benchmark", pool_bytes, "--record-bytes", torch.device("cpu"), register=register)
        self._blocks = [self._pool.allocate(record_bytes, "a record") for _ in range(RECORDS_IN_FLIGHT)]
        for block in self._blocks:
            block.data.random_()
        self._loop = asyncio.new_event_loop()

    def move(self, write: bool) -> Mapping[str, Any]:
        """Every record once."""
        move = self._disk.write if write else self._disk.read

        async def move_lane(first: int) -> None:
            for begin in range(first * self._record_bytes, self.nbytes, RECORDS_IN_FLIGHT * self._record_bytes):
                await move(begin, self._blocks[first].data)

        async def everything() -> None:
            await asyncio.gather(*(move_lane(first) for first in range(RECORDS_IN_FLIGHT)))

        self._loop.run_until_complete(everything())
        return {"moved_bytes": self.nbytes}

    def close(self) -> None:
        """Free the files and the memory."""
        self._loop.close()
        self._disk.close()
        self._pool.close()


def speed(run_of: Callable[[Round], Any], this: Round) -> float:
    """Bytes per second of one candidate in a round."""
    run = run_of(this)
    return float(run.figures["moved_bytes"]) / float(run.seconds)


def compare(report: Report, options: argparse.Namespace, disks: ThrottledDisks) -> None:
    """Each drive alone, both together, turn by turn; reading and writing."""
    speeds: list[int] = options.bytes_per_second
    drives: dict[str, Drives] = {}
    try:
        for name, folders, rate in (
            ("slow alone", disks.folders[:1], speeds[0]),
            ("fast alone", disks.folders[1:], speeds[1]),
            ("both", disks.folders, sum(speeds)),
        ):
            records = max(round(options.seconds * rate / options.record_bytes), RECORDS_IN_FLIGHT)
            drives[name] = Drives(folders, options.record_bytes, records)
        report.figure("stripes of a round, slow and fast", list(drives["both"].swap.geometry.counts))
        for kind in ("write", "read"):
            candidates = {name: partial(space.move, kind == "write") for name, space in drives.items()}
            series = measure(kind, candidates, rounds=options.rounds)
            report.keep(series)
            for name in drives:
                median = sorted(series.ratios(partial(speed, lambda r, name=name: r[name])))[len(series.rounds) // 2]
                report.figure(f"{kind}: {name}, MB/s", round(median / 1e6, 1))
            ratios = series.ratios(
                lambda r: (
                    speed(lambda r: r["both"], r)
                    / (speed(lambda r: r["slow alone"], r) + speed(lambda r: r["fast alone"], r))
                )
            )
            report.mark(f"{kind}: both / (slow alone + fast alone)", ratios, at_least=MUST)
    finally:
        for space in drives.values():
            space.close()


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__, disk=True)
    arguments.add_argument("--bytes-per-second", type=int, nargs=2, default=[100_000_000, 200_000_000])
    arguments.add_argument("--record-bytes", type=int, default=16 << 20)
    arguments.add_argument("--seconds", type=float, default=1.5, help="of each transfer, about")
    options = arguments.parse_args()
    report = Report("striping", __doc__, options, folders=[options.path])
    room_bytes = int(sum(options.bytes_per_second) * options.seconds) + (256 << 20)
    try:
        with ThrottledDisks(options.path, options.bytes_per_second, 2 * room_bytes) as disks:
            compare(report, options, disks)
    except CannotThrottle as error:
        report.lack("throttled disks", str(error))
    report.finish()


if __name__ == "__main__":
    main()
