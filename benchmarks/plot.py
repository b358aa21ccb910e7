"""Draws step time and peak memory against model size, for us and the rivals, from results of `train_step`.

`python -m benchmarks.plot OUT.png RESULT.json ...`: one result per model size; contestants that a result lacks are
left out of it. Every figure is the median of its runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LABELS = {
    ("nvme", "lean"): "ours, NVMe, lean",
    ("nvme", "at a third"): "ours, NVMe, a third of DeepSpeed's memory",
    ("nvme", "auto"): "ours, NVMe, all free memory",
    ("nvme", "deepspeed"): "DeepSpeed, NVMe",
    ("cpu", "lean"): "ours, host memory",
    ("cpu", "deepspeed"): "DeepSpeed, host memory",
    ("nvme", "compute floor"): "floor: forward and backward alone",
    ("nvme", "read + write alone"): "floor: the step's bytes alone",
}
"""(series, candidate) in the order of the legend."""


@dataclass(frozen=True, slots=True)
class Point:
    """One contestant at one size of model."""

    numel: int
    step_seconds: float
    peak_rss_bytes: float | None
    """None for the disk alone."""


def points_of(results: Sequence[dict[str, Any]]) -> dict[str, list[Point]]:
    """Label -> points by growing model size."""
    found: dict[str, list[Point]] = {}
    for result in sorted(results, key=lambda r: int(r["figures"]["parameters"])):
        for series in result["series"]:
            for candidate in series["tried"][0]:
                label = LABELS.get((series["name"], candidate))
                if label is None:
                    continue
                runs = [r[candidate] for r in counted(series)]
                peaks = [run["figures"]["peak_rss_bytes"] for run in runs]
                found.setdefault(label, []).append(
                    Point(
                        result["figures"]["parameters"],
                        statistics.median(run["seconds"] for run in runs),
                        None if candidate == "read + write alone" else statistics.median(peaks),
                    )
                )
    return {label: found[label] for label in LABELS.values() if label in found}


def counted(series: dict[str, Any]) -> list[dict[str, Any]]:
    """The rounds of a series in a JSON that count: the undisturbed ones, or all if those are too few."""
    rounds = zip(series["tried"], series["complaints"], strict=True)
    return list(series["tried"]) if series["is_contended"] else [r for r, complaint in rounds if complaint is None]


def draw(lines: dict[str, list[Point]], out: Path) -> None:
    """Two panels side by side, both with logarithmic axes: sizes and times span decades."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for label, points in lines.items():
        style = ":" if label.startswith("floor") else "--" if label.startswith("DeepSpeed") else "-"
        color = f"C{list(LABELS.values()).index(label)}"
        sizes = [point.numel / 1e6 for point in points]
        time.plot(sizes, [point.step_seconds for point in points], style, marker="o", label=label, color=color)
        peaks = [point.peak_rss_bytes / 1e9 for point in points if point.peak_rss_bytes is not None]
        if len(peaks) == len(sizes) and not label.startswith("floor"):
            memory.plot(sizes, peaks, style, marker="o", color=color)
    ticks = sorted({point.numel / 1e6 for points in lines.values() for point in points})
    for axes, title in ((time, "step time [s]"), (memory, "peak resident memory [GB]")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_xlabel("parameters [million]")
        axes.set_title(title)
        axes.grid(visible=True, alpha=0.3)
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def main() -> None:
    """Read the results and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.png")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    options = parser.parse_args()
    lines = points_of([json.loads(path.read_text(encoding="utf-8")) for path in options.results])
    if not lines:
        raise SystemExit("the results have no run of train_step in them")
    draw(lines, options.out)


if __name__ == "__main__":
    main()
