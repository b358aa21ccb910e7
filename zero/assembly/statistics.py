"""Counters of an engine's work so far, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistics:
    """Totals since `zero.initialize`; subtract two of them to get the values of a span."""

    steps: int
    micro_steps: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    exposed_wait_seconds: float
    """Time in which the training thread waited for transfers or updates of sub-groups."""
    nvme_read_bytes: int
    nvme_write_bytes: int
    nvme_read_seconds: float
    """Time with at least one read in flight."""
    nvme_write_seconds: float
    gathers: int
    """Number of fetched units."""
    gathered_bytes: int
    expert_row_bytes: int
    """Part of `gathered_bytes`: routed rows of packed experts, fetched without the other rows."""
    whole_experts_by_unit: Mapping[str, int]
    """Number of fetches of all of a layer's packed experts, which happen if the model's code accesses the parameter."""
    prefetch_hits: int
    """Uses that found their unit resident."""
    prefetch_late: int
    """Uses that found their unit in flight."""
    prefetch_misses: int
    """Uses whose unit was not prefetched."""
    releases: int
    releases_by_unit: Mapping[str, int]
    payload_numel: Mapping[str, int]
    """Elements of whole units, including padding, in collectives, by purpose: "gather", "gather persistent", "gather
    inside nodes", "reduce"; for groups of replicas "reduce over replicas" and "gather over replicas"."""
    live_numel_peak: int
    """Highest number of elements resident or in flight, without persistent units."""
    arena_peak_bytes: int
    """Highest number of bytes leased from the host pool."""
    activation_stored_bytes: int
    """Bytes of saved activations written to their tier; if that is NVMe, `nvme_write_bytes` includes them."""
    activation_restored_bytes: int
    activation_kept_bytes: int
    """Bytes of activations on the tier now, in whole pages."""
    activation_peak_bytes: int
    """Highest value of `activation_kept_bytes`."""
    aio_backend: str
    aio_reason: str
    isa: str
    taken_at_seconds: float
    """Time of the collection, on the clock of time.monotonic."""
