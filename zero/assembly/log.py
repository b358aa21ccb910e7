"""The engine's log: by default one line at the start, requested output, and warnings; `log_level` shows more.

The tables of the plan and of the dtypes are shown with `log_level: info`, with a user's own logger at that level, or by
`zero plan`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from offload.kernels.kernels import isa
from offload.sizes import format_bytes
from zero.config import Config
from zero.dist import world
from zero.params.layout import Layout
from zero.plan.plan import DEVICE, HOST, NVME, Plan
from zero.store.collectives import Collectives
from zero.store.storage import Storage

logger = logging.getLogger("zero")

NOTICE = logging.INFO + 5  # Shown by default: requested output, and lines that a user should not have to search for.
COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
logging.addLevelName(NOTICE, "NOTICE")


def show_log() -> None:
    """Show notices and warnings, unless the application has set up logging itself."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(NOTICE)


_levels_before: list[int] = []
"""The logger's own level, while the level of a configuration is in effect; at most one."""


def set_log_level(config: Config) -> None:
    """Set `log_level`; it stays in effect until an engine is made whose configuration has none.

    Without it, ranks other than the first log errors only, since they would repeat the first rank's lines.
    """
    if _levels_before:
        logger.setLevel(_levels_before.pop())
    if config.log_level is not None:
        _levels_before.append(logger.level)
        first, level = world.rank() == 0, getattr(logging, config.log_level.upper())
        logger.setLevel(level if first else max(level, logging.WARNING))
    elif logger.level == NOTICE and world.rank() > 0:
        logger.setLevel(logging.ERROR)


def start_line(
    config: Config, layout: Layout, plan: Plan, storage: Storage, collectives: Collectives, coded: Mapping[int, int]
) -> str:
    """The line at the start: parameters, bytes on each tier of this rank, I/O backend and kernels.

    `coded`: the result of `coded_numel`.
    """
    blocks = (config.zero_optimization.offload_param, config.zero_optimization.offload_optimizer)
    total, trained = (
        sum(coded.get(s.index, s.numel) for unit in layout.units if unit.trainable or not only for s in unit.slots)
        for only in (False, True)
    )
    parts = [f"{format_count(total)} parameters"]
    if not trained:
        parts.append("none of them trained")
    elif trained < total:
        parts.append(f"{format_count(trained)} of them trained")
    ranks = collectives.placement.world_size
    if ranks > 1:
        parts.append(f"each of {ranks} ranks")
    names = {NVME: "NVMe", HOST: "host", DEVICE: "device"}
    parts += [f"{name} {format_bytes(plan.tier_bytes(tier))}" for tier, name in names.items() if plan.tier_bytes(tier)]
    if not plan.tier_bytes(NVME) and any(block.device == NVME for block in blocks):
        parts.append("NVMe unused: host memory has room")
    parts += [storage.disk.aio.backend] if storage.disk else []
    return f"zero: {', '.join([*parts, isa()])}"


def format_count(count: int) -> str:
    """A count of parameters with three digits: 676, 51.9 M, 8.03 B."""
    for size, unit in COUNTS:
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return str(count)
