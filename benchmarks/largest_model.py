"""How large a model trains in a few GiB of memory, and how near is its step to what its bytes cost?

Published shapes (`benchmarks.published`) with random weights do full steps, gradients included, with everything on NVMe
and no budget, each in a memory cgroup; DeepSpeed is tried with its own sizes. `--runs` chooses, `--shape` adds a GPT
under budgets. Needs the right to make a control group and up to 80 GB of disk.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.cgroup import MemoryCgroup
from benchmarks.common import Report, RivalMissing, measure, parser, run_child
from benchmarks.contestants import Bench, add_arguments
from benchmarks.published import RUNS, RealRun
from benchmarks.rivals import deepspeed_setup
from benchmarks.shapes import SHAPES, Shape

RIVAL_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buffers": {"buffer_size": 1},
    "small buffers, small sub-groups": {"buffer_size": 1, "sub_group_size": min(deepspeed_setup.SUB_GROUP_SIZES)},
    "no pinned memory, small buffers": {"buffer_size": 1, "pin_memory": False},
}
"""A buffer is as large as the largest parameter at least."""
SAMPLE_BYTES = 4_000_000_000
"""The disk's speed is measured with at most so many bytes each way: a step moves far more."""


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, rounds=1, disk=True)
    add_arguments(parsed, shape="3B", warmup=1, steps=2)
    parsed.add_argument("--runs", nargs="*", choices=list(RUNS), default=list(RUNS))
    parsed.add_argument("--tenth", action="store_true", help="a tenth of the layers of each run")
    parsed.add_argument("--gpt", action="store_true", help="train the GPT that --shape names too")
    parsed.add_argument("--limit-gib", type=float, default=4.0)
    parsed.add_argument("--host", default="700MB", help="our memory_budget.host")
    parsed.add_argument("--device", default="1200MB", help="our memory_budget.device")
    parsed.add_argument("--rival-shapes", nargs="*", choices=list(SHAPES), default=[])
    options = parsed.parse_args()
    report = Report("largest_model", __doc__, options, folders=[options.path])
    bench = Bench(options)
    for name in options.runs:
        real_run(report, bench, options, name, RUNS[name].tenth() if options.tenth else RUNS[name])
    for name in options.rival_shapes:
        rival(report, bench, options, SHAPES[name], name)
    if options.gpt:
        ours(report, bench, options)
    report.finish()


def real_run(report: Report, bench: Bench, options: argparse.Namespace, name: str, run: RealRun) -> None:
    """A published shape inside its group: peak against plan, bytes and seconds in parts, and the byte floor."""
    spec = run.spec(Path(options.path).resolve(), warmup=options.warmup, steps=options.steps)
    with MemoryCgroup(int(run.limit_gib * 2**30)) as group:

        def train() -> dict[str, Any]:
            figures = run_child(["-m", "benchmarks.shaped_worker", json.dumps(spec)], prefix=group.prefix)
            figures.pop("event", None)
            return figures

        series = measure(name, {"ours": train}, rounds=1, warmups=0)
        kills = group.kills
    report.keep(series)
    figures = series.rounds[0]["ours"].figures
    plan = figures["baseline_rss_bytes"] + figures["plan_bytes"]["host"] + figures["plan_bytes"]["device"]
    moved_bytes = {way: figures[f"nvme_{way}_bytes"] for way in ("read", "write")}
    seconds = series.rounds[0]["ours"].seconds
    facts = {
        f"{figures['parameters'] / 1e9:.2f} B parameters, {figures['trained_parameters'] / 1e9:.3f} B trained": "",
        f"in {run.limit_gib:g} GiB, killed": f"{kills}",
        "peak": f"{figures['peak_rss_bytes'] / 1e9:.2f} GB",
        "of which the plan and what was resident before it": f"{plan / 1e9:.2f} GB",
        "NVMe": f"{figures['plan_bytes']['nvme'] / 1e9:.1f} GB",
        "built in": f"{figures['build_seconds']:.0f} s",
        "moved in": f"{figures['initialize_seconds']:.0f} s",
        "step": f"{seconds:.1f} s",
        "forward": f"{figures['forward_seconds']:.1f} s",
        "backward": f"{figures['backward_seconds']:.1f} s",
        "waiting for the disk": f"{figures['exposed_wait_seconds']:.1f} s",
        "read": f"{moved_bytes['read'] / 1e9:.1f} GB",
        "written": f"{moved_bytes['write'] / 1e9:.1f} GB",
    }
    text = ", ".join(f"{fact} {value}".strip() for fact, value in facts.items())
    report.figure(f"{name}: {run.shape}, {run.tuning}, {run.state_dtype} states", {"runs": True, "kills": kills}, text)
    share = min(1.0, SAMPLE_BYTES / max(*moved_bytes.values(), 1))
    floor = measure(
        f"{name}: byte floor",
        {"disk": bench.disk_floor(moved_bytes["read"] * share, moved_bytes["write"] * share)},
        rounds=1,
        warmups=0,
    )
    report.keep(floor)
    floor_seconds = floor.median("disk") / share
    report.figure(f"{name}: bytes of a step alone [s]", floor_seconds, f"{floor_seconds:.1f} s")
    report.mark(f"{name}: step / bytes of the step alone", [seconds / floor_seconds])


