"""What do checkpoints cost, next to fio on the same disk, to DeepSpeed, and to the same steps without one?

The 336 M-parameter GPT of the training question. Three parts: `disk` holds saving and loading against tuned fio, which
writes and reads as many bytes; `deepspeed` compares a save and the peak memory of a resume, each a process of its own;
`async` asks what a save behind the steps adds to them. Where the state is on NVMe, a save has to read it and a load to
write it, and a disk does one at a time: so they are held against fio's read plus its write too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_contestants import Folder, OurEngine, YardStick, check_loaded, drop_page_cache, run_worker
from benchmarks.common import Candidate, Report, RivalMissing, Series, floor_deviates, measure, parser, run_once
from benchmarks.contestants import rival_config
from benchmarks.rivals import deepspeed_setup, fio
from benchmarks.shapes import SHAPES

DISK_MARK, SYNCED_MARK, SAVE_MARK, MEMORY_MARK, ASYNC_MARK, BLOCKED_SECONDS = 0.8, 0.9, 0.5, 0.5, 1.1, 0.1
PARTS = ("disk", "deepspeed", "async")
NAMED = {"write": "write of a new file", "overwrite": "write of an old file", "read": "read of the same file"}
OURS, RIVAL = "ours", "deepspeed"


def main() -> None:
    """Measure, print and write."""
    parsed = parser(__doc__, disk=True)
    parsed.add_argument("--shape", choices=list(SHAPES), default="336M")
    parsed.add_argument("--tier", nargs="+", choices=["none", "cpu", "nvme"], default=["cpu", "nvme"])
    parsed.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parsed.add_argument("--lock", default=None, metavar="FILE", help="held by each process: measurements take turns")
    options = parsed.parse_args()
    report = Report("checkpoint", __doc__, options, folders=[options.path])
    report.figure("parameters", SHAPES[options.shape].numel, f"{SHAPES[options.shape].numel:,}")
    report.figure("page cache is dropped before reads", drop_page_cache())
    report.figure("fio", fio.version())
    for tier in options.tier:
        if "disk" in options.part:
            disk(report, options, tier)
        if "async" in options.part:
            behind(report, options, tier)
        if "deepspeed" in options.part and tier != "none":
            rival(report, options, tier)
    report.finish()


def disk(report: Report, options: argparse.Namespace, tier: str) -> None:
    """Saves and loads of one engine, and fio's writes and reads of as many bytes."""
    with Folder(options.path) as folder, OurEngine(options.shape, tier, folder) as engine:
        engine.save()
        nbytes = engine.checkpoint_bytes()
        with YardStick(folder, nbytes) as stick:
            candidates: dict[str, Candidate] = {
                "save": engine.save,
                "write": stick.write,
                "load": engine.load,
                "read": lambda: stick.read(engine.data_file()),
                "overwrite": lambda: stick.over("write"),
            }
            rules = [floor_deviates("write"), floor_deviates("read")]
            name = f"{tier}: disk"
            series = measure(name, candidates, rounds=options.rounds, rules=rules, disk=options.path)
    report.keep(series, nbytes)
    report.figure(f"{tier}: bytes of a checkpoint", nbytes, f"{nbytes:,}")
    for operation, floor in (("save", "write"), ("save", "overwrite"), ("load", "read")):
        ratios = series.ratios(lambda r, a=floor, b=operation: r[a].seconds / r[b].seconds)  # type: ignore[misc]
        report.mark(f"{tier}: {operation} GB/s / {stick.what}'s {NAMED[floor]}", ratios, at_least=DISK_MARK)
    synced = series.ratios(lambda r: r["write"].figures["synced_seconds"] / r["save"].seconds)
    report.mark(f"{tier}: save GB/s / {stick.what}'s {NAMED['write']}, both synced", synced, at_least=SYNCED_MARK)
    for operation in ("save", "load") if tier == "nvme" else ():
        combined = series.ratios(lambda r, b=operation: (r["read"].seconds + r["write"].seconds) / r[b].seconds)  # type: ignore[misc]
        report.mark(f"{tier}: time of {stick.what}'s read + write / {operation}", combined, at_least=DISK_MARK)


