"""Draws the pictures of the documentation from the results that are kept in `benchmarks/results`.

`python -m benchmarks.plot [NAME ...]` writes `docs/pictures/NAME.png`, or all of them. A time is the median of its
runs, a peak the largest; below each picture stand the results it is drawn from and the machine that they name.
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.kept import NAMES, counted_rounds, full_runs, load_result, machine_of, rival_outcomes
from zero.tools import trace_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
WIDTH_INCHES, DOTS_PER_INCH, FONT_POINTS, NOTE_LETTERS = 8.5, 200, 9.5, 140
"""A page shows the picture about 850 pixels wide: twice as many dots, and letters of 13 pixels."""
BLUE, SKY, GREEN, ORANGE, RED, PURPLE, BLACK, GREY = (
    *("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#000000", "#999999"),
)
"""Okabe and Ito's colours: whoever is colour-blind tells them apart."""
STYLES = {
    ("nvme", "deepspeed"): ("DeepSpeed, NVMe", RED),
    ("nvme: deepspeed, leanest", "deepspeed"): ("DeepSpeed, NVMe,\nits leanest settings", ORANGE),
    ("nvme", "lean"): ("ours, NVMe, no budget", BLUE),
    ("nvme", "at a third"): ("ours, NVMe, a third of\nDeepSpeed's peak memory", BLUE),
    ("nvme", "auto"): ('ours, NVMe, host: "auto"', BLUE),
    ("cpu", "deepspeed"): ("DeepSpeed, host memory", RED),
    ("cpu", "lean"): ("ours, host memory", GREEN),
    ("nvme", "torch, fused AdamW"): ("torch's fused AdamW,\nall in host memory", PURPLE),
    ("nvme", "compute floor"): ("floor: forward and\nbackward alone", GREY),
    ("nvme", "read + write alone"): ("floor: the bytes of the\nleanest step alone", GREY),
}
"""(series, candidate) -> label and colour, in the order of the picture."""
FLOORS = ("compute floor", "read + write alone")
MARKERS = "osD^vPX*p"


@dataclass(frozen=True, slots=True)
class Point:
    """One contestant at one size of model."""

    numel: int
    step_seconds: float
    peak_rss_bytes: float | None
    """None for a floor, which holds no model in training."""


def points_of(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Point]]:
    """(series, candidate) -> points by growing model size."""
    points: dict[tuple[str, str], list[Point]] = {}
    for result in sorted(results, key=lambda r: int(r["figures"]["parameters"])):
        for series in result["series"]:
            for candidate in series["tried"][0]:
                if (series["name"], candidate) not in STYLES:
                    continue
                runs = [r[candidate] for r in counted_rounds(series)]
                peak = max(run["figures"]["peak_rss_bytes"] for run in runs)
                seconds = statistics.median(run["seconds"] for run in runs)
                point = Point(result["figures"]["parameters"], seconds, None if candidate in FLOORS else peak)
                points.setdefault((series["name"], candidate), []).append(point)
    return {key: points[key] for key in STYLES if key in points}


def draw_steps(figure: Figure, sources: Mapping[str, Any]) -> None:
    """Step time and peak memory: bars for one size of model, curves for several."""
    from matplotlib.ticker import LogLocator

    points = points_of(list(sources.values()))
    sizes = sorted({point.numel for of_one in points.values() for point in of_one})
    panels = figure.subplots(1, 2, sharey=len(sizes) == 1)
    titles = ("time of a step [s]", "peak resident memory [GB]")
    for axes, title, value in zip(panels, titles, (_seconds, _gigabytes), strict=True):
        if len(sizes) == 1:
            bars = {STYLES[key]: value(of_one[0]) for key, of_one in points.items()}
            draw_bars(axes, list(bars), list(bars.values()), ["-" if v is None else f"{v:.2f}" for v in bars.values()])
        else:
            for (key, of_one), marker in zip(points.items(), MARKERS, strict=False):
                label, colour = STYLES[key]
                coordinates = [(point.numel / 1e6, y) for point in of_one if (y := value(point)) is not None]
                line = ":" if key[1] in FLOORS else "--" if key[1] == "deepspeed" else "-"
                axes.plot(
                    *zip(*coordinates, strict=True), line, marker=marker, color=colour, label=label
                ) if coordinates else None
            axes.set(xscale="log", yscale="log", xlabel="parameters [million]")
            axes.set_xticks([size / 1e6 for size in sizes], [f"{size / 1e6:,.0f}" for size in sizes])
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        axes.set_title(title)
    if len(sizes) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    else:
        figure.suptitle(f"A GPT of {sizes[0] / 1e6:,.0f} M parameters, one rank")


def _seconds(point: Point) -> float | None:
    return point.step_seconds


def _gigabytes(point: Point) -> float | None:
    return None if point.peak_rss_bytes is None else point.peak_rss_bytes / 1e9


