"""One save of one engine: every rank writes its part, and the first rank makes a complete checkpoint of the parts.

[Note: order of a save] The first rank makes a hidden folder. Each rank writes its data file into it, syncs it, and
writes a list of the file's content. Then the first rank writes the metadata and the manifest, and gives the folder its
name. A failure on one rank fails the save on all ranks, and older checkpoints are as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.archives import bytes_tensor
from offload.errors import StateError, StorageError, ZeroInfinityError
from offload.files.durable import Files
from offload.kernels import kernels
from zero.assembly.engine_parts import EngineParts
from zero.checkpoint.dcp_format import (
    METADATA_FILE,
    MODEL,
    DataFile,
    FileEntry,
    Manifest,
    make_metadata,
    write_manifest,
)
from zero.checkpoint.folder import CheckpointFolder, PartialCheckpoint
from zero.checkpoint.frozen import SharedFrozenWeights
from zero.checkpoint.rank_data_file import (
    Extents,
    RankDataFile,
    data_file_name,
    failure_file_name,
    list_file_name,
    read_list,
)
from zero.exchange.all_ranks import AllRanks

logger = logging.getLogger("zero")


class SaveJob:
    """One save of one engine, on one rank.

    `save_dir`: the folder of all checkpoints; `tag`: checked, the same on all ranks.
    """

    def __init__(self, parts: EngineParts, save_dir: Path, tag: str, files: Files) -> None:
        everyone = parts.collectives.world
        self._parts = parts
        self.placement = everyone.placement
        self.tag = tag
        self.keep_last: int | None = None  # The number of checkpoints to keep; None: all.
        self.tools: Mapping[str, str] = {}  # Name -> text of scripts to write into the folder that has `latest`.
        self._files = files
        self._together = AllRanks(everyone)
        self._collectives = everyone
        self._folders = CheckpointFolder(save_dir, files)
        self._aliases: dict[str, str] = {}
        self.shared_files: Mapping[str, DataFile] = {}  # Files in other folders that are also part of this checkpoint.
        self._partial: PartialCheckpoint | None = None
        self._global_steps = 0
        self._rank_data_file: RankDataFile | None = None

    def begin(self, extents: Extents, state: Mapping[str, Any]) -> RankDataFile:
        """Make the folder and this rank's file in it, with all its room reserved.

        Raises StorageError: there is no room; StateError: it failed on another rank.

        `extents`: the extents that this rank writes, after `Extents.finish`. `state`: the common state of all ranks.
        """
        self._global_steps = state["global_steps"]
        self._aliases = {MODEL + alias: MODEL + name for alias, name in state.get("aliases", {}).items()}
        folder = self._folders.partial_folder(self.tag)

        # Results are stored in `self` at once: if another rank fails, `close` can still free them.
        def make_folder() -> None:
            self._partial = self._folders.create_partial(self.tag)

        def create_file() -> None:
            self._rank_data_file = RankDataFile(self._parts, extents, folder, self.placement.rank, self._files)

        self._together.run_on_first("making the folder of a checkpoint", make_folder)
        self._together.run_on_all("reserving the room of a checkpoint", create_file)
        return self.rank_data_file

    def write(self) -> None:
        """Write this rank's part and sync it. Raises the same errors as `begin`."""
        self._together.run_on_all("writing a checkpoint", self.rank_data_file.write)

    def commit(self, *, save_latest: bool) -> None:
        """Complete the checkpoint. Raises the same errors as `begin`."""
        self._together.run_on_first("ending a checkpoint", lambda: self.assemble(save_latest=save_latest))

    @property
    def rank_data_file(self) -> RankDataFile:
        if self._rank_data_file is None:
            raise StateError("checkpoint: no save is in progress; call begin() first")
        return self._rank_data_file

    def report_failure(self, error: BaseException) -> None:
        with suppress(StorageError):
            path = self._folders.partial_folder(self.tag) / failure_file_name(self.placement.rank)
            self._files.write_bytes(path, f"{type(error).__name__}: {error}")

    def missing_parts(self) -> dict[int, object]:
        """On the first rank: each rank that has not written its part yet, with what changes while it writes.

        Raises StateError: a rank's part has failed.
        """
        folder, names = self._folders.partial_folder(self.tag), self._list_files()
        ranks = [rank for rank in range(self.placement.world_size) if list_file_name(rank) not in names]
        return {rank: self._files.stamp(folder / data_file_name(rank)) for rank in ranks}

    def is_completed(self) -> bool:
        """On another rank, whose part is written: has the first rank completed the checkpoint?

        Then this file is in the folder of that name. Raises StateError: the first rank, or another's part, has failed.
        """
        if self._list_files():
            return False
        path = self._folders.save_dir / self.tag / data_file_name(self.placement.rank)
        if self._files.file_bytes(path) is None or self._files.stamp(path) != self.rank_data_file.stamp:
            raise self._given_up_error()
        return True

    def raise_if_removed(self) -> None:
        """On another rank, whose part has failed: raise StateError if that is because the first rank has given up."""
        if self.placement.rank and not self._files.exists(self._folders.partial_folder(self.tag)):
            raise self._given_up_error()

    def _given_up_error(self) -> StateError:
        reasons = [f"rank {rank} {why}" for rank, why in self.ended_ranks(range(self.placement.world_size)).items()]
        return StateError(
            f"saving a checkpoint: the first rank could not complete {self.tag}: "
            f"{'; '.join(reasons) or 'its own error says why'}; older checkpoints are as they were"
        )

    def ended_ranks(self, ranks: Collection[int]) -> dict[int, str]:
        """Those of these ranks that have ended, and why, as far as it is known. Blocks."""
        return self._collectives.ended_ranks([rank for rank in ranks if rank != self.placement.rank])

    def _list_files(self) -> set[str]:
        """Names of the files in the folder so far; none once it has been renamed or removed.

        Raises StateError: a rank's part has failed.
        """
        folder = self._folders.partial_folder(self.tag)
        names = set(self._files.listing(folder))
        for rank in range(self.placement.world_size):
            if failure_file_name(rank) in names:
                why = ""
                with suppress(StorageError):  # the first rank may be removing the folder
                    why = self._files.read_bytes(folder / failure_file_name(rank)).decode()
                raise StateError(f"saving a checkpoint: it failed on rank {rank}: {why}")
        return names

    def assemble(self, *, save_latest: bool) -> None:
        """On the first rank, once all parts are written: complete the checkpoint. Raises StorageError, ConfigError."""
        partial, files = self._partial, self._files
        if partial is None:
            raise StateError("checkpoint: no save is in progress; call begin() first")
        data_files = dict(self.shared_files)
        for rank in range(self.placement.world_size):
            data_files[data_file_name(rank)] = read_list(files, partial.folder / list_file_name(rank))
        entries = {name: entry for name, (entry, _) in data_files.items()}
        metadata = make_metadata({name: boxes for name, (_, boxes) in data_files.items()}, self._aliases)
        files.write_bytes(partial.folder / METADATA_FILE, metadata)
        checksum = kernels.crc32c(bytes_tensor(metadata))
        entries[METADATA_FILE] = FileEntry(bytes=len(metadata), boxes=((0, len(metadata), checksum),))
        for rank in range(self.placement.world_size):
            files.remove(partial.folder / list_file_name(rank))
        manifest = Manifest(
            tag=self.tag,
            global_steps=self._global_steps,
            time=partial.time,
            world_size=self.placement.world_size,
            files=entries,
        )
        write_manifest(files, partial.folder, manifest)
        self._folders.commit(partial, save_latest)
        self._partial = None
        try:
            self._remove_old()
        except ZeroInfinityError as error:
            logger.warning("checkpoint %s is saved, but older ones could not be removed: %s", self.tag, error)
        try:
            self._add_tools()
        except ZeroInfinityError as error:
            logger.warning(
                "checkpoint %s is saved, but the scripts next to it could not be written: %s", self.tag, error
            )

    def _add_tools(self) -> None:
        present = set(self._files.listing(self._folders.save_dir)) if self.tools else set()
        for name in self.tools.keys() - present:
            self._files.write_bytes(self._folders.save_dir / name, self.tools[name], 0o755)

    def _remove_old(self) -> None:
        if self.keep_last is not None and self._folders.keep_last(self.keep_last):
            remaining = [self._folders.save_dir / tag for tag in self._folders.tags()]
            SharedFrozenWeights(self._folders.save_dir, self._files).remove_unused(remaining)

    def close(self) -> None:
        """Close the file and free the memory; an incomplete checkpoint is removed."""
        data_file, self._rank_data_file = self._rank_data_file, None
        if data_file is not None:
            data_file.close()
        self.abandon()

    def abandon(self) -> None:
        """Remove an incomplete checkpoint; does nothing after `assemble`."""
        partial, self._partial = self._partial, None
        if partial is not None:
            self._folders.abandon(partial)
