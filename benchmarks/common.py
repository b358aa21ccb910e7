"""What every benchmark shares: interleaved rounds, ratios with an interval, marks, and the JSON of all runs.

A benchmark is one question, run as `python -m benchmarks.<question> --json FILE`:

    report = Report("adam", __doc__, options, folders=[options.path])
    series = measure("2 threads", {"ours": ours, "bound": bound}, rounds=20, rules=[floor_deviates("bound")])
    report.keep(series)
    report.mark("ours / bound", series.ratios(lambda r: r["bound"].seconds / r["ours"].seconds), at_least=0.9)
    report.finish()

Absolute times drift with the machine's neighbours, by 2x and more; ratios within a round hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.machine import DiskCounters
from offload.memory.host_memory import map_host, tensor_over

PAIRS_MIN = 5
COMPUTE_WALL_MAX = 1.4
"""Wall time / (CPU seconds / threads): threads that have the cores to themselves are at 1, past this disturbed.
For two threads that is a wall time of 0.7 x the CPU seconds."""
FLOOR_DEVIATION_MAX = 1.3
"""A floor this much slower than the fastest one seen was measured on a busy machine."""
LAUNCHER_SAYS = r"^[EW]\d{4} .*torch/distributed/elastic"
TRIES_PER_ROUND = 3
"""How patient a series is with a busy machine; cheap rounds can be more patient."""
RESAMPLES = 2000
CONFIDENCE = 0.95


class RivalMissing(Exception):
    """A rival cannot run here; the text says why. It is reported, and the question goes on without it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One candidate in one round."""

    seconds: float
    """What the candidate says it took, or else its wall time."""
    wall_seconds: float
    cpu_seconds: float
    """Of this process and of its children that have ended."""
    disk: DiskCounters | None
    """What the kernel counted meanwhile, everybody's traffic included."""
    figures: Mapping[str, Any]
    """Whatever else the candidate measured."""


Round = dict[str, Run]
Candidate = Callable[[], Mapping[str, Any] | None]
"""Runs once; may return figures. Where only a part of it is the answer: "seconds", and "disk" (DiskCounters)."""
Rule = Callable[[Round, Sequence[Round]], str | None]
"""Why this round must be repeated, given all that were run; None: it counts."""


@dataclass(frozen=True, slots=True)
class Series:
    """Candidates measured turn by turn."""

    name: str
    tried: list[Round]
    complaints: list[str | None]
    """For each round tried, why it does not count."""
    missing: dict[str, str]
    """Rivals that could not run, and why."""
    wanted: int

    @property
    def is_contended(self) -> bool:
        """Too few rounds were undisturbed, so all of them count."""
        return self.complaints.count(None) < self.wanted

    @property
    def rounds(self) -> list[Round]:
        """Those that count."""
        if self.is_contended:
            return self.tried
        return [r for r, complaint in zip(self.tried, self.complaints, strict=True) if complaint is None]

    def has(self, *names: str) -> bool:
        """All of these candidates ran."""
        return not set(names) & set(self.missing)

    def ratios(self, of: Callable[[Round], float]) -> list[float]:
        """One value for each round that counts."""
        return [of(r) for r in self.rounds]

    def median(self, name: str, figure: str = "seconds") -> float:
        """Median of a candidate's seconds or of another of its figures."""
        return statistics.median(
            r[name].seconds if figure == "seconds" else float(r[name].figures[figure]) for r in self.rounds
        )


def measure(
    name: str,
    candidates: Mapping[str, Candidate],
    *,
    rounds: int = PAIRS_MIN,
    warmups: int = 1,
    pause_seconds: float = 0.0,
    rules: Sequence[Rule] = (),
    tries_per_round: int = TRIES_PER_ROUND,
    disk: Path | str | None = None,
) -> Series:
    """Run the candidates turn by turn, every other round backwards, until `rounds` rounds were undisturbed.

    Args:
        name: of the series.
        candidates: the first `warmups` runs of each are discarded; one that raises RivalMissing is left out.
        rounds: how many must count.
        warmups: discarded runs of each candidate, for page faults, caches and thread pools.
        pause_seconds: before each run, for what the one before may have left spinning.
        rules: why a round does not count; asked again for all rounds after each.
        tries_per_round: gives up after so many times `rounds`; then all count, and the series says so.
        disk: folder on the device whose counters are kept.
    """
    present, missing = dict(candidates), dict[str, str]()
    for candidate, run in candidates.items():
        try:
            for _ in range(warmups):
                run()
        except RivalMissing as error:
            missing[candidate] = str(error)
            del present[candidate]
    tried: list[Round] = []
    complaints: list[str | None] = []
    while complaints.count(None) < rounds and len(tried) < rounds * tries_per_round:
        order = list(present) if len(tried) % 2 == 0 else list(present)[::-1]
        runs = {}
        for candidate in order:
            time.sleep(pause_seconds)
            runs[candidate] = run_once(present[candidate], disk)
        tried.append({candidate: runs[candidate] for candidate in present})
        complaints = [next((c for rule in rules if (c := rule(r, tried))), None) for r in tried]
    return Series(name, tried, complaints, missing, rounds)


