"""The measured tables of the documentation, printed from the results that are kept in `benchmarks/results`.

A page has `<!-- table: NAME -->`, the table, and `<!-- end -->`. What is between the two is what this prints, and a
test compares them. `python -m benchmarks.tables --write` refreshes the pages, without it the tables are printed.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plot, precision_loss, rank_memory, ranks
from benchmarks.common import verdict_of
from benchmarks.gpu_floors import slowest
from benchmarks.kept import NAMES, counted_rounds, large_runs, load_result, machine_of

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
"""A table with its marks in a page."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A row of a table of marks."""

    label: str
    source: str
    """Name of the result."""
    what: str
    """The mark in the result."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table, and the results it comes from."""

    sources: tuple[str, ...]
    make: Callable[..., str]
    """Of the results in their order: the table in Markdown."""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of GitHub's Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def coded_weights(result: Mapping[str, Any]) -> str:
    """Loss and bytes with weights as codes."""
    figures = result["figures"]
    plain = figures["bf16"]
    rows = [
        (
            name,
            f"{row['loss']:.4f}",
            f"{row['loss'] - plain['loss']:+.4f}" if row is not plain else "",
            f"{row['bytes'] / plain['bytes']:.3f}",
        )
        for name, row in figures.items()
    ]
    return markdown(["weights", "held-out loss", "minus bf16", "bytes / bf16"], rows)


def rollouts(result: Mapping[str, Any]) -> str:
    """Tokens a second and bytes a token, by the room for weights."""
    figures, marks = result["figures"], {mark["what"]: mark for mark in result["marks"]}
    rows = []
    for name in ("all", "half", "a quarter", "without hybrid_engine"):
        mark = marks[f"{name}: tokens a second / plain"]
        nbytes = figures.get(f"{name}: bytes a token")
        ratio = "" if nbytes is None else f"{nbytes / figures['weights']:.2f}"
        rows.append((name, f"{mark['median']:.2f} [{mark['low']:.2f}, {mark['high']:.2f}]", ratio))
    return markdown(["room for", "tokens a second / all in memory", "read a token / weights"], rows)


def starts(result: Mapping[str, Any]) -> str:
    """Seconds from a folder of safetensors to the first step, by place."""
    figures, phases = result["figures"], ("load", "initialize", "first_step", "step")
    (series,) = result["series"]
    names = [name for name in counted_rounds(series)[0] if name != "read"]
    rows = [(name, *(f"{figures[f'{name}: {phase}']:.1f} s" for phase in phases)) for name in names]
    floor = statistics.median(runs["read"]["seconds"] for runs in counted_rounds(series))
    rows.append(("floor: the file read by fio", f"{floor:.1f} s", "", "", ""))
    size = f"{figures['parameters'] / 1e9:.1f} B parameters, {figures['bytes of the model'] / 1e9:.1f} GB"
    head = (size, "`from_pretrained`", "`zero.initialize`", "first step", "a later step")
    return f"{markdown(head, rows)}\n\nOn {machine_of([result])}."


def on_a_gpu(*results: Mapping[str, Any]) -> str:
    """Step, floor and peak of each contestant of the GPU's training question that has ended a step."""
    figures, rows = {name: contestant for result in results for name, contestant in result["figures"].items()}, []
    contestants = {
        name: contestant
        for name, contestant in figures.items()
        if isinstance(contestant, dict) and contestant.get("step_seconds")
    }
    for name, contestant in contestants.items():
        seconds = statistics.median(contestant["step_seconds"])
        bound = slowest(figures.get(f"{name}: floors", {}))
        peak = max(entry.get("peak_reserved_bytes", 0) for entry in (contestant, *contestant["steps"]))
        floor = "-" if bound is None else f"{bound[1]:.2f} s: {bound[0]}"
        rows.append((name, f"{seconds:.2f} s", str(len(contestant["step_seconds"])), floor, f"{peak / 1e9:.1f} GB"))
    return markdown(("", "step", "steps", "floor", "peak device memory"), rows)


UNBOUND = {"at_least": None, "at_most": None, "verdict": ""}


def number(value: float, entry: Mapping[str, Any]) -> str:
    """Two decimals, three digits from 4 on, or more where those would hide on which side of the bound the value is."""
    shown = ""
    for more in range(6):
        shown = f"{value:.{3 + more}g}" if value >= 4 else f"{value:.{2 + more}f}"
        if verdict_of(float(shown), entry["at_least"], entry["at_most"]) == entry["verdict"]:
            break
    return shown


