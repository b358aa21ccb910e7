"""What does a step of several micro-batches cost side by side, one after the other, and with DeepSpeed?

Weights and states are on NVMe, with no memory budget. One after the other, each micro-batch reads the weights for its
forward and for its backward. Side by side (`vertical_accumulation`, `engine.train_batch`) all micro-batches pass a unit
before the next one comes, so a step moves what a step of one micro-batch moves. The floor is the slower of as many
forwards and backwards in plain torch, and of the bytes that a step moves side by side, read and written alone.

    python -m benchmarks.accumulation --path /nvme --shape 168M --micro-batches 8 --json accumulation.json

`--dtype fp32` where the CPU has no instructions for bf16: there a step in bf16 says nothing but how slow that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common import Candidate, Report, floor_deviates, measure, parser
from benchmarks.contestants import Bench, add_arguments, floor_contended, longer
from benchmarks.rivals import deepspeed_setup

TOGETHER, IN_TURN, RIVAL = "side by side", "one after the other", "deepspeed"
COMPUTE_FLOOR, DISK_FLOOR = "compute floor", "read + write alone"
PUBLISHED = 1 / 1.96
"""Of the time of DeepSpeed's ZeRO-Infinity, for 65 B parameters on one A100: GreedySnake, arXiv:2512.17570."""


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, disk=True, rounds=3)
    add_arguments(parsed, shape="168M", warmup=1, steps=2)
    parsed.add_argument("--micro-batches", type=int, default=8)
    parsed.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parsed.add_argument("--tokens", type=int, default=16, help="of a micro-batch: few, as for a GPU that is fast (16)")
    options = parsed.parse_args()
    report = Report("accumulation", __doc__, options, folders=[options.path])
    bench = Bench(options)
    bench.shape = longer(bench.shape, options.tokens)
    report.figure("parameters", bench.shape.numel, f"{bench.shape.numel:,}")
    rival = rivals(report, bench)
    first = measure("first look", {TOGETHER: bench.ours("nvme", vertical=True)}, rounds=1, warmups=0, disk=options.path)
    report.keep(first)
    figures = first.rounds[0][TOGETHER].figures
    candidates: dict[str, Candidate] = {
        TOGETHER: bench.ours("nvme", vertical=True),
        IN_TURN: bench.ours("nvme"),
        **rival,
        COMPUTE_FLOOR: bench.compute_floor(),
        DISK_FLOOR: bench.disk_floor(figures["nvme_read_bytes"], figures["nvme_write_bytes"]),
    }
    rules = [floor_contended(COMPUTE_FLOOR), floor_deviates(DISK_FLOOR)]
    series = measure("nvme", candidates, rounds=options.rounds, warmups=0, rules=rules, disk=options.path)
    report.keep(series)
    ratios = series.ratios(lambda r: r[TOGETHER].seconds / r[IN_TURN].seconds)
    report.mark(f"{TOGETHER} / {IN_TURN}, step time", ratios)
    for name in rival:
        ratios = series.ratios(lambda r, name=name: r[TOGETHER].seconds / r[name].seconds)
        report.mark(f"{TOGETHER} / {name}, step time", ratios, at_most=PUBLISHED)
    computed = options.micro_batches
    ratios = series.ratios(
        lambda r: r[TOGETHER].seconds / max(computed * r[COMPUTE_FLOOR].seconds, r[DISK_FLOOR].seconds)
    )
    report.mark(f"{TOGETHER} / the slower floor", ratios)
    for name in (TOGETHER, IN_TURN, *rival):
        show(report, bench, name, [r[name].figures for r in series.rounds][-1])
    report.finish()


def rivals(report: Report, bench: Bench) -> dict[str, Candidate]:
    """DeepSpeed as it comes and at its best, by name; none where it is missing."""
    reason = deepspeed_setup.why_missing()
    if reason is not None:
        report.lack(RIVAL, reason)
        return {}
    return {
        f"{RIVAL}, {name}": bench.rival("nvme", settings) for name, settings in deepspeed_setup.BEST_SETTINGS.items()
    }


def show(report: Report, bench: Bench, name: str, figures: Mapping[str, Any]) -> None:
    """Bytes of a step as the kernel counts them, and peak memory."""
    bytes_per_parameter = {way: figures[f"process_{way}_bytes"] / bench.shape.numel for way in ("read", "write")}
    peak = figures["peak_rss_bytes"]
    text = (
        f"{bytes_per_parameter['read']:.1f} read, {bytes_per_parameter['write']:.1f} written, peak {peak / 1e9:.2f} GB"
    )
    report.figure(f"{name}, bytes per parameter and step", {**bytes_per_parameter, "peak_rss_bytes": peak}, text)


if __name__ == "__main__":
    main()
