"""Settings that all offload blocks share: the folders of swap files, and whether host memory is pinned."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from offload.errors import ConfigError
from offload.io.swapfile import make_folder
from zero.config import Config

logger = logging.getLogger("zero")


def swap_paths(config: Config) -> list[str]:
    """The folders of all blocks that use NVMe, without repetition; if these name none, the folders of all blocks."""
    zero, activations = config.zero_optimization, config.activation_checkpointing
    blocks = (zero.offload_param, zero.offload_optimizer, activations)
    used = [block for block in blocks if block.device == "nvme" and block.nvme_path]
    folders: dict[str, str] = {}
    for path in (path for block in used or blocks for path in block.nvme_path or ()):
        folders.setdefault(os.path.realpath(path), path)  # one folder may have several names
    return list(folders.values())


def create_swap_paths(config: Config) -> list[str]:
    """`swap_paths`, where missing folders are made. Raises ConfigError: there is none, or one cannot be made."""
    paths = swap_paths(config)
    if not paths:
        raise ConfigError(
            "nvme_path: the plan needs swap space, but no block sets nvme_path; set it to a folder on the NVMe "
            "file system"
        )
    return create_folders(paths)


def create_folders(paths: Iterable[str]) -> list[str]:
    """Make missing folders, with a warning for each. Raises ConfigError: one cannot be made."""
    ready = list(paths)
    for path in ready:
        warning = make_folder(path)
        if warning:
            logger.warning("%s", warning)
    return ready


def wants_pinning(config: Config) -> bool:
    """True unless the user has switched it off: copies from pageable memory stop the stream."""
    if config.zero_optimization.cpu_offload_use_pin_memory is False:
        return False
    return not any(
        config.origin(f"zero_optimization.{block}.pin_memory") == "user" and not settings.pin_memory
        for block, settings in (
            ("offload_param", config.zero_optimization.offload_param),
            ("offload_optimizer", config.zero_optimization.offload_optimizer),
        )
    )