def format_measured(entry: Mapping[str, Any]) -> str:
    """The median of a mark with its interval."""
    median = number(entry["median"], entry)
    if len(entry["values"]) == 1:
        return f"{median} (one run)"
    return f"{median} [{number(entry['low'], UNBOUND)}, {number(entry['high'], UNBOUND)}]"


def goal(entry: Mapping[str, Any]) -> str:
    """The bound of a mark, and whether it was missed."""
    bounds = ((">=", entry["at_least"]), ("<=", entry["at_most"]))
    text = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
    return f"{text}, **missed**" if entry["verdict"] == "MISSED" else text or "-"


def mark_of(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mark of that name; raises KeyError."""
    for entry in result["marks"]:
        if entry["what"] == name:
            mark: Mapping[str, Any] = entry
            return mark
    raise KeyError(f"no mark {name!r} in the result of {result['question']}")


def of_marks(*marks: Mark) -> Table:
    """A table of a question, what was measured, and the goal in each row."""
    sources = tuple(dict.fromkeys(mark.source for mark in marks))

    def make(*results: Mapping[str, Any]) -> str:
        by_name = dict(zip(sources, results, strict=True))
        entries = [(mark.label, mark_of(by_name[mark.source], mark.what)) for mark in marks]
        return markdown(("", "measured", "goal"), [(label, format_measured(e), goal(e)) for label, e in entries])

    return Table(sources, make)


def micro_batches(result: Mapping[str, Any]) -> str:
    """Steps of several micro-batches: seconds, bytes per parameter, peak memory."""
    (series,) = [s for s in result["series"] if s["name"] == "nvme"]
    rounds, rows = counted_rounds(series), []
    for name in rounds[0]:
        seconds = statistics.median(runs[name]["seconds"] for runs in rounds)
        figures = result["figures"].get(f"{name}, bytes per parameter and step")
        traffic = (
            ("", "") if figures is None else (f"{figures['read']:.1f}", f"{figures['peak_rss_bytes'] / 1e9:.2f} GB")
        )
        rows.append((MICRO_BATCHES.get(name, name), f"{seconds:.2f} s", *traffic))
    options, parameters = result["options"], result["figures"]["parameters"]
    model = f"{parameters / 1e6:.0f} M parameters in {options['dtype']}, {options['micro_batches']} micro-batches of "
    text = markdown((f"{model}{options['tokens']} tokens", "a step", "read, bytes per parameter", "peak memory"), rows)
    return f"{text}\n\nOn {machine_of([result])}."


MICRO_BATCHES = {
    "deepspeed, default": "DeepSpeed, default",
    "deepspeed, pipelined": "DeepSpeed, pipelined reads and writes",
    "compute floor": "floor: forward and backward of one micro-batch alone",
    "read + write alone": "floor: the bytes of a step side by side alone",
}
STEPS = {
    ("nvme", "deepspeed"): ("DeepSpeed, NVMe", None),
    ("nvme", "lean"): ("ours, NVMe, no budget", "nvme: lean / deepspeed, step time"),
    ("nvme", "at a third"): (
        "ours, NVMe, a third of DeepSpeed's peak memory",
        "nvme: at a third / deepspeed, step time",
    ),
    ("nvme", "auto"): ('ours, NVMe, `host: "auto"`', "nvme: auto / deepspeed, step time"),
    ("cpu", "deepspeed"): ("DeepSpeed, host memory", None),
    ("cpu", "lean"): ("ours, host memory", "cpu: ours / deepspeed, step time"),
    ("nvme", "compute floor"): ("floor: forward and backward alone", None),
    ("nvme", "read + write alone"): ("floor: the bytes of the step without a budget alone", None),
}
"""(series, candidate) -> label, and the mark of its step time."""


def steps(*results: Mapping[str, Any]) -> str:
    """Step time, peak memory and traffic of each contestant."""
    rows = []
    for (name, candidate), (label, mark) in STEPS.items():
        result = next(r for r in results if name in r["options"]["tier"])
        series = next(s for s in result["series"] if s["name"] == name)
        seconds = statistics.median(r[candidate]["seconds"] for r in counted_rounds(series))
        peak = result["figures"].get(f"{name}: {candidate}, peak memory")
        nbytes = result["figures"].get(f"{name}: {candidate}, bytes per parameter and step")
        entry = None if mark is None else mark_of(result, mark)
        rows.append(
            (
                label,
                f"{seconds:.2f} s",
                "-" if peak is None else f"{peak / 1e9:.2f} GB",
                "-" if nbytes is None else f"{nbytes['ours'] / result['figures']['parameters']:.1f}",
                "-" if entry is None else format_measured(entry),
                "-" if entry is None else goal(entry),
            )
        )
    head = ("", "step", "peak memory", "bytes moved per parameter", "step / DeepSpeed's", "goal")
    return markdown(head, rows)


def sizes(*results: Mapping[str, Any]) -> str:
    """Step time and peak memory of each contestant by size of model."""
    points_by_key = plot.points_of(results)
    counts = sorted({point.numel for points in points_by_key.values() for point in points})
    rows = []
    for key, points in points_by_key.items():
        by_numel = {point.numel: point for point in points}
        cells = [_step_and_peak(by_numel[numel]) if numel in by_numel else "-" for numel in counts]
        rows.append((plot.STYLES[key][0].replace("\n", " "), *cells))
    return markdown(("", *(f"{numel / 1e6:,.0f} M" for numel in counts)), rows)


def _step_and_peak(point: plot.Point) -> str:
    peak = "" if point.peak_rss_bytes is None else f", {point.peak_rss_bytes / 1e9:.2f} GB"
    return f"{point.step_seconds:.2f} s{peak}"


def largest(*results: Mapping[str, Any]) -> str:
    """Models inside a memory cgroup."""
    rows = [
        (
            NAMES[run.name][0],
            f"{run.trained_numel / 1e9:.{2 if run.is_full else 3}f} B",
            f"{run.limit_gib:g} GiB",
            f"{run.peak_bytes / 1e9:.2f} GB",
            f"{run.nvme_bytes / 1e9:.0f} GB",
            f"{run.moved_bytes / 1e9:.0f} GB",
            f"{run.seconds:.0f} s",
            f"{run.floor_ratio:.1f}",
        )
        for run in large_runs(results)
    ]
    head = ("model", "trained", "memory limit", "peak", "on NVMe", "moved in a step", "step", "step / its bytes alone")
    return markdown(head, rows)


CAPACITY = ROOT / "docs" / "capacity.md"
PLANNED = (("llama-3.1-8b", "full"), ("llama-3.1-70b", "full"), ("llama-3.1-70b", "QLoRA"), ("deepseek-v3", "QLoRA"))
"""Rows of the capacity page: model, tuning."""


def front(*results: Mapping[str, Any]) -> str:
    """What was trained in how little, and what is planned for a machine with a GPU."""
    rows = [
        (f"{NAMES[run.name][0]}: {run.trained_numel / 1e9:.2f} B trained", f"2 CPU cores, {run.limit_gib:g} GiB",
         f"{run.nvme_bytes / 1e9:.0f} GB", f"{run.seconds:.0f} s, measured")
        for run in large_runs(results)
        if run.is_full
    ]  # fmt: skip
    first = CAPACITY.read_text(encoding="utf-8").partition("## One rank, fp32 states")[2].partition("\n## ")[0]
    planned = {tuple(line.strip("| ").split(" | ")[:2]): line for line in first.splitlines()}
    for row in PLANNED:
        model, tuning, device, _, nvme, _, seconds = planned[row].strip("| ").split(" | ")
        rows.append((f"{model}, {tuning}", f"a GPU with 24 GB, of which {device}", nvme, f"{seconds}, planned"))
    return markdown(("model", "memory", "on NVMe", "a step"), rows)


FLAT = "peak / (before the plan + plan + activations)"


def memory(*results: Mapping[str, Any]) -> str:
    """Peak memory against the plan, model by model."""
    rows = []
    for result in results:
        for entry in result["marks"]:
            name, _, size = entry["what"].removesuffix(f": {FLAT}").partition(" (")
            budget = "one fixed budget" if name in result["options"]["shapes"] else "none"
            numel = size.removesuffix(" parameters)") or result_numel(result, name)
            rows.append(
                (f"GPT, {name}" if budget != "none" else name, numel, budget, format_measured(entry), goal(entry))
            )
    return markdown(("model", "parameters", "budget", "peak / plan", "goal"), rows)


def result_numel(result: Mapping[str, Any], name: str) -> str:
    """The size of a model as the figures of its result tell it."""
    return next(
        m[1] for figure in result["figures"] if (m := re.fullmatch(rf"{re.escape(name)} \((.*) parameters\)", figure))
    )


def rank_memory_ratios(result: Mapping[str, Any]) -> str:
    """Memory of all processes against the plan: stages down, ranks across."""
    cells = {
        (match[1], match[2]): entry
        for entry in result["marks"]
        if (match := re.fullmatch(r"stage (\d), (.*): memory of all processes / plan", entry["what"]))
    }
    across = list(dict.fromkeys(world for _, world in cells))
    rows = []
    for stage in dict.fromkeys(stage for stage, _ in cells):
        entries = [cells.get((stage, world)) for world in across]
        shown = [
            "-" if e is None else number(e["median"], e) + " **missed**" * (e["verdict"] == "MISSED") for e in entries
        ]
        rows.append((stage, *shown))
    return markdown(("stage", *across), rows)


CHECKPOINTS = (
    ("save", "save until the call returns (ours is synced then)", "save until it returns (ours: synced)", "seconds"),
    ("save", "save until it is synced", "save until synced", "durable_seconds"),
    ("resume", "load", "load", "seconds"),
    ("resume", "peak memory of a resume", "peak memory of a resume", "peak_rss_bytes"),
)
"""Series, label, mark and figure."""


def checkpoints(*results: Mapping[str, Any]) -> str:
    """Time and memory of a checkpoint, next to DeepSpeed's."""
    rows = []
    for result in results:
        (tier,) = result["options"]["tier"]
        for kind, label, mark, figure in CHECKPOINTS:
            series = next(s for s in result["series"] if s["name"] == f"{tier}: {kind}")
            entry = mark_of(result, f"{tier}: {mark}, ours / deepspeed")
            values = []
            for contestant in ("ours", "deepspeed"):
                value = statistics.median(
                    {**r[contestant]["figures"], **r[contestant]}[figure] for r in counted_rounds(series)
                )
                values.append(f"{value / 1e9:.2f} GB" if figure.endswith("bytes") else f"{value:.2f} s")
            rows.append((PLACES[tier], label, *values, format_measured(entry), goal(entry)))
    return markdown(("states", "", "ours", "DeepSpeed", "ours / DeepSpeed", "goal"), rows)


PLACES = {"nvme": "NVMe", "cpu": "host memory"}
PUBLISHED, CHECKPOINT, CHECKPOINT_NVME = "memory_published", "checkpoint_cpu_336M", "checkpoint_nvme_336M"
ON_NVME, IN_HOST = "checkpoint_deepspeed_nvme_336M", "checkpoint_deepspeed_cpu_336M"
(STEP,), (STEP_ON_EPYC,) = plot.OF_336M, plot.ON_EPYC
TABLES = {
    "steps": Table((STEP,), steps),
    "sizes": Table(plot.SIZES, sizes),
    "step-ratios": of_marks(
        Mark(
            "step without a budget / the slower of the two floors",
            STEP,
            "nvme: lean / max(compute floor, read + write alone)",
        ),
        Mark(
            "... on an AMD EPYC, where forward and backward take twice as long",
            STEP_ON_EPYC,
            "nvme: lean / max(compute floor, read + write alone)",
        ),
        Mark("peak memory at a third / DeepSpeed's, NVMe", STEP, "nvme: at a third / deepspeed, peak memory"),
        Mark("peak memory / DeepSpeed's, host memory", STEP, "cpu: ours / deepspeed, peak memory"),
        Mark("minor page faults in a steady step, NVMe", "faults", "nvme, 128 tokens: minor faults in a step"),
        Mark("minor page faults in a steady step, host memory", "faults", "cpu, 128 tokens: minor faults in a step"),
    ),
    "accumulation": Table(("accumulation",), micro_batches),
    "codes": Table(("codes_loss",), coded_weights),
    "rollouts": Table(("rollout",), rollouts),
    "start": Table(("start",), starts),
    "disk": of_marks(
        *(
            Mark(f"{way}: GB/s, ours / {label}", "swap_bandwidth", f"{way}: GB/s, ours / {rival}")
            for way in ("read", "write", "mixed")
            for rival, label in (
                ("fio", "tuned fio's"),
                ("deepspeed", "DeepSpeed's, tuned"),
                ("deepspeed, large calls", "DeepSpeed's with calls of 512 MiB"),
            )
        ),
        Mark(
            "optimizer's I/O / (its reads alone + its writes alone)",
            "optimizer_step",
            "step / (read alone + write alone)",
        ),
        Mark("its reads alone / tuned fio", "optimizer_step", "read alone / fio"),
        Mark("its writes alone / tuned fio", "optimizer_step", "write alone / fio"),
    ),
    "adam": of_marks(
        *(
            Mark(f"{threads}: speed, ours / {label}", "adam", f"{threads}: speed, ours / {rival}")
            for threads in ("1 thread", "2 threads")
            for rival, label in (
                ("bound", "a loop that only streams the bytes"),
                ("DeepSpeedCPUAdam", "DeepSpeedCPUAdam"),
                ("torch fused", "torch's fused Adam"),
                ("DeepSpeedCPUAdam, huge", "DeepSpeedCPUAdam, both on huge pages"),
                ("torch fused, huge", "torch's fused Adam, both on huge pages"),
            )
        )
    ),
    "memory": Table(("memory_flat", PUBLISHED), memory),
    "largest": Table(plot.LARGEST, largest),
    "front": Table(plot.LARGEST, front),
    "ranks": Table(("ranks",), ranks.table),
    "ranks-4": Table(("ranks_4",), ranks.table),
    "ranks-8": Table(("ranks_8",), ranks.table),
    "rank-memory": Table(("rank_memory",), rank_memory_ratios),
    "rank-memory-bytes": Table(("rank_memory",), rank_memory.table),
    "checkpoints": of_marks(
        Mark(
            "save from host memory: GB/s / fio's into a new file",
            CHECKPOINT,
            "cpu: save GB/s / fio's write of a new file",
        ),
        Mark(
            "... both with the sync that follows",
            CHECKPOINT,
            "cpu: save GB/s / fio's write of a new file, both synced",
        ),
        Mark("... / fio's into a file that is overwritten", CHECKPOINT, "cpu: save GB/s / fio's write of an old file"),
        Mark(
            "load into host memory: GB/s / fio's of that file",
            CHECKPOINT,
            "cpu: load GB/s / fio's read of the same file",
        ),
        Mark(
            "save with states on NVMe: time of fio's read and write of as many bytes / ours",
            CHECKPOINT_NVME,
            "nvme: time of fio's read + write / save",
        ),
        Mark("load onto NVMe: the same", CHECKPOINT_NVME, "nvme: time of fio's read + write / load"),
        Mark(
            "the save on NVMe: GB/s / fio's into a new file",
            CHECKPOINT_NVME,
            "nvme: save GB/s / fio's write of a new file",
        ),
        Mark(
            "... / fio's into a file that is overwritten",
            CHECKPOINT_NVME,
            "nvme: save GB/s / fio's write of an old file",
        ),
        Mark(
            "the load onto NVMe: GB/s / fio's of that file",
            CHECKPOINT_NVME,
            "nvme: load GB/s / fio's read of the same file",
        ),
        *(
            mark
            for place, result, tier in (("host memory", CHECKPOINT, "cpu"), ("NVMe", CHECKPOINT_NVME, "nvme"))
            for mark in (
                Mark(
                    f"saved beside training, {place}: extra time until it is there / (its bytes / mixed bandwidth)",
                    result,
                    f"{tier}: async, extra time / (bytes / mixed bandwidth)",
                ),
                Mark("... seconds that the call takes", result, f"{tier}: async, seconds that the call takes"),
            )
        ),
    ),
    "checkpoints-deepspeed": Table((ON_NVME, IN_HOST), checkpoints),
    "gpu": Table(("gpu_step", "gpu_step_8B"), on_a_gpu),
    "gpu-rivals": Table(("gpu_step_rivals",), on_a_gpu),
    "gpu-rates": of_marks(
        Mark("update kernel: GB/s / a copy's on the device", "gpu_adam", "adam: GB/s, ours / copy"),
        Mark("cast and sums of gradients: the same", "gpu_adam", "cast and sums: GB/s, ours / copy"),
        Mark("update in host memory: speed / a C loop's", "gpu_host", "update on all cores: speed, ours / bound"),
        *(
            Mark(f"copies of {size} {way}: GB/s / PCIe", "gpu_copy", f"{size} {way}: ours / PCIe")
            for way in ("to the device", "to the host", "both ways")
            for size in ("2 MiB", "8 MiB", "32 MiB")
        ),
    ),
    "precision": Table(("precision_loss",), lambda result: precision_loss.table(result["runs"])),
}
"""Name in the pages -> table."""


def block(name: str) -> str:
    """A table with its marks and the files it comes from; raises KeyError for a name that is unknown."""
    table = TABLES[name]
    files = ", ".join(f"benchmarks/results/{source}.json" for source in table.sources)
    text = table.make(*(load_result(source) for source in table.sources))
    return f"<!-- table: {name} -->\n<!-- from {files} -->\n\n{text}\n\n<!-- end -->"


def refresh(page: str) -> str:
    """The text of a page with all its tables as the results have them."""
    return BLOCK.sub(lambda match: block(match["name"]), page)


def pages() -> list[Path]:
    """Where tables may stand."""
    return [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    """Print the tables, or refresh the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--write", action="store_true", help="refresh the pages")
    options = parser.parse_args()
    if not options.write:
        print("\n\n".join(block(name) for name in options.names or TABLES))
        return
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := refresh(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
