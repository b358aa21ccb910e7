"""A picture of a timeline: lanes as rows, waits in red and the ends of steps through all of them, throughput below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.files.trace_events import COUNTERS
from offload.timeline import COMPUTE, STALLS, TRACKS

WIDTH_PIXELS, HEIGHT_PIXELS = 1800, 1080
DOTS_PER_INCH = 200  # On a page 900 pixels wide, letters have at least 12 pixels.
FONT_POINTS, LABEL_POINTS = 9, 7
LEVELS_MAX = 3  # Levels of nested computation: the call, the unit's module, and one below.
LABEL_SHARE, LABEL_HEIGHT_MIN = 0.0075, 0.2  # Share of the picture's width per letter; least share of a lane's height.
STEP = "step"  # The span of the compute lane that ends a step.
# In the compute lane by the first word of a span's name, elsewhere by lane. From Okabe and Ito's palette, which
# colour-blind people can distinguish.
COLOURS = {
    "forward": "#56b4e9",
    "backward": "#009e73",
    STEP: "#999999",
    "recompute": "#f0e442",
    "stalls": "#d55e00",
    "updates": "#e69f00",
    "reads": "#0072b2",
    "writes": "#cc79a7",
    "copies": "#999999",
    "collectives": "#0072b2",
}


@dataclass(frozen=True, slots=True)
class Bar:
    lane: str
    row: int
    name: str
    begin_ms: float
    width_ms: float

    @property
    def colour(self) -> str:
        return COLOURS.get(self.name.partition(" ")[0] if self.lane == COMPUTE else self.lane, "0.6")


def require_matplotlib() -> None:
    """Raise ConfigError with the install command if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "drawing a timeline needs matplotlib, which is not installed: pip install matplotlib, or leave --png "
            "out and open the JSON in ui.perfetto.dev"
        ) from error


