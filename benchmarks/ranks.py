"""What does a step on several ranks cost, next to DeepSpeed on gloo at its best?

By default the 113 M-parameter GPT on two ranks of this machine, a thread and 1 x 128 tokens each, bf16 with an fp32
master, AdamW, clipping: ZeRO stages 1, 2 and 3 with nothing offloaded, and stage 3 with weights and states in host
memory and on NVMe. Both train the same weights on the same tokens, two batches a rank in turn; their losses are
compared. What DeepSpeed runs fastest with is in `deepspeed_setup.BEST_RANK_SETTINGS`, found by `--tune`.

    python -m benchmarks.ranks --json benchmarks/results/ranks.json
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import Report, RivalMissing, Series, measure, parser, summarize
from benchmarks.kept import counted_rounds
from benchmarks.rank_contestants import CELLS, Cell, RankBench, add_rank_arguments, rival_rank_settings
from benchmarks.rivals import deepspeed_setup

ROUNDS = 4
OURS, RIVAL = "ours", "deepspeed"
MARKS = {"stage 1, none": 1.0, "stage 2, none": 1.0, "stage 3, none": 0.8, "stage 3, cpu": 0.8, "stage 3, nvme": 0.6}
"""Most that our step may take of DeepSpeed's, by cell."""
LOSS_MARK = 0.002
"""A loss may differ by so much of its value from plain torch's, which rounds the same numbers in another order."""
MOVED = "floors: all weights once in bf16"


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, rounds=ROUNDS, disk=True)
    add_rank_arguments(parsed, warmup=2, steps=3)
    parsed.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS), metavar="CELL")
    parsed.add_argument("--tune", action="store_true", help="try DeepSpeed's settings once each, and end")
    parsed.add_argument("--split", action="store_true", help="what DeepSpeed's step consists of, and end")
    options = parsed.parse_args()
    report = Report("ranks", __doc__, options, folders=[options.path])
    bench = RankBench(options)
    report.figure("parameters", bench.shape.numel, f"{bench.shape.numel:,}")
    reason = deepspeed_setup.why_missing()
    if reason is not None:
        report.lack(RIVAL, reason)
    expected = None if options.tune or options.split else floors(report, bench)
    for name in options.cells:
        if options.tune and reason is None:
            tune(report, bench, CELLS[name])
        elif options.split and reason is None:
            split(report, bench, CELLS[name])
        elif expected is not None:
            compare(report, bench, CELLS[name], expected)
    report.finish()


def floors(report: Report, bench: RankBench) -> list[float]:
    """What the ranks compute and what they move, alone: said, not judged. Returns the losses of plain torch."""
    candidates = {"reference": bench.reference(), "plain": bench.floor("plain"), "wires": bench.floor("wires")}
    series = measure("floors", candidates, rounds=1, warmups=0)
    report.keep(series)
    wires = series.rounds[0]["wires"].figures
    wire_seconds = {name.removesuffix("_seconds"): wires[name] for name in wires if name.endswith("_seconds")}
    text = ", ".join(f"{name.replace('_', ' ')} {seconds:.3f} s" for name, seconds in wire_seconds.items())
    report.figure(MOVED, {"bytes": 2 * bench.shape.numel, **wire_seconds}, text)
    losses: list[float] = series.rounds[0]["reference"].figures["losses"]
    report.figure("reference: losses", losses, shown(losses))
    return losses


def compare(report: Report, bench: RankBench, cell: Cell, expected: list[float]) -> None:
    """One cell: step times turn by turn, and losses against those of plain torch."""
    candidates = {OURS: bench.ours(cell)}
    if RIVAL not in report.missing:
        candidates[RIVAL] = bench.rival(cell, deepspeed_setup.BEST_RANK_SETTINGS[str(cell)])
    series = measure(str(cell), candidates, rounds=report.options.rounds, warmups=0, disk=bench.path)
    report.keep(series)
    show_spans(report, series)
    for name in candidates:
        differences = [difference(r[name].figures["losses"], expected) for r in series.rounds]
        # The rival's are said, not judged: on NVMe it trains something else than in its other cells.
        bound = LOSS_MARK if name == OURS else None
        report.mark(f"{cell}: {name}, losses off plain torch's by", differences, at_most=bound)
    if RIVAL in candidates:
        ratios = series.ratios(lambda r: r[OURS].seconds / r[RIVAL].seconds)
        report.mark(f"{cell}: ours / deepspeed, step time", ratios, at_most=MARKS[str(cell)])
        sizes = series.ratios(lambda r: r[OURS].figures["peak_rss_bytes"] / r[RIVAL].figures["peak_rss_bytes"])
        report.mark(f"{cell}: ours / deepspeed, peak memory of all ranks", sizes)


