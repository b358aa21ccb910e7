"""Counters of the schedule's fetches and releases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class FetchCounters:
    gathers: int = 0
    gathered_bytes: int = 0
    hits: int = 0  # The unit was on the device when it was used.
    late: int = 0  # The unit was in flight when it was used.
    misses: int = 0  # The unit was neither there nor in flight when it was used.
    releases: Counter[int] = field(default_factory=Counter)
    expert_row_bytes: int = 0  # The part of `gathered_bytes` for rows of packed experts that were fetched alone.
    whole_experts: Counter[int] = field(default_factory=Counter)  # How often packed experts were fetched whole.
    live_numel_peak: int = 0
