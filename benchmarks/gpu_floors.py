"""What a training step on a GPU cannot be faster than: each resource's bytes at its measured rate. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

UPDATE_BYTES = 26
"""Per parameter that the host updates: weight, remainder and two moments read and written, a 16-bit gradient read."""
WIDE_UPDATE_BYTES = 28
"""With the fp32 gradient of several micro-batches."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second as measured on this machine; None: not measured."""

    to_device: float | None = None
    to_host: float | None = None
    host_memory: float | None = None
    """Of a loop over the update's streams on all cores."""
    disk_read: float | None = None
    disk_write: float | None = None
    disk_mixed: float | None = None

    @classmethod
    def from_files(cls, files: Iterable[Path]) -> Rates:
        """The "rates" among the figures of these questions' JSON; files that are not there say nothing."""
        names = {field.name for field in fields(cls)}
        known_rates: dict[str, float] = {}
        for file in files:
            if file.exists():
                rates = json.loads(file.read_text(encoding="utf-8"))["figures"].get("rates", {})
                known_rates.update({name: rate for name, rate in rates.items() if name in names})
        return cls(**known_rates)


@dataclass(frozen=True, slots=True)
class Work:
    """What one step has to do."""

    compute_seconds: float | None
    """Forward and backward of plain torch with everything on the device, all micro-batches; None: not measured."""
    to_device_bytes: int
    to_host_bytes: int
    host_update_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int


def work_of(traffic: Mapping[str, Any], micro_steps: int, compute_seconds: float | None) -> Work:
    """From the plan's traffic of a step (zero.plan.traffic).

    Args:
        traffic: its fields by name.
        micro_steps: micro-batches of a step; of several, gradients are added up in fp32.
        compute_seconds: of one micro-batch.
    """
    update_bytes = UPDATE_BYTES if micro_steps == 1 else WIDE_UPDATE_BYTES
    reads, writes = (
        sum(traffic[name] for name in names)
        for names in (
            ("update_read_bytes", "fetch_read_bytes", "gradient_read_bytes"),
            ("update_write_bytes", "gradient_write_bytes"),
        )
    )
    return Work(
        None if compute_seconds is None else micro_steps * compute_seconds,
        traffic["copied_in_bytes"],
        traffic["copied_out_bytes"],
        update_bytes * traffic["host_updated_numel"],
        reads,
        writes,
    )


def floors(work: Work, rates: Rates) -> dict[str, float | None]:
    """Seconds that each resource needs for its part alone; None: its rate is not known."""
    return {
        "compute": work.compute_seconds,
        "copies to the device": _seconds(work.to_device_bytes, rates.to_device),
        "copies to the host": _seconds(work.to_host_bytes, rates.to_host),
        "host update": _seconds(work.host_update_bytes, rates.host_memory),
        "disk": _disk_seconds(work, rates),
    }


def slowest(seconds_by_name: Mapping[str, float | None]) -> tuple[str, float] | None:
    """What bounds the step, and its seconds: the floor; None where nothing is known."""
    candidates = [(seconds, name) for name, seconds in seconds_by_name.items() if seconds]
    if not candidates:
        return None
    seconds, name = max(candidates)
    return name, seconds


def _disk_seconds(work: Work, rates: Rates) -> float | None:
    """One after the other, or mixed where the disk is faster so."""
    reading = _seconds(work.disk_read_bytes, rates.disk_read)
    writing = _seconds(work.disk_write_bytes, rates.disk_write)
    if reading is None or writing is None:
        return None
    mixed = _seconds(work.disk_read_bytes + work.disk_write_bytes, rates.disk_mixed)
    return reading + writing if mixed is None else min(reading + writing, max(mixed, reading, writing))


def _seconds(nbytes: int, rate: float | None) -> float | None:
    return 0.0 if not nbytes else None if not rate else nbytes / rate