def difference(losses: list[float], expected: list[float]) -> float:
    """The largest difference of a loss, as a share of what it should be."""
    return max(abs(loss - expected_loss) / expected_loss for loss, expected_loss in zip(losses, expected, strict=True))


def shown(losses: list[float]) -> str:
    """Losses in a line."""
    return " ".join(f"{loss:.3f}" for loss in losses)


def show_spans(report: Report, series: Series) -> None:
    """Where the time of a step goes, as the training loop sees it, and the losses of the first round."""
    for name in series.rounds[0]:
        spans = {part: series.median(name, f"{part}_seconds") for part in ("forward", "backward", "optimizer")}
        losses = series.rounds[0][name].figures["losses"]
        times = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in spans.items())
        text = f"{times}; losses {shown(losses)}"
        report.figure(f"{series.name}: {name}", {**spans, "losses": losses}, text)


def tune(report: Report, bench: RankBench, cell: Cell) -> None:
    """One run of DeepSpeed with each of its settings."""
    seconds: dict[str, float] = {}
    for name, settings in rival_rank_settings(cell).items():
        label = f"{cell}: {name}"
        try:
            series = measure(label, {RIVAL: bench.rival(cell, settings)}, rounds=1, warmups=0)
        except RivalMissing as error:
            report.figure(f"{label}: failed", str(error))  # a setting that fails is not a rival that is missing
            continue
        report.keep(series)
        seconds[name] = series.median(RIVAL)
    if seconds:
        best = min(seconds, key=lambda name: seconds[name])
        report.figure(f"{cell}: deepspeed's best setting", best)
    else:
        report.lack(RIVAL, f"{cell}: it ran with none of its settings")


def split(report: Report, bench: RankBench, cell: Cell) -> None:
    """One profiled run of DeepSpeed: its calls, and how long gloo was at work meanwhile."""
    run = bench.rival(cell, deepspeed_setup.BEST_RANK_SETTINGS[str(cell)], profile=True)
    series = measure(f"{cell}, profiled", {RIVAL: run}, rounds=1, warmups=0)
    report.keep(series)
    show_spans(report, series)
    collective_seconds = series.rounds[0][RIVAL].figures["collective_seconds"]
    text = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in collective_seconds.items())
    report.figure(f"{cell}: deepspeed, collectives of a step", collective_seconds, text)


def table(result: dict[str, Any]) -> str:
    """A result as a table: median steps of both, their ratio with its interval, and the bound."""
    lines = [
        "| ZeRO stage, offloaded to | ours [s] | DeepSpeed [s] | ours / DeepSpeed | goal |",
        "|---|---|---|---|---|",
    ]
    for series in result["series"]:
        name, rounds = series["name"], counted_rounds(series)
        if name not in CELLS or not all({OURS, RIVAL} <= r.keys() for r in rounds):
            continue
        steps = {
            contestant: statistics.median(r[contestant]["seconds"] for r in rounds) for contestant in (OURS, RIVAL)
        }
        ratio = summarize([r[OURS]["seconds"] / r[RIVAL]["seconds"] for r in rounds])
        cell = CELLS[name]
        place = {"none": "nothing", "cpu": "host memory", "nvme": "NVMe"}[cell.tier]
        lines.append(
            f"| {cell.stage}, {place} | {steps[OURS]:.2f} | {steps[RIVAL]:.2f} "
            f"| {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] | <= {MARKS[name]:g} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