def ours(report: Report, bench: Bench, options: argparse.Namespace) -> None:
    """Our steps inside the group, and the byte floor outside of it."""
    budget = {"host": options.host, "device": options.device}
    with MemoryCgroup(int(options.limit_gib * 2**30)) as group:
        bench.inside = group.prefix
        series = measure(options.shape, {"ours": bench.ours("nvme", budget)}, rounds=options.rounds, warmups=0)
        report.keep(series)
        usage = {"kills": group.kills, "peak_bytes": group.peak_bytes}
    bench.inside = ()
    figures = series.rounds[0]["ours"].figures
    report.figure(
        f"{options.shape} ({bench.shape.numel / 1e9:.2f} B parameters) in {options.limit_gib:g} GiB",
        {"runs": True, **usage},
        f"runs; peak resident {figures['peak_rss_bytes'] / 1e9:.2f} GB, {usage['kills']} processes killed",
    )
    moved_bytes = {way: figures[f"nvme_{way}_bytes"] for way in ("read", "write")}
    share = min(1.0, SAMPLE_BYTES / max(*moved_bytes.values(), 1))
    floor = measure(
        "byte floor",
        {"disk": bench.disk_floor(moved_bytes["read"] * share, moved_bytes["write"] * share)},
        rounds=1,
        warmups=0,
    )
    report.keep(floor)
    floor_seconds = floor.median("disk") / share
    report.figure(
        "bytes of a step alone [s]",
        floor_seconds,
        f"{floor_seconds:.1f} s for {sum(moved_bytes.values()) / 1e9:.1f} GB",
    )
    report.mark(
        f"{options.shape}: step / bytes of the step alone", series.ratios(lambda r: r["ours"].seconds / floor_seconds)
    )


def rival(report: Report, bench: Bench, options: argparse.Namespace, shape: Shape, name: str) -> None:
    """Whether DeepSpeed trains a model of that size in the same group."""
    reason = deepspeed_setup.why_missing()
    if reason is not None:
        report.lack("deepspeed", reason)
        return
    outcomes: dict[str, str] = {}
    for setting, settings in RIVAL_SETTINGS.items():
        with MemoryCgroup(int(options.limit_gib * 2**30)) as group:
            bench.inside = group.prefix
            try:
                candidates = {"deepspeed": bench.rival("nvme", settings, shape)}
                report.keep(measure(f"deepspeed {name}, {setting}", candidates, rounds=1, warmups=0))
                outcomes[setting] = "runs"
            except RivalMissing as error:
                outcomes[setting] = "is killed" if group.kills else f"fails: {error}"
            bench.inside = ()
    text = "; ".join(f"{setting}: {outcome}" for setting, outcome in outcomes.items())
    report.figure(f"deepspeed {name} ({shape.numel / 1e6:,.0f} M) in {options.limit_gib:g} GiB", outcomes, text)


if __name__ == "__main__":
    main()
