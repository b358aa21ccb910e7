"""What the schedule has done, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class FetchCounters:
    gathers: int = 0
    gathered_bytes: int = 0
    hits: int = 0  # Resident at touch.
    late: int = 0  # On its way at touch.
    misses: int = 0  # Not foreseen at touch.
    releases: Counter[int] = field(default_factory=Counter)
    expert_row_bytes: int = 0  # Of `gathered_bytes`: rows of packed experts that were brought in alone.
    whole_experts: Counter[int] = field(default_factory=Counter)  # How often packed experts were brought in whole.
    live_numel_peak: int = 0
