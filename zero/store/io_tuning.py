"""Settings with which the engine opens its disk: the user's, else measured ones, else the defaults."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offload.disk import tuning
from offload.disk.aio import Aio, AioOptions, open_aio
from offload.errors import ConfigError, StorageError
from zero.config import Config


@dataclass(frozen=True, slots=True)
class TunedIo:
    """Settings of the I/O engine, and their origin."""

    backend: str
    chunk_bytes: int
    queue_depth: int
    speeds: tuple[float, ...] | None = None
    """Measured bytes per second of each path's device; None if one of them is not known."""
    note: str = ""
    """Text for the report; empty if nothing was tuned."""


def tune_io(config: Config, paths: Sequence[str]) -> TunedIo:
    """Settings for the devices of `paths`. Keys that the user has set have priority, and so has ZERO_AIO_BACKEND.

    Results never depend on the settings. If a measurement fails, the defaults are used and the note says why.
    """
    aio = config.aio
    named_backend = os.environ.get("ZERO_AIO_BACKEND", "")
    settings = TunedIo(named_backend or "auto", aio.block_size, aio.queue_depth)
    if aio.tune == "off":
        return settings
    look_up = tuning.load_or_probe if aio.tune == "probe" else tuning.read_cached
    try:
        results = [look_up(Path(path)) for path in paths]
    except (ConfigError, StorageError, OSError) as error:
        return replace(settings, note=f"not tuned: {error}")
    known = [result for result in results if result is not None]
    if not known or len(known) < len(results):
        return settings
    best = tuning.combine(known)
    return TunedIo(
        backend=named_backend or best.backend,
        chunk_bytes=aio.block_size if config.origin("aio.block_size") == "user" else best.chunk_bytes,
        queue_depth=aio.queue_depth if config.origin("aio.queue_depth") == "user" else best.queue_depth,
        speeds=tuple(result.mixed_bytes_per_second for result in known),
        note=f"tuned for {', '.join(str(result.device) for result in known)} on {known[0].measured_at}",
    )


def open_tuned(options: AioOptions, tuned: TunedIo) -> Aio:
    """The I/O engine; if a measured backend does not work any more, the best one that works.

    Raises ConfigError: the backend that ZERO_AIO_BACKEND names does not work here.
    """
    try:
        aio = open_aio(options)
    except ConfigError:
        if os.environ.get("ZERO_AIO_BACKEND"):
            raise
        aio = open_aio(replace(options, backend="auto"))
    if tuned.note:
        aio.reason = f"{aio.reason}; {tuned.note}"
    return aio
