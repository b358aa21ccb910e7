"""What every benchmark shares: interleaved rounds, medians, and the machine they ran on."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def interleaved(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each candidate in each round; the candidates take turns, so drift hits all alike."""
    for run in candidates.values():
        run()  # warm-up: page faults, caches, thread pools
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def report(question: str, name: str, seconds: list[float], **figures: Any) -> None:
    """Print one JSON line."""
    line = {
        "question": question,
        "name": name,
        "median_ms": round(statistics.median(seconds) * 1e3, 3),
        "min_ms": round(min(seconds) * 1e3, 3),
        "max_ms": round(max(seconds) * 1e3, 3),
        "rounds": len(seconds),
        **figures,
        "cpu": cpu_name(),
        "commit": commit(),
    }
    print(json.dumps(line), flush=True)


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the per-round ratios ours / theirs: below 1 means ours is faster."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def cpu_name() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str:
    """The checkout's commit, or "unknown"."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
