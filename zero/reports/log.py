"""What the engine says by itself: one line at the start, what was asked for, and warnings; `log_level` has more.

The tables of the plan and of the dtypes are for whoever sets `log_level: info`, has a logger of his own at that level,
or calls `zero plan`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from offload.kernels.kernels import isa
from offload.sizes import format_bytes
from zero.config import Config
from zero.exchange.exchange import Exchange
from zero.params.layout import Layout
from zero.plan.plan import DEVICE, HOST, NVME, Plan
from zero.ranks import world
from zero.store.storage import Storage

logger = logging.getLogger("zero")

NOTICE = logging.INFO + 5  # What is shown unless a level is set: asked for, or what nobody should have to look for.
COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
logging.addLevelName(NOTICE, "NOTICE")


def show_log() -> None:
    """Let notices and warnings be seen unless the application has set up logging itself."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(NOTICE)


_levels_before: list[int] = []
"""Of the logger, while that of a configuration holds; at most one."""


def follow(config: Config) -> None:
    """Take `log_level`; it holds until an engine comes whose configuration has none.

    Without it ranks other than the first say nothing but errors; they would repeat its lines.
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
    config: Config, layout: Layout, plan: Plan, storage: Storage, exchange: Exchange, coded: Mapping[int, int]
) -> str:
    """What is trained, what it takes of each tier on this rank, and what moves and updates it.

    `coded`: as `coded_numel` finds it.
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
    ranks = exchange.placement.world_size
    if ranks > 1:
        parts.append(f"each of {ranks} ranks")
    names = {NVME: "NVMe", HOST: "host", DEVICE: "device"}
    parts += [f"{name} {format_bytes(plan.tier_bytes(tier))}" for tier, name in names.items() if plan.tier_bytes(tier)]
    if not plan.tier_bytes(NVME) and any(block.device == NVME for block in blocks):
        parts.append("NVMe unused: host memory has room")
    parts += [storage.disk.aio.backend] if storage.disk else []
    return f"zero: {', '.join([*parts, isa()])}"


def format_count(count: int) -> str:
    """Of parameters, with three digits: 676, 51.9 M, 8.03 B."""
    for size, unit in COUNTS:
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return str(count)
