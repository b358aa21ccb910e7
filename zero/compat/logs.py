"""`deepspeed.utils.logging`: the logger whose level clients set, and whose records they read."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence

from zero.dist import world

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
logger = logging.getLogger("DeepSpeed")


def _add_handler() -> None:
    """Add a handler to the logger, as DeepSpeed does: clients expect its lines without any set-up."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        if logger.level == logging.NOTSET:  # otherwise the program has set it before this import
            logger.setLevel(log_levels.get(os.environ.get("DS_LOG_LEVEL", "").lower(), logging.WARNING))


@functools.cache
def warning_once(message: str) -> None:
    logger.warning(message)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks; None or [-1]: on all. Before torch.distributed is initialised, always log."""
    if _is_logging_rank(ranks):
        logger.log(level, "[Rank %d] %s", world.rank(), message)


@functools.cache
def _once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    _once(message, tuple(ranks or ()), level)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    if _is_logging_rank(ranks):
        print(f"[Rank {world.rank()}] {message}")


def set_log_level_from_string(log_level_str: str) -> None:
    """Set the logger's level by name, such as "info". Raises ValueError."""
    logger.setLevel(get_log_level_from_string(log_level_str))


def get_log_level_from_string(log_level_str: str) -> int:
    """The level of that name. Raises ValueError."""
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str} is not one of the log levels: {', '.join(log_levels)}")
    return level


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """True when the logger's level is at or below the level of that name. Raises ValueError."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def _is_logging_rank(ranks: Sequence[int] | None) -> bool:
    return not world.is_distributed() or not ranks or ranks[0] == -1 or world.rank() in ranks


logger.warning_once = warning_once  # type: ignore[attr-defined]
_add_handler()
