"""Search by short runs: the placement of weights and states that is fastest, then the micro-batch that pays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.sizes import format_bytes
from zero.plan.machine import available_memory

PLACEMENTS_RUN = 2
"""Number of placements that are run."""
SPEEDUP_MIN = 1.05
"""A doubled micro-batch is kept if samples per second grow at least by this factor."""
BATCH_MAX = 64
TRIAL_SECONDS_MAX = 1800
PLACEMENTS = (("none", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))
"""Tiers of (weights, states), ordered by the speed expected without other knowledge, the fastest first."""
MICRO_BATCH = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration without its micro-batch, and its name."""

    name: str
    content: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a few steps, or the reason why they did not run."""

    micro_batch: int
    seconds: float = float("inf")
    peak_bytes: int = 0
    failure: str = ""
    samples: int | None = None
    """Samples of a step on all ranks; None: one micro-batch."""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return (self.samples or self.micro_batch) / self.seconds

    def __str__(self) -> str:
        peak = format_bytes(self.peak_bytes)
        return self.failure or f"{self.seconds:.3g} s, {self.rate:.3g} samples/s, {peak} at most"


RunTrial = Callable[[Candidate, int], Trial]
"""Runs a configuration with a micro-batch."""
OnBest = Callable[[Trial, Candidate], None]
"""Called with each trial that is the best so far."""


def search(
    candidates: Iterable[Candidate], run: RunTrial, on_best: OnBest, *, least: int = 1, most: int = BATCH_MAX
) -> tuple[Trial, Candidate] | None:
    """The best of the first `PLACEMENTS_RUN` candidates that run, with the largest micro-batch that pays.

    Returns None if none runs.

    Args:
        candidates: the one expected to be fastest first.
        run: see `RunTrial`.
        on_best: see `OnBest`.
        least: the micro-batch at which candidates are compared.
        most: the largest micro-batch to try; equal to `least`: it is not increased.
    """
    best: tuple[Trial, Candidate] | None = None
    ran = 0
    for candidate in candidates:
        trial = run(candidate, least)
        ran += not trial.failure
        if not trial.failure and (best is None or trial.seconds < best[0].seconds):
            best = trial, candidate
            on_best(*best)
        if ran == PLACEMENTS_RUN:
            break
    if best is None:
        return None
    trial, candidate = best
    room_bytes, _ = available_memory()
    while (doubled := trial.micro_batch * 2) <= most and 2 * trial.peak_bytes < room_bytes:
        if not _divides(candidate.content, doubled):
            break
        larger = run(candidate, doubled)
        if larger.failure or larger.rate < SPEEDUP_MIN * trial.rate:
            break
        trial = larger
        on_best(trial, candidate)
    return trial, candidate


def _divides(content: Mapping[str, Any], micro_batch: int) -> bool:
    """False if the samples of a step are given and are not a multiple of the micro-batch."""
    samples = content.get("train_batch_size")
    return not isinstance(samples, int) or samples % micro_batch == 0


def with_tiers(base: dict[str, Any], weights: str, states: str, folders: Sequence[str]) -> dict[str, Any]:
    """The configuration with weights and states on these tiers; `folders`: for those on NVMe."""
    content = copy.deepcopy(base)
    existing = content.get("zero_optimization")
    block = content["zero_optimization"] = existing if isinstance(existing, dict) else {}  # null, or true
    block["stage"] = 3
    for name, tier in (("offload_param", weights), ("offload_optimizer", states)):
        place = {"nvme_path": list(folders)} if tier == "nvme" else {}
        other_keys = {key: value for key, value in (block.get(name) or {}).items() if key != "nvme_path"}
        block[name] = {**other_keys, "device": tier, **place}
    if "nvme" in (weights, states):
        content["memory_budget"] = {"host": "auto", **(content.get("memory_budget") or {})}
    return content


def with_batch(content: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """The configuration with this micro-batch; it keeps the samples of a step if given, else its micro-batches."""
    has_samples = isinstance(content.get("train_batch_size"), int)
    other_keys = {
        key: value for key, value in content.items() if not (has_samples and key == "gradient_accumulation_steps")
    }
    return {**other_keys, MICRO_BATCH: micro_batch}
