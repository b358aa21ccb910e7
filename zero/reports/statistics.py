"""What an engine has done so far, as plain numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from offload.kernels import kernels
from zero.schedule.counters import FetchCounters
from zero.store.storage import Storage

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Wear:
    """What a run costs the drives, which are rated in bytes written."""

    nvme_written_bytes_per_step: float
    nvme_written_bytes_per_day: float
    """If every day goes on like the time that was measured."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Cumulative since `zero.initialize`; subtract two snapshots for a span."""

    steps: int
    micro_steps: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    exposed_wait_seconds: float
    """Time the training thread waited for bytes to move or sub-groups to be updated."""
    nvme_read_bytes: int
    nvme_write_bytes: int
    nvme_read_seconds: float
    """Time with at least one read in flight."""
    nvme_write_seconds: float
    gathers: int
    """Units brought in."""
    gathered_bytes: int
    expert_row_bytes: int
    """Of `gathered_bytes`: routed rows of packed experts, brought in without the others."""
    whole_experts_by_unit: Mapping[str, int]
    """How often a layer's packed experts were brought in whole: the model's own code has touched the parameter."""
    prefetch_hits: int
    """Uses that found their unit resident."""
    prefetch_late: int
    """Uses that found it on its way."""
    prefetch_misses: int
    """Uses nobody had foreseen."""
    releases: int
    releases_by_unit: Mapping[str, int]
    payload_numel: Mapping[str, int]
    """Elements of whole units, padding included, that collectives have handled, by what they were for: "gather",
    "gather persistent", "gather inside nodes", "reduce"; for groups of replicas "reduce over replicas" and "gather over
    replicas"."""
    live_numel_peak: int
    """Most elements gathered or on their way at once; persistent units apart."""
    arena_peak_bytes: int
    """Most bytes leased from the host arena at once."""
    activation_stored_bytes: int
    """Of saved activations that went to their tier; `nvme_write_bytes` has them too, if that is it."""
    activation_restored_bytes: int
    activation_kept_bytes: int
    """On the tier now, in whole pages."""
    activation_peak_bytes: int
    """The most of them there were."""
    aio_backend: str
    aio_reason: str
    isa: str
    taken_at_seconds: float
    """When, on the clock of time.monotonic."""

    def wear_since(self, earlier: Statistics) -> Wear:
        """What was written to NVMe since an earlier snapshot; zeros when nothing happened between them."""
        written = self.nvme_write_bytes - earlier.nvme_write_bytes
        steps = self.steps - earlier.steps
        seconds = self.taken_at_seconds - earlier.taken_at_seconds
        return Wear(
            nvme_written_bytes_per_step=written / steps if steps > 0 else 0.0,
            nvme_written_bytes_per_day=written / seconds * SECONDS_PER_DAY if seconds > 0 else 0.0,
        )

    @property
    def hit_rate(self) -> float:
        """Share of uses that found their unit resident."""
        uses = self.prefetch_hits + self.prefetch_late + self.prefetch_misses
        return self.prefetch_hits / uses if uses else 1.0


@dataclass(frozen=True, slots=True)
class LoopCounters:
    steps: int
    micro_steps: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    payload_numel: Mapping[str, int]


def collect(counters: FetchCounters, storage: Storage, unit_names: list[str], loop: LoopCounters) -> Statistics:
    disk = storage.disk
    aio = disk.aio.stats() if disk else None
    kept = storage.activations
    return Statistics(
        steps=loop.steps,
        micro_steps=loop.micro_steps,
        forward_seconds=loop.forward_seconds,
        backward_seconds=loop.backward_seconds,
        optimizer_seconds=loop.optimizer_seconds,
        exposed_wait_seconds=storage.mover.exposed.seconds,
        nvme_read_bytes=disk.traffic.read_bytes if disk else 0,
        nvme_write_bytes=disk.traffic.write_bytes if disk else 0,
        nvme_read_seconds=disk.traffic.earlier_read_seconds + aio.read_seconds if disk and aio else 0.0,
        nvme_write_seconds=disk.traffic.earlier_write_seconds + aio.write_seconds if disk and aio else 0.0,
        gathers=counters.gathers,
        gathered_bytes=counters.gathered_bytes,
        expert_row_bytes=counters.expert_row_bytes,
        whole_experts_by_unit={unit_names[i]: n for i, n in sorted(counters.whole_experts.items())},
        prefetch_hits=counters.hits,
        prefetch_late=counters.late,
        prefetch_misses=counters.misses,
        releases=counters.releases.total(),
        releases_by_unit={unit_names[i]: n for i, n in sorted(counters.releases.items())},
        payload_numel=dict(loop.payload_numel),
        live_numel_peak=counters.live_numel_peak,
        arena_peak_bytes=storage.arena.peak_bytes,
        activation_stored_bytes=kept.counters.stored_bytes if kept else 0,
        activation_restored_bytes=kept.counters.restored_bytes if kept else 0,
        activation_kept_bytes=kept.kept_bytes if kept else 0,
        activation_peak_bytes=kept.peak_bytes if kept else 0,
        aio_backend=disk.aio.backend if disk else "none",
        aio_reason=disk.aio.reason if disk else "no plane lives on NVMe",
        isa=kernels.isa(),
        taken_at_seconds=time.monotonic(),
    )
