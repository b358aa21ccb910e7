"""What does the host give an engine on a GPU: does the update on all cores run at the speed of its memory?

The bound is a C loop over the same streams without the maths. Beside it the disk under the swap files, reading, writing
and both. With gpu_copy's, these rates are what the floors of gpu_step are made of. Needs no GPU.
"""

from __future__ import annotations

import argparse
import os
from functools import partial

from benchmarks.adam import BYTES_SPLIT, bound_step, our_step
from benchmarks.common import Candidate, Report, RivalMissing, measure, parser
from benchmarks.swap import Swapper
from offload.io.aio import AioOptions

MUST = 0.8
"""Of the bound's speed, on all cores."""
RECORD_BYTES = 64 << 20
DISK_ROUNDS = 3
"""A slow disk takes seconds for one."""


def ask_memory(report: Report, options: argparse.Namespace) -> None:
    """The update, and its bound."""
    threads = len(os.sched_getaffinity(0))
    numel = options.numel // (64 * threads) * 64 * threads
    candidates: dict[str, Candidate] = {"ours": our_step(numel, threads)}
    try:
        candidates["bound"] = bound_step(numel, threads)
    except RivalMissing as error:
        report.lack("bound", str(error))
    name = f"update on {threads} threads"
    series = measure(name, candidates, rounds=options.rounds, warmups=3)
    moved_bytes = BYTES_SPLIT * numel
    report.keep(series, moved_bytes)
    if "bound" in candidates and series.has("bound"):
        report.figures.setdefault("rates", {})["host_memory"] = moved_bytes / series.median("bound")
        ratios = series.ratios(lambda r: r["bound"].seconds / r["ours"].seconds)
        report.mark("update on all cores: speed, ours / bound", ratios, at_least=MUST)


def ask_disk(report: Report, options: argparse.Namespace) -> None:
    """Each kind of traffic alone."""
    aio = AioOptions(queue_depth=32, chunk_bytes=2 << 20)
    with Swapper(options.path, options.size_bytes, min(RECORD_BYTES, options.size_bytes), aio) as swapper:
        report.figure("backend", swapper.backend)
        for kind in ("read", "write", "mixed"):
            run = partial(getattr(swapper, kind), options.size_bytes)
            series = measure(f"disk: {kind}", {"ours": run}, rounds=DISK_ROUNDS)
            report.keep(series, options.size_bytes)
            report.figures.setdefault("rates", {})[f"disk_{kind}"] = options.size_bytes / series.median("ours")
            report.finish()


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__, rounds=5, disk=True)
    arguments.add_argument("--numel", type=int, default=64 << 20)
    arguments.add_argument("--size-bytes", type=int, default=1 << 30, help="moved in each run on the disk")
    options = arguments.parse_args()
    report = Report("gpu_host", __doc__, options, [options.path])
    ask_memory(report, options)
    report.finish()
    ask_disk(report, options)


if __name__ == "__main__":
    main()