def run_once(candidate: Candidate, disk: Path | str | None = None) -> Run:
    """One run with its wall time, CPU time and disk traffic."""
    disk_before, cpu_before, begin = machine.read_disk(disk), cpu_seconds(), time.perf_counter()
    figures = dict(candidate() or {})
    wall, cpu = time.perf_counter() - begin, cpu_seconds() - cpu_before
    disk_after = machine.read_disk(disk)
    moved_bytes = None if disk_before is None or disk_after is None else disk_after.since(disk_before)
    return Run(float(figures.pop("seconds", wall)), wall, cpu, figures.pop("disk", moved_bytes), figures)


def cpu_seconds() -> float:
    """CPU time of this process and of its ended children."""
    process, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return process.ru_utime + process.ru_stime + children.ru_utime + children.ru_stime


def compute_contended(name: str, threads: int = 2) -> Rule:
    """The rule for a candidate that computes on so many threads all the time; a missing one cannot be disturbed."""

    def rule(this: Round, tried: Sequence[Round]) -> str | None:
        if name not in this:
            return None
        run = this[name]
        if run.wall_seconds * threads <= COMPUTE_WALL_MAX * run.cpu_seconds:
            return None
        return f"{name}: {run.wall_seconds:.4f} s for {run.cpu_seconds:.4f} CPU seconds on {threads} threads"

    return rule


def floor_deviates(name: str, by: float = FLOOR_DEVIATION_MAX) -> Rule:
    """The rule for a floor that is the same in every round; a rival that is missing cannot deviate."""

    def rule(this: Round, tried: Sequence[Round]) -> str | None:
        if name not in this:
            return None
        fastest = min(earlier[name].seconds for earlier in tried)
        if this[name].seconds <= by * fastest:
            return None
        return f"{name}: {this[name].seconds:.3f} s, the fastest round {fastest:.3f} s"

    return rule


@dataclass(frozen=True, slots=True)
class Summary:
    """A median and the interval it lies in."""

    median: float
    low: float
    high: float
    values: list[float]

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def summarize(values: Sequence[float]) -> Summary:
    """The median and its 95 % bootstrap interval."""
    if not values:
        raise ValueError("summarize: no values")
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Summary(statistics.median(values), medians[tail], medians[-1 - tail], list(values))


