"""How far fetching may look ahead, and how much it may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the plan resolved; all in elements."""

    live_numel_max: int
    """`stage3_max_live_parameters`: never more than this is gathered or on its way."""
    prefetch_numel: int
    """`stage3_prefetch_bucket_size`: look-ahead beyond the next unit."""
    reuse_numel_max: int
    """`stage3_max_reuse_distance`: a unit whose next use is at most this far is kept."""
