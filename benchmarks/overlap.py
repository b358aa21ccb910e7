"""How much of a step is spent waiting for the disk, as a step computes more?

Weights and states on NVMe, 128 to 4096 tokens in a step. Once a forward takes longer than the update's bytes need on
the disk, there is time to hide them in, and next to nothing may be left to wait for.
"""

from __future__ import annotations

import argparse

from benchmarks.common import Report, measure, parser
from benchmarks.contestants import Bench, add_arguments, floor_contended, longer

EXPOSED_MARK = 0.05
UPDATE_BYTES = 12
"""Read, and written, of each parameter by an update: weight, remainder, two moments."""


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, disk=True)
    add_arguments(parsed, warmup=2, steps=3)
    parsed.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096])
    options = parsed.parse_args()
    report = Report("overlap", __doc__, options, folders=[options.path])
    bench = Bench(options)
    for tokens in options.tokens:
        ask(report, bench, options, tokens)
    report.finish()


def ask(report: Report, bench: Bench, options: argparse.Namespace, tokens: int) -> None:
    """One length of step."""
    shape = longer(bench.shape, tokens)
    candidates = {
        "ours": bench.ours("nvme", shape=shape),
        "compute floor": bench.compute_floor(shape),
        "update's bytes alone": bench.disk_floor(UPDATE_BYTES * shape.numel, UPDATE_BYTES * shape.numel),
    }
    rules = [floor_contended("compute floor")]
    series = measure(f"{tokens} tokens", candidates, rounds=options.rounds, warmups=0, rules=rules, disk=options.path)
    report.keep(series)
    forward = series.median("compute floor", "forward_seconds")
    update = series.median("update's bytes alone")
    hides = forward >= update
    report.figure(
        f"{tokens} tokens: forward and update I/O alone",
        {"forward_seconds": forward, "update_io_seconds": update},
        f"{forward:.2f} s and {update:.2f} s: the forward {'can' if hides else 'cannot'} hide it",
    )
    shares = series.ratios(lambda r: r["ours"].figures["exposed_wait_seconds"] / r["ours"].seconds)
    report.mark(f"{tokens} tokens: exposed wait / step time", shares, at_most=EXPOSED_MARK if hides else None)


if __name__ == "__main__":
    main()
