"""Does peak memory stay at the plan, whatever the size of the model?

Models of 110 M, 440 M and 1.3 B parameters with everything on NVMe and one fixed memory budget; and published shapes,
dense, with LoRA and with experts, at three sizes with no budget and the default persistence threshold. The bound is
what was resident before the plan was made, the plan's host and device bytes, and the activations, which are measured
with plain torch on one layer of the same model (resident growth) and on a second one (what autograd keeps for it).
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import Report, Series, measure, parser, run_child
from benchmarks.contestants import Bench, add_arguments
from benchmarks.published import KINDS, WIDTHS, RealRun
from benchmarks.shapes import SHAPES

PEAK_MARK = 1.05


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, rounds=1, disk=True)
    add_arguments(parsed, warmup=2, steps=1)
    parsed.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=["110M", "440M", "1.3B"])
    parsed.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parsed.add_argument("--sizes", nargs="+", choices=list(WIDTHS), default=list(WIDTHS))
    parsed.add_argument("--host", default="800MB", help="memory_budget.host of every run")
    parsed.add_argument("--device", default="1200MB", help="memory_budget.device of every run")
    options = parsed.parse_args()
    report = Report("memory_flat", __doc__, options, folders=[options.path])
    bench = Bench(options)
    for name in options.shapes:
        ask_gpt(report, bench, options, name)
    for kind, size in product(options.kinds, options.sizes):
        ask_published(report, options, f"{kind}, {size}", KINDS[kind].of_width(*WIDTHS[size]))
    report.finish()


def ask_gpt(report: Report, bench: Bench, options: argparse.Namespace, name: str) -> None:
    """One size of model."""
    shape = SHAPES[name]
    budget = {"host": options.host, "device": options.device}
    candidates = {"ours": bench.ours("nvme", budget, shape=shape), "activations": bench.activations(shape)}
    series = measure(name, candidates, rounds=options.rounds, warmups=0, disk=options.path)
    compare_with_plan(report, series, f"{name} ({shape.numel / 1e6:,.0f} M parameters)")


def ask_published(report: Report, options: argparse.Namespace, name: str, run: RealRun) -> None:
    """A published shape at one size, as a user would run it."""
    spec = run.spec(Path(options.path).resolve(), warmup=options.warmup, steps=options.steps)

    def child(contestant: str) -> dict[str, Any]:
        figures = run_child(["-m", "benchmarks.shaped_worker", json.dumps({**spec, "contestant": contestant})])
        figures.pop("event", None)
        return figures

    candidates = {key: partial(child, key) for key in ("ours", "activations")}
    series = measure(name, candidates, rounds=options.rounds, warmups=0, disk=options.path)
    numel = series.rounds[0]["ours"].figures["parameters"]
    compare_with_plan(report, series, f"{name} ({numel / 1e6:,.0f} M parameters)")


def compare_with_plan(report: Report, series: Series, name: str) -> None:
    """Peak against its bound, in every round."""
    report.keep(series)
    ratios = []
    for r in series.rounds:
        figures, activations = r["ours"].figures, r["activations"].figures["activation_bytes"]
        plan = figures["plan_bytes"]["host"] + figures["plan_bytes"]["device"]
        bound = figures["baseline_rss_bytes"] + plan + activations
        ratios.append(figures["peak_rss_bytes"] / bound)
        bytes_by_part = {
            "peak": figures["peak_rss_bytes"],
            "before the plan": figures["baseline_rss_bytes"],
            "plan": plan,
            "activations": activations,
        }
        text = ", ".join(f"{part} {nbytes / 1e6:,.0f} MB" for part, nbytes in bytes_by_part.items())
        report.figure(name, bytes_by_part, text)
    report.mark(f"{name}: peak / (before the plan + plan + activations)", ratios, at_most=PEAK_MARK)


if __name__ == "__main__":
    main()
