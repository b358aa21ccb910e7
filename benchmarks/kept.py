"""The results that are kept in `benchmarks/results`, read for tables and pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published import RUNS

RESULTS = Path(__file__).resolve().parent / "results"
NAMES = {
    "8B": ("Llama-3.1-8B, 8-bit moments, 64 tokens", "Llama-3.1-8B,\n8-bit moments"),
    "5B": ("Llama-3.1-8B cut to 24 layers and a vocabulary of 32,000, 64 tokens", "Llama-3.1-8B,\ncut to 24 layers"),
    "30B-A3B": ("Qwen3-30B-A3B, LoRA on attention over 4-bit codes, 16 tokens", "Qwen3-30B-A3B, LoRA"),
    "3B": ("GPT under a budget, 2 x 64 tokens", "GPT under a budget"),
}
"""What `largest_model` trained, in a table and in a picture."""


def load_result(name: str) -> dict[str, Any]:
    """The result of that name; raises FileNotFoundError."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def counted_rounds(series: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rounds of a series that count: the undisturbed ones, or all if those are too few."""
    rounds = zip(series["tried"], series["complaints"], strict=True)
    return list(series["tried"]) if series["is_contended"] else [r for r, complaint in rounds if complaint is None]


def machine_of(results: Iterable[Mapping[str, Any]]) -> str:
    """The machines that the results name, with the most versions of what ran there; empty if none names one."""
    machines = [result["machine"] for result in results if "machine" in result]
    if not machines:
        return ""
    machine = max(machines, key=lambda m: sum(version is not None for version in m["versions"].values()))
    versions = [f"{name} {version}" for name, version in sorted(machine["versions"].items()) if version is not None]
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB of memory"
    cores = " or of an ".join(dict.fromkeys(result_machine["cpu"] for result_machine in machines))
    return ", ".join([f"{machine['cores']} cores of an {cores}", memory, *versions])


@dataclass(frozen=True, slots=True)
class LargeRun:
    """One model in a memory cgroup."""

    name: str
    limit_gib: float
    trained_numel: int
    peak_bytes: int
    nvme_bytes: int
    moved_bytes: int
    """In a step, both ways."""
    seconds: float
    floor_ratio: float
    """Step / what its bytes take alone."""
    is_full: bool
    """All parameters are trained."""


def large_runs(results: Iterable[Mapping[str, Any]]) -> list[LargeRun]:
    """Every model of ours in results of `largest_model`, the largest limit and model first; parameters, not codes.

    Of a model that several results have, the first counts.
    """
    runs: list[LargeRun] = []
    for result in results:
        ratios = {mark["what"].partition(":")[0]: mark["median"] for mark in result["marks"]}
        for series in result["series"]:
            name = series["name"]
            if "ours" not in series["tried"][0] or any(earlier.name == name for earlier in runs):
                continue
            run = counted_rounds(series)[0]["ours"]
            figures = run["figures"]
            runs.append(
                LargeRun(
                    name=name,
                    limit_gib=RUNS[name].limit_gib if name in RUNS else result["options"]["limit_gib"],
                    trained_numel=figures.get("trained_parameters") or _numel_of(result, name),
                    peak_bytes=figures["peak_rss_bytes"],
                    nvme_bytes=figures["plan_bytes"]["nvme"],
                    moved_bytes=figures["nvme_read_bytes"] + figures["nvme_write_bytes"],
                    seconds=run["seconds"],
                    floor_ratio=ratios[name],
                    is_full=figures.get("trained_parameters") == figures.get("parameters"),
                )
            )
    return sorted(runs, key=lambda run: (not run.is_full, -run.trained_numel))


def full_runs(results: Iterable[Mapping[str, Any]]) -> list[LargeRun]:
    """Those that train all parameters."""
    return [run for run in large_runs(results) if run.is_full]


def _numel_of(result: Mapping[str, Any], name: str) -> int:
    """Of a GPT, whose figures do not say it: from the shape of that name."""
    from benchmarks.shapes import SHAPES

    return SHAPES[name].numel


def rival_outcomes(results: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, float, str]]:
    """(parameters, GiB, what became of it) of each size that DeepSpeed was tried with."""
    for result in results:
        for name, outcomes_by_setting in result["figures"].items():
            if size := re.fullmatch(r"deepspeed \S+ \(([\d,]+) M\) in ([\d.]+) GiB", name):
                outcomes = sorted({value for value in outcomes_by_setting.values() if isinstance(value, str)})
                yield int(size[1].replace(",", "")) * 1_000_000, float(size[2]), " or ".join(outcomes)
