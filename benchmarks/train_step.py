"""What does a training step of a GPT cost, next to DeepSpeed at its best and to what the machine allows at all?

By default the 336 M-parameter one: 16 layers, hidden 1280, vocabulary 8192, 2 x 64 tokens, bf16, AdamW, clipping.
On NVMe three times: lean (no memory budget), with a third of DeepSpeed's peak memory, and with all memory that is
free. The floor is the slower of plain torch's forward and backward and of the step's bytes read and written alone.
Where it fits, a step of torch with its fused AdamW and everything in memory runs beside them.
With `--optimizer Muon` another question: what such a step costs next to AdamW's, and to its Newton-Schulz iterations.
Each run is a process of its own, so that peak memory is its own too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import psutil

from benchmarks.common import Candidate, Report, RivalMissing, Series, floor_deviates, measure, parser
from benchmarks.contestants import Bench, add_arguments, floor_contended, rival_settings
from benchmarks.rivals import deepspeed_setup

DISK_FLOOR, COMPUTE_FLOOR, RIVAL = "read + write alone", "compute floor", "deepspeed"
ORTHOGONAL = "Newton-Schulz alone"
RESIDENT = "torch, fused AdamW"
RESIDENT_BYTES, BESIDE_BYTES = 16, 4 << 30
"""It takes fp32 weights, gradients and two moments per parameter, and what a process has beside them."""
NVME_MARKS = {"lean": 0.50, "at a third": 0.45, "auto": 0.25}
"""Most that our step may take of DeepSpeed's."""
FLOOR_MARK = 1.25
CPU_TIME_MARK, CPU_RSS_MARK = 0.40, 0.55
MEMORY_SHARE = 3
"""DeepSpeed's peak memory over ours in "at a third"."""
RSS_MARK = 1.05 / MEMORY_SHARE
"""Peak memory may pass the budget by 5 %."""


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, disk=True)
    add_arguments(parsed)
    parsed.add_argument("--tier", nargs="+", choices=["nvme", "cpu", "none"], default=["nvme", "cpu"])
    parsed.add_argument("--alone", action="store_true", help="our engine only: no rival, no floors (so with none)")
    parsed.add_argument("--optimizer", choices=["AdamW", "Muon"], default="AdamW", help="Muon: next to AdamW, no rival")
    options = parsed.parse_args()
    report = Report("train_step", __doc__, options, folders=[options.path])
    bench = Bench(options)
    report.figure("parameters", bench.shape.numel, f"{bench.shape.numel:,}")
    for tier in options.tier:
        if options.optimizer == "Muon":
            muon(report, bench, tier, options)
        elif tier == "nvme" and not options.alone:
            nvme(report, bench, options)
        elif tier == "cpu" and not options.alone:
            cpu(report, bench, options)
        else:
            report.keep(measure(tier, {"lean": bench.ours(tier)}, rounds=options.rounds, warmups=0, disk=options.path))
        show_memory(report, report.series[-1])
    report.finish()