@dataclass(slots=True)
class Report:
    """What a question found: printed as it comes, written as JSON at the end. A missed mark fails nothing."""

    question: str
    doc: str | None
    options: argparse.Namespace
    folders: Sequence[Path | str] = ()
    series: list[Series] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        print(f"# {self.question}: {(self.doc or '').strip().splitlines()[0] if self.doc else ''}", flush=True)

    def keep(self, series: Series, moved_bytes: int | Mapping[str, int] = 0) -> None:
        """Keep every run of a series and print its medians; `moved_bytes` (of each or by name) add GB/s."""
        self.series.append(series)
        for rival, reason in series.missing.items():
            self.lack(rival, reason)
        for name in series.rounds[0]:
            runs = [r[name] for r in series.rounds]
            nbytes = moved_bytes if isinstance(moved_bytes, int) else moved_bytes.get(name, 0)
            print(f"{series.name:<28} {name:<24} {line_of(runs, nbytes)}", flush=True)
        repeated = len(series.tried) - series.complaints.count(None)
        if series.is_contended:
            print(f"{series.name}: CONTENDED, {repeated} of {len(series.tried)} rounds disturbed; all are used")
        elif repeated:
            print(f"{series.name}: {repeated} disturbed rounds were repeated")

    def lack(self, rival: str, reason: str) -> None:
        """Say once that a rival is missing, and why."""
        if rival not in self.missing:
            print(f"{rival}: missing: {reason}", flush=True)
        self.missing[rival] = reason

    def mark(
        self, what: str, values: Sequence[float], *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Print a ratio, and whether it meets its bound if it has one."""
        summary = summarize(values)
        verdict = verdict_of(summary.median, at_least, at_most)
        bounds = ((sign, bound) for sign, bound in ((">=", at_least), ("<=", at_most)) if bound is not None)
        bound = " and ".join(f"{sign} {value:g}" for sign, value in bounds)
        print(f"{what:<53} {summary}  {'must be ' + bound if bound else ''} {verdict}".rstrip(), flush=True)
        entry = dataclasses.asdict(summary)
        self.marks.append({"what": what, **entry, "at_least": at_least, "at_most": at_most, "verdict": verdict})

    def figure(self, what: str, value: Any, text: str | None = None) -> None:
        """Print and keep something that is no ratio."""
        print(f"{what:<53} {value if text is None else text}", flush=True)
        self.figures[what] = value

    def finish(self) -> None:
        """Write the JSON where the options ask for it. May be called after every part: what is there is whole."""
        options = json.loads(_without_folders(json.dumps(vars(self.options), default=str)))
        options.pop("json", None)
        options.pop("path", None)  # the name of a folder says nothing about the disk below it
        content = {
            "question": self.question,
            "options": options,
            "machine": machine.describe(self.folders),
            "marks": self.marks,
            "figures": self.figures,
            "missing": self.missing,
            "series": [{**dataclasses.asdict(s), "is_contended": s.is_contended} for s in self.series],
        }
        if self.options.json is not None:
            target = Path(self.options.json)
            unfinished = target.with_name(target.name + ".part")
            unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(target)


def verdict_of(value: float, at_least: float | None, at_most: float | None) -> str:
    """Whether the bounds are "met" or "MISSED"; empty without a bound."""
    if at_least is None and at_most is None:
        return ""
    return "met" if (at_least is None or value >= at_least) and (at_most is None or value <= at_most) else "MISSED"


def line_of(runs: Sequence[Run], moved_bytes: int) -> str:
    """Median, extremes and traffic of one candidate."""
    seconds = [run.seconds for run in runs]
    text = f"{statistics.median(seconds):9.4f} s ({min(seconds):.4f} to {max(seconds):.4f})"
    if moved_bytes:
        text += f" {moved_bytes / statistics.median(seconds) / 1e9:6.2f} GB/s"
    disks = [run.disk for run in runs if run.disk is not None]
    if disks:
        read_bytes, write_bytes = (
            statistics.median(getattr(d, f"{op}_bytes") for d in disks) for op in ("read", "write")
        )
        text += f"  kernel: {read_bytes / 1e9:.3f} GB read, {write_bytes / 1e9:.3f} GB written"
    return text


def parser(doc: str | None, *, rounds: int = PAIRS_MIN, disk: bool = False) -> argparse.ArgumentParser:
    """The arguments all questions share; `disk` adds the folder on the disk in question."""
    parsed = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed.add_argument("--json", type=Path, default=None, metavar="FILE", help="where every run is written")
    parsed.add_argument("--rounds", type=int, default=rounds, help=f"interleaved rounds (default {rounds})")
    if disk:
        parsed.add_argument("--path", type=_folder, default=Path("."), help="folder on the disk in question; made")
    return parsed


def _folder(text: str) -> Path:
    path = Path(text)
    path.mkdir(parents=True, exist_ok=True)
    return path


def run_child(
    arguments: Sequence[str], *, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> dict[str, Any]:
    """Run `python <arguments>` and return the JSON object on the last line it prints.

    A child reports its own peak memory: what `wait4` says about it includes the parent's.

    Raises:
        RivalMissing: it failed; the text has its exit status and the end of what it said.
    """
    command = [*prefix, sys.executable, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    lines = process.stdout.strip().splitlines()
    try:
        if process.returncode == 0 and lines:
            return dict(json.loads(lines[-1]))
    except ValueError:
        pass
    # What a launcher of ranks adds says nothing that the first rank that failed did not.
    errors = re.split(LAUNCHER_SAYS, process.stderr, maxsplit=1, flags=re.MULTILINE)[0]
    output = " | ".join((errors.strip() or process.stdout.strip()).splitlines()[-3:])
    raise RivalMissing(_without_folders(f"{' '.join(arguments[:3])} ended with status {process.returncode}: {output}"))


def _without_folders(text: str) -> str:
    """Results are read elsewhere: of a path only its last name means something there."""
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)*([\w.+-]+)", r"\1", text)


def write_incompressible(fd: int, nbytes: int, chunk_bytes: int = 64 << 20) -> None:
    """Fill the first `nbytes` of an O_DIRECT file with random bytes: drives cheat on zeros and on repeats."""
    chunk_bytes = min(chunk_bytes, nbytes)
    view = map_host(chunk_bytes)
    data = tensor_over(view)
    generator = torch.Generator().manual_seed(0)
    position = 0
    while position < nbytes:
        length = min(chunk_bytes, nbytes - position)
        data.random_(generator=generator)
        written = 0
        while written < length:
            written += os.pwrite(fd, view[written:length], position + written)
        position += length
    os.fdatasync(fd)