def draw_bars(
    axes: Axes, rows: Sequence[tuple[str, str]], values: Sequence[float | None], texts: Sequence[str]
) -> None:
    """Horizontal bars from the top down, a text behind each; `rows` are labels and colours, None is no bar."""
    places = range(len(rows))
    axes.barh(places, [value or 0.0 for value in values], color=[colour for _, colour in rows], height=0.65)
    room = 0.02 * max(value or 0.0 for value in values)
    for place, value, text in zip(places, values, texts, strict=True):
        axes.text((value or 0.0) + room, place, text, va="center")
    axes.set_yticks(places, [label for label, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.14)
    axes.set_xlim(left=0)


def draw_largest(figure: Figure, sources: Mapping[str, Any]) -> None:
    """How large a model trained in a few GiB, all of its parameters; and which ones a rival was killed with."""
    axes = figure.subplots()
    rows: list[tuple[str, str]] = []
    values: list[float] = []
    texts: list[str] = []
    for run in full_runs(sources.values()):
        rows.append((f"{NAMES[run.name][1]} in {run.limit_gib:g} GiB", BLUE))
        values.append(run.trained_numel / 1e9)
        texts.append(
            f"{run.trained_numel / 1e9:.2f} B: {run.nvme_bytes / 1e9:.0f} GB on NVMe, {run.seconds:.0f} s a step"
        )
    for numel, limit_gib, outcome in rival_outcomes(sources.values()):
        rows.append((f"DeepSpeed, GPT in {limit_gib:g} GiB", RED))
        values.append(numel / 1e9)
        texts.append(f"{numel / 1e9:.2f} B {outcome}")
    draw_bars(axes, rows, values, texts)
    for bar, (_, colour) in zip(axes.patches, rows, strict=True):
        if colour == RED:  # It did not train: an outline.
            bar.set(fill=False, edgecolor=RED, hatch="////")
    axes.set_xlim(right=1.75 * max(values))
    axes.set_xticks(range(int(max(values)) + 1))
    axes.set_xlabel("trained parameters [billion]")
    axes.set_title("The largest models tried under a limit of memory, all parameters trained")


def draw_losses(figure: Figure, sources: Mapping[str, Any]) -> None:
    """Training loss with narrower states and masters, and how far each is from fp32."""
    (result,) = sources.values()
    runs = result["runs"]
    curves = {(run["preset"], run["seed"]): run["curve"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    part_count = len(runs[0]["curve"])
    steps = [(part + 0.5) * result["steps"] / part_count for part in range(part_count)]
    losses, differences = figure.subplots(1, 2)
    colours = (BLACK, BLUE, ORANGE, GREEN, RED, PURPLE)
    lines = ("-", "--", "-.", ":", (0, (6, 1)), (0, (1, 1)))
    presets = dict.fromkeys(run["preset"] for run in runs)
    for preset, colour, line, marker in zip(presets, colours, lines, MARKERS, strict=False):
        mean = [statistics.fmean(curves[preset, seed][k] for seed in seeds) for k in range(part_count)]
        exact = [statistics.fmean(curves["fp32", seed][k] for seed in seeds) for k in range(part_count)]
        style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4, "label": preset}
        losses.plot(steps, mean, **style)
        if preset != "fp32":
            differences.plot(steps, [a - b for a, b in zip(mean, exact, strict=True)], **style)
    spread = [statistics.stdev(curves["fp32", seed][k] for seed in seeds) for k in range(part_count)]
    band = differences.fill_between(steps, [-s for s in spread], spread, color="0.88")
    differences.axhline(0, color=BLACK, lw=0.8)
    differences.legend([band], ["one standard deviation of fp32's seeds"], loc="lower right", frameon=False)
    losses.set_title("training loss [nats per byte]")
    differences.set_title("the same, minus that of fp32")
    for axes in (losses, differences):
        axes.set_xlabel("step")
    figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"A GPT of {result['params'][:-1]} M parameters, mean of {len(seeds)} seeds")


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: how it is drawn, from which results, and how high it is."""

    draw: Callable[[Figure, Mapping[str, Any]], None]
    sources: tuple[str, ...]
    height_inches: float


OF_336M = ("train_step_336M",)
ON_EPYC = ("train_step_nvme_336M_epyc",)
SIZES = ("train_step_70M", "train_step_168M", *OF_336M, "train_step_1.3B", "train_step_3B")
"""The first three of the Xeon, the others of the EPYC."""
LARGEST = ("largest_model_8B", "largest_model", "largest_model_3B")
DRAWN = {
    "step_and_memory": Picture(draw_steps, OF_336M, 4.0),
    "sizes": Picture(draw_steps, SIZES, 5.2),
    "largest_model": Picture(draw_largest, LARGEST, 3.2),
    "losses": Picture(draw_losses, ("precision_loss",), 4.2),
}
TRACE = "step_timeline"
"""Drawn as `zero trace --draw` draws it."""


def write(name: str, folder: Path) -> Path:
    """Draw one picture; returns its file."""
    target = folder / f"{name}.png"
    if name == TRACE:
        trace_plot.draw(load_result(TRACE), target)
        return target
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    picture = DRAWN[name]
    sources = {source: load_result(source) for source in picture.sources}
    with rc_context({"font.size": FONT_POINTS, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(WIDTH_INCHES, picture.height_inches), dpi=DOTS_PER_INCH, layout="constrained")
        picture.draw(figure, sources)
        files = ", ".join(f"{source}.json" for source in sources)
        note = "; ".join(filter(None, (files, machine_of(sources.values()))))
        note = textwrap.fill(note, NOTE_LETTERS)
        figure.supxlabel(note, fontsize=0.75 * FONT_POINTS, color="0.35", x=0.01, ha="left")
        figure.savefig(target, metadata={"Software": None})
    return target


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join((*DRAWN, TRACE))}")
    parser.add_argument("--folder", type=Path, default=PICTURES)
    options = parser.parse_args()
    unknown = set(options.names) - {*DRAWN, TRACE}
    if unknown:
        parser.error(f"no picture is called {', '.join(sorted(unknown))}; there are {', '.join((*DRAWN, TRACE))}")
    trace_plot.require_matplotlib()
    for name in options.names or (*DRAWN, TRACE):
        print(write(name, options.folder))


if __name__ == "__main__":
    main()