def summary(document: Mapping[str, Any]) -> str:
    """One line: steps, seconds, share of exposed wait, bytes and GB/s (while at least one transfer was in flight).

    Raises ConfigError: the document was not written by an engine.
    """
    try:
        facts = document["otherData"]
        seconds, steps, exposed = facts["seconds"], facts["steps"], facts["exposed_wait_seconds"]
        moved = {
            "read": (facts["nvme_read_bytes"], facts["nvme_read_seconds"]),
            "written": (facts["nvme_write_bytes"], facts["nvme_write_seconds"]),
        }
        dropped = facts["spans_dropped"]
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the file is not a timeline of an engine, as zero trace records it ({type(error).__name__}: {error})"
        ) from error
    parts = [f"{steps} step{'s' * (steps != 1)} in {seconds:.3f} s", f"exposed wait {exposed / max(seconds, 1e-9):.0%}"]
    for word, (nbytes, busy) in moved.items():
        if nbytes:
            parts.append(f"{word} {nbytes / 1e9:.2f} GB at {nbytes / max(busy, 1e-9) / 1e9:.2f} GB/s")
    if dropped:
        parts.append(f"{dropped:,} oldest spans dropped")
    return ", ".join(parts)


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture, WIDTH_PIXELS x HEIGHT_PIXELS, as PNG.

    Raises ConfigError: matplotlib is missing, or the document was not written by an engine.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    title, facts = summary(document), document["otherData"]
    size = WIDTH_PIXELS / DOTS_PER_INCH, HEIGHT_PIXELS / DOTS_PER_INCH
    with rc_context({"font.size": FONT_POINTS}):
        figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
        lanes, speed = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        figure.suptitle(title, fontsize=FONT_POINTS)
        spans = list(bars(document))
        _draw_lanes(lanes, spans, facts["seconds"] * 1e3)
        _draw_throughput(speed, document)
        _draw_steps((lanes, speed), spans, facts["steps_before"], facts["steps"])
        figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def bars(document: Mapping[str, Any]) -> Iterator[Bar]:
    """Every span, with its row in its lane: the number of its thread, or in the compute lane its nesting depth."""
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    first = {lane: min((e["tid"] for e in events if e["cat"] == lane), default=0) for lane in TRACKS}
    open_ends: list[float] = []
    for event in sorted(events, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        lane, begin, width = event["cat"], event["ts"] / 1e3, event["dur"] / 1e3
        row = event["tid"] - first[lane]
        if lane == COMPUTE:
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            row = len(open_ends)
            open_ends.append(begin + width)
        yield Bar(lane, row, event["name"], begin, width)


def _draw_lanes(axes: Any, spans: list[Bar], end_ms: float) -> None:
    used = [lane for lane in TRACKS if any(bar.lane == lane for bar in spans)]
    for number, lane in enumerate(used):
        lane_spans = [bar for bar in spans if bar.lane == lane and (lane != COMPUTE or bar.row < LEVELS_MAX)]
        rows = max(bar.row for bar in lane_spans) + 1
        for row in range(rows):
            line = [bar for bar in lane_spans if bar.row == row]
            _draw_row(axes, line, -number - 0.05 - 0.9 * row / rows, 0.85 / rows, end_ms)
        axes.axhline(-number - 1, color="0.85", lw=0.5)
    stalls = [(bar.begin_ms, bar.width_ms) for bar in spans if bar.lane == STALLS]
    axes.broken_barh(stalls, (-len(used), len(used)), facecolors=COLOURS[STALLS], alpha=0.15, zorder=0)
    axes.set_yticks([-number - 0.5 for number in range(len(used))], used)
    axes.set(ylim=(-max(len(used), 1), 0), xlim=(0, max(end_ms, 1e-3)))


def _draw_steps(panels: tuple[Any, Any], spans: list[Bar], steps_before: int, count: int) -> None:
    """Draw a line through both panels at the end of each of `count` steps, and the step's number above."""
    begin_ms = 0.0
    calls = sorted((bar for bar in spans if bar.lane == COMPUTE and bar.name == STEP), key=lambda bar: bar.begin_ms)
    calls_per_step = max(len(calls) // max(count, 1), 1)  # `step()` is called once for each micro-batch
    for number, step in enumerate(calls[calls_per_step - 1 :: calls_per_step], start=steps_before + 1):
        end_ms = step.begin_ms + step.width_ms
        for axes in panels:
            axes.axvline(end_ms, color="0", lw=0.9, ls="--")
        panels[0].text((begin_ms + end_ms) / 2, 0.03, f"step {number}", ha="center", va="bottom")
        begin_ms = end_ms


def _draw_row(axes: Any, line: list[Bar], top: float, height: float, end_ms: float) -> None:
    spans, colours = [(bar.begin_ms, bar.width_ms) for bar in line], [bar.colour for bar in line]
    # The thin edge keeps bars that are narrower than a pixel visible.
    axes.broken_barh(spans, (top - height, height), facecolors=colours, edgecolors=colours, lw=0.2)
    for bar in line:
        if height > LABEL_HEIGHT_MIN and bar.width_ms > LABEL_SHARE * len(bar.name) * end_ms:
            place = bar.begin_ms + bar.width_ms / 2, top - height / 2
            axes.text(*place, bar.name, ha="center", va="center", fontsize=LABEL_POINTS, clip_on=True)


def _draw_throughput(axes: Any, document: Mapping[str, Any]) -> None:
    for name, lane in COUNTERS.items():
        points = [(e["ts"] / 1e3, e["args"]["GB/s"]) for e in document["traceEvents"] if e["name"] == name]
        if points:
            milliseconds, rates = zip(*points, strict=True)
            axes.step(milliseconds, rates, where="post", color=COLOURS[lane], label=lane)
            axes.fill_between(milliseconds, rates, step="post", color=COLOURS[lane], alpha=0.3)
    if axes.has_data():
        axes.legend(loc="upper right", ncols=2, fontsize=LABEL_POINTS)
    axes.set(xlabel="time [ms]", ylabel="NVMe [GB/s]")
    axes.set_ylim(bottom=0)
