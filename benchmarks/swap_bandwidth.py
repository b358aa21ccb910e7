"""How much of the disk's bandwidth do we reach, for reads, writes and both at once?

Ours: records between the swap space and huge-page memory through the I/O engine. Rivals on the very same
file: fio, tuned, at the same size, block and depth; DeepSpeed's aio handle at the best settings found, moving
one of our records a call, or half of everything. Mixed traffic is half reads, half writes.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

from benchmarks.common import Candidate, Report, RivalMissing, Series, floor_deviates, measure, parser
from benchmarks.rivals import fio
from benchmarks.rivals.deepspeed_aio import DeepSpeedAio
from benchmarks.swap import Swapper
from offload.io.aio import AioOptions

KINDS = ("read", "write", "mixed")


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__, disk=True)
    arguments.add_argument("--size-bytes", type=int, default=1 << 30, help="moved in each run")
    arguments.add_argument("--record-bytes", type=int, default=64 << 20)
    arguments.add_argument("--block-bytes", type=int, default=2 << 20)
    arguments.add_argument("--depth", type=int, default=32)
    arguments.add_argument("--backend", default="auto")
    options = arguments.parse_args()
    report = Report("swap_bandwidth", __doc__, options, [options.path])
    aio = AioOptions(backend=options.backend, queue_depth=options.depth, chunk_bytes=options.block_bytes)
    with Swapper(options.path, options.size_bytes, options.record_bytes, aio) as swapper:
        report.figure("our backend", swapper.backend)
        report.figure("fio", fio.version())
        deepspeed = open_deepspeed(report, swapper)
        for kind in KINDS:
            ask(report, kind, swapper, deepspeed, options)
    report.finish()


def open_deepspeed(report: Report, swapper: Swapper) -> DeepSpeedAio | None:
    """DeepSpeed's handle, or None and the reason in the report."""
    try:
        return DeepSpeedAio(swapper.path)
    except RivalMissing as error:
        report.lack("deepspeed", str(error))
        return None


def ask(
    report: Report, kind: str, swapper: Swapper, deepspeed: DeepSpeedAio | None, options: argparse.Namespace
) -> None:
    """One kind of traffic."""
    nbytes: int = options.size_bytes
    candidates: dict[str, Candidate] = {
        "ours": lambda: getattr(swapper, kind)(nbytes),
        "fio": lambda: fio.run(kind, swapper.path, nbytes, options.block_bytes, options.depth, swapper.backend),
    }
    if deepspeed is not None:
        transfers = {"deepspeed": options.record_bytes, "deepspeed, large calls": nbytes // 2}
        for name, transfer_bytes in transfers.items():
            settings = deepspeed.best(kind, nbytes, [transfer_bytes], options.depth)
            report.figure(f"{kind}: best settings of {name}", str(settings))
            candidates[name] = partial(deepspeed.run, kind, nbytes, settings)
    series = measure(kind, candidates, rounds=options.rounds, rules=[floor_deviates("fio")], disk=options.path)
    report.keep(series, nbytes)
    for rival in list(candidates)[1:]:
        if series.has(rival):
            must = 0.90 if rival == "fio" else 1.2
            report.mark(f"{kind}: GB/s, ours / {rival}", speed(series, rival), at_least=must)
    check_moved(report, series, nbytes)


def speed(series: Series, rival: str) -> list[float]:
    """How much faster we are in each round."""
    return series.ratios(lambda r: r[rival].seconds / r["ours"].seconds)


def check_moved(report: Report, series: Series, nbytes: int) -> None:
    """What the kernel counted for us beside what we say: more is other people's traffic."""
    disks = [run["ours"].disk for run in series.rounds]
    kernel_bytes = [disk.read_bytes + disk.write_bytes for disk in disks if disk is not None]
    if kernel_bytes:
        report.figure(f"{series.name}: kernel's bytes / ours", round(statistics.median(kernel_bytes) / nbytes, 4))


if __name__ == "__main__":
    main()