def rival(report: Report, options: argparse.Namespace, tier: str) -> None:
    """Saves and resumes of ours and of DeepSpeed's, each in a process of its own."""
    reason = deepspeed_setup.why_missing()
    if reason is not None:
        report.lack(RIVAL, reason)
    with Folder(options.path) as our_folder, Folder(options.path) as rival_folder:
        folders = {OURS: our_folder, **({} if reason is not None else {RIVAL: rival_folder})}
        for action in ("save", "resume"):
            candidates = {name: contestant(options, tier, name, action, folder) for name, folder in folders.items()}
            try:
                series = measure(f"{tier}: {action}", candidates, rounds=options.rounds, warmups=0, disk=options.path)
            except RivalMissing as error:
                report.lack(RIVAL, f"{tier}, {action}: {error}")
                return
            report.keep(series)
            compare(report, series, tier, action)


def contestant(options: argparse.Namespace, tier: str, name: str, action: str, folder: Path) -> Candidate:
    """One process that saves into `folder` or resumes from it."""
    shape = SHAPES[options.shape]
    config = rival_config(tier, folder, shape, {}) if name == RIVAL else None

    def run() -> Mapping[str, Any]:
        drop_page_cache()
        figures = run_worker(name, options.shape, tier, action, folder, config, options.lock)
        if action == "resume":
            check_loaded(name, figures)
        return figures

    return run


def compare(report: Report, series: Series, tier: str, action: str) -> None:
    """Times, memory, and for saves what it takes until the bytes are on the disk."""
    for name in series.rounds[0]:
        peak = series.median(name, "peak_rss_bytes")
        report.figure(f"{tier}: {action}, {name}, peak memory", peak, f"{peak / 1e9:.2f} GB")
    if RIVAL not in series.rounds[0]:
        return
    if action == "save":
        for figure in ("seconds", "durable_seconds"):
            ratios = series.ratios(lambda r, f=figure: _of(r[OURS], f) / _of(r[RIVAL], f))  # type: ignore[misc]
            until = "until it returns (ours: synced)" if figure == "seconds" else "until synced"
            report.mark(f"{tier}: save {until}, ours / deepspeed", ratios, at_most=SAVE_MARK)
    else:
        ratios = series.ratios(lambda r: _of(r[OURS], "peak_rss_bytes") / _of(r[RIVAL], "peak_rss_bytes"))
        report.mark(f"{tier}: peak memory of a resume, ours / deepspeed", ratios, at_most=MEMORY_MARK)
        report.mark(f"{tier}: load, ours / deepspeed", series.ratios(lambda r: r[OURS].seconds / r[RIVAL].seconds))


def _of(run: Any, figure: str) -> float:
    return float(run.seconds if figure == "seconds" else run.figures[figure])


def behind(report: Report, options: argparse.Namespace, tier: str) -> None:
    """Steps with a save behind them, and as many without."""
    with Folder(options.path) as folder, OurEngine(options.shape, tier, folder, asynchronous=True) as engine:
        if not engine.can_save_behind():
            report.lack(f"{tier}: async", "this engine does not save behind its steps")
            return
        nbytes = engine.save_behind()["bytes"]
        engine.steps(1)
        with YardStick(folder, nbytes * (2 if tier == "nvme" else 1)) as stick:
            rounds = []
            for _ in range(options.rounds):
                runs = {"with": run_once(engine.save_behind, options.path)}
                steps = runs["with"].figures["steps"]
                runs["without"] = run_once(lambda n=steps: engine.steps(n), options.path)  # type: ignore[misc]
                runs["mixed"] = run_once(lambda: stick.over("mixed"), options.path)
                rounds.append(runs)
    series = Series(f"{tier}: async", rounds, [None] * len(rounds), {}, len(rounds))
    report.keep(series)
    counts = [r["with"].figures["steps"] for r in rounds]
    report.figure(f"{tier}: async, steps until durable", statistics.median(counts))
    ratios = series.ratios(lambda r: (r["with"].seconds - r["without"].seconds) / r["mixed"].seconds)
    report.mark(f"{tier}: async, extra time / (bytes / mixed bandwidth)", ratios, at_most=ASYNC_MARK)
    blocked = series.ratios(lambda r: float(r["with"].figures["blocked_seconds"]))
    report.mark(f"{tier}: async, seconds that the call takes", blocked, at_most=BLOCKED_SECONDS)


if __name__ == "__main__":
    main()