def nvme(report: Report, bench: Bench, options: argparse.Namespace) -> None:
    """Weights and states on disk: three budgets, the rival, and the floor."""
    best = rival_at_its_best(report, bench, "nvme")
    first = measure("first look", {"lean": bench.ours("nvme")}, rounds=1, warmups=0, disk=options.path)
    report.keep(first)
    lean = first.rounds[0]["lean"].figures
    candidates: dict[str, Candidate] = {"lean": bench.ours("nvme")}
    if best is not None:
        share_bytes = best.rounds[0][RIVAL].figures["peak_rss_bytes"] // MEMORY_SHARE
        # What a process needs beside the host budget does not depend on it.
        beside_bytes = lean["peak_rss_bytes"] - lean["plan_bytes"]["host"]
        host_bytes = share_bytes - beside_bytes
        report.figure("host budget at a third of the rival's peak", host_bytes, f"{host_bytes / 1e9:.2f} GB")
        candidates["at a third"] = bench.ours("nvme", {"host": host_bytes})
    candidates["auto"] = bench.ours("nvme", {"host": "auto"})
    if best is not None:
        candidates[RIVAL] = bench.rival("nvme", best.rounds[0][RIVAL].figures["settings"])
    needed, free = RESIDENT_BYTES * bench.shape.numel + BESIDE_BYTES, psutil.virtual_memory().available
    if needed <= free:
        candidates[RESIDENT] = bench.resident()
    else:
        report.lack(RESIDENT, f"it takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    candidates[COMPUTE_FLOOR] = bench.compute_floor()
    candidates[DISK_FLOOR] = bench.disk_floor(lean["nvme_read_bytes"], lean["nvme_write_bytes"])
    rules = [floor_contended(COMPUTE_FLOOR), floor_deviates(DISK_FLOOR)]
    series = measure("nvme", candidates, rounds=options.rounds, warmups=0, rules=rules, disk=options.path)
    report.keep(series)
    if best is not None:
        for name, bound in NVME_MARKS.items():
            report.mark(f"nvme: {name} / deepspeed, step time", time_ratios(series, name), at_most=bound)
        report.mark("nvme: at a third / deepspeed, peak memory", rss_ratios(series, "at a third"), at_most=RSS_MARK)
    ratios = series.ratios(lambda r: r["lean"].seconds / max(r[COMPUTE_FLOOR].seconds, r[DISK_FLOOR].seconds))
    report.mark("nvme: lean / max(compute floor, read + write alone)", ratios, at_most=FLOOR_MARK)
    for name in candidates.keys() & NVME_MARKS.keys():
        show_bytes(report, bench, series, name)


def cpu(report: Report, bench: Bench, options: argparse.Namespace) -> None:
    """Weights and states in host memory."""
    best = rival_at_its_best(report, bench, "cpu")
    candidates: dict[str, Candidate] = {"lean": bench.ours("cpu")}
    if best is not None:
        candidates[RIVAL] = bench.rival("cpu", best.rounds[0][RIVAL].figures["settings"])
    candidates[COMPUTE_FLOOR] = bench.compute_floor()
    series = measure(
        "cpu", candidates, rounds=options.rounds, warmups=0, rules=[floor_contended(COMPUTE_FLOOR)], disk=options.path
    )
    report.keep(series)
    if best is not None:
        report.mark("cpu: ours / deepspeed, step time", time_ratios(series, "lean"), at_most=CPU_TIME_MARK)
        report.mark("cpu: ours / deepspeed, peak memory", rss_ratios(series, "lean"), at_most=CPU_RSS_MARK)


def muon(report: Report, bench: Bench, tier: str, options: argparse.Namespace) -> None:
    """Lean steps of both optimizers on one tier, and Muon's iterations against the rate of bf16 matmuls."""
    candidates = {name: bench.ours(tier, optimizer=name) for name in ("AdamW", "Muon")}
    series = measure(
        tier, {**candidates, ORTHOGONAL: bench.newton_schulz()}, rounds=options.rounds, warmups=0, disk=options.path
    )
    report.keep(series)
    rate = series.median(ORTHOGONAL, "flops_per_second")
    report.figure(f"{tier}: bf16 matmul", rate, f"{rate / 1e12:.3f} TFLOP/s")
    floor = series.ratios(lambda r: r[ORTHOGONAL].seconds / r[ORTHOGONAL].figures["floor_seconds"])
    report.mark(f"{tier}: {ORTHOGONAL} / its operations at that rate", floor)
    for baseline in ("AdamW", ORTHOGONAL):
        ratios = series.ratios(lambda r, baseline=baseline: r["Muon"].seconds / r[baseline].seconds)
        report.mark(f"{tier}: Muon / {baseline}, step time", ratios)
    for name in candidates if tier == "nvme" else ():
        show_bytes(report, bench, series, name)


def rival_at_its_best(report: Report, bench: Bench, tier: str) -> Series | None:
    """One run of DeepSpeed with each of its settings; a series of the fastest one alone, None if it is missing."""
    reason = deepspeed_setup.why_missing()
    if reason is not None:
        report.lack(RIVAL, reason)
        return None
    runs: list[Series] = []
    for name, settings in rival_settings(tier).items():
        label = f"{tier}: deepspeed, {name}"
        run = bench.rival(tier, settings)
        try:
            series = measure(label, {RIVAL: tagged(run, settings)}, rounds=1, warmups=0)
        except RivalMissing as error:
            # A setting that fails is not a rival that is missing.
            report.figure(f"{label}: failed", str(error))
            continue
        report.keep(series)
        runs.append(series)
    if not runs:
        report.lack(RIVAL, "it ran with none of its settings")
        return None
    best = min(runs, key=lambda s: s.rounds[0][RIVAL].seconds)
    report.figure(f"{tier}: deepspeed's best setting", best.name)
    return best


def tagged(run: Candidate, settings: Mapping[str, Any]) -> Candidate:
    """The same candidate; its figures name the settings."""
    return lambda: {**(run() or {}), "settings": settings}


def time_ratios(series: Series, name: str) -> list[float]:
    """Our step over DeepSpeed's."""
    return series.ratios(lambda r: r[name].seconds / r[RIVAL].seconds)


def rss_ratios(series: Series, name: str) -> list[float]:
    """Our peak memory over DeepSpeed's."""
    return series.ratios(lambda r: r[name].figures["peak_rss_bytes"] / r[RIVAL].figures["peak_rss_bytes"])


def show_memory(report: Report, series: Series) -> None:
    """Peak memory of everyone who trained."""
    for name in series.rounds[0]:
        if name != DISK_FLOOR:
            peak = max(r[name].figures["peak_rss_bytes"] for r in series.rounds)
            report.figure(f"{series.name}: {name}, peak memory", peak, f"{peak / 1e9:.2f} GB")


def show_bytes(report: Report, bench: Bench, series: Series, name: str) -> None:
    """NVMe bytes of a step: ours, the kernel's for this process, and what the plan's formula says."""
    figures = series.rounds[-1][name].figures
    planned = figures["plan_rows"]
    stored = {array: sum(n for tier, a, n in planned if tier == "nvme" and a == array) for _, array, _ in planned}
    # A weight is read for the forward (with its optimizer state) and for the backward, and written; a state and a
    # spilled gradient are each read and written once.
    formula = 3 * stored.get("weights", 0) + 2 * stored.get("optimizer states", 0) + 2 * stored.get("gradients", 0)
    our_bytes = series.median(name, "nvme_read_bytes") + series.median(name, "nvme_write_bytes")
    kernel_bytes = series.median(name, "process_read_bytes") + series.median(name, "process_write_bytes")
    off = f"{(our_bytes / formula - 1) * 100:+.1f} % of the formula" if formula else "nothing on NVMe by the formula"
    report.figure(
        f"nvme: {name}, bytes per parameter and step",
        {"ours": our_bytes, "kernel": kernel_bytes, "formula": formula},
        f"{our_bytes / bench.shape.numel:.2f} (kernel {kernel_bytes / bench.shape.numel:.2f}), {off}",
    )


if __name__ == "__main__":
    main()
