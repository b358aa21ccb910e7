"""Which checkpoint is meant, and what is in it: ours, or one that DeepSpeed has written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, DamagedError
from offload.files.durable import Files
from zero.checkpoint.deepspeed_folder import is_deepspeed_folder, open_deepspeed_folder
from zero.checkpoint.finding import check_tag
from zero.checkpoint.folder_source import CLIENT, RANK, STATE, FolderSource
from zero.checkpoint.folders import Folders
from zero.checkpoint.manifest import NAME, Manifest, check, read_manifest
from zero.checkpoint.source import Source

logger = logging.getLogger("zero")


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint to load from; close its source."""

    folder: Path
    source: Source
    state: dict[str, Any]
    """What all ranks had in common."""
    client: Callable[[], dict[str, Any]]
    """`client_state` and `lr_scheduler`; makes objects of any class where the checkpoint is ours."""
    rank_state: Callable[[int], dict[str, Any] | None]
    """What a rank had of its own; None if there was no such rank."""
    tag: str = ""
    """Of one of ours."""


def open_checkpoint(
    load_dir: Path, tag: Any = None, files: Files | None = None, without: Collection[str] = ()
) -> Opened | None:
    """The checkpoint of a save_dir that is to be loaded; None if there is none and none was asked for.

    Args:
        load_dir: folder of checkpoints.
        tag: which; None: the one that `latest` names, or the newest that is whole.
        files: the disk.
        without: tags that are known to be damaged.

    Raises:
        ConfigError: the one asked for is missing or damaged.
    """
    disk = files if files is not None else Files()
    folders = Folders(load_dir, disk)
    named = folders.read_latest() if tag is None else check_tag(tag)
    if named and not disk.exists(load_dir / named / NAME) and is_deepspeed_folder(load_dir / named):
        return _open_deepspeed(load_dir / named)
    found = folders.newest_valid(tag, without)
    if found is None:
        return None
    for note in found.notes:
        logger.warning("load_checkpoint: %s", note)
    try:
        return replace(_open_ours(found.folder, found.manifest, disk), tag=found.tag)
    except DamagedError as error:
        if tag is not None:
            raise
        logger.warning("load_checkpoint: %s", error)
        return open_checkpoint(load_dir, None, disk, {*without, found.tag})


def open_folder(path: Path | str, files: Files | None = None) -> Opened:
    """A checkpoint to read outside an engine.

    Args:
        path: `save_dir/TAG`; or `save_dir`, for the one that `latest` names, or the newest that is whole.
        files: the disk.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    folder, disk = Path(path), files if files is not None else Files()
    if disk.exists(folder / NAME):
        manifest = read_manifest(disk, folder)
        check(disk, folder, manifest)
        return _open_ours(folder, manifest, disk)
    if is_deepspeed_folder(folder):
        return _open_deepspeed(folder)
    opened = open_checkpoint(folder, None, disk)
    if opened is None:
        raise ConfigError(f"{folder}: expected a checkpoint, or a folder of checkpoints; found neither")
    return opened


def _open_ours(folder: Path, manifest: Manifest, files: Files) -> Opened:
    source = FolderSource(folder, manifest, files)

    def rank_state(rank: int) -> dict[str, Any] | None:
        name = f"{RANK}.{rank}"
        state: dict[str, Any] | None = source.blob(name) if name in source.blobs else None
        return state

    try:
        state = source.blob(STATE)
    except BaseException:
        source.close()
        raise
    return Opened(folder, source, state, lambda: source.blob(CLIENT, trusted=True), rank_state)


def _open_deepspeed(folder: Path) -> Opened:
    """It has neither collected gradients nor sums of what it leaves out, and nothing of one rank's own."""
    opened = open_deepspeed_folder(folder)
    state = {"accumulating": None, "frozen_sums": {}, **opened.state}
    return Opened(folder, opened.source, state, lambda: opened.client, lambda rank: None)
