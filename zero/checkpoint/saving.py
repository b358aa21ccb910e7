"""`engine.save_checkpoint`: every rank writes its part, the first one makes a whole of them.

[Note: order of a save] All ranks agree on the tag and on what is saved; the first makes a hidden folder; each writes
its data file into it, syncs it, and says what is in it; the first writes the metadata and the manifest, and gives the
folder its name. Whatever fails on one rank fails on all, and what was there before is as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from offload import kernels
from offload.archives import bytes_tensor, make_archive
from offload.durable import Files
from offload.errors import ConfigError, StateError, ZeroInfinityError
from offload.sizes import format_bytes
from zero.assembly import Assembly
from zero.checkpoint.extents import Extents
from zero.checkpoint.finding import check_tag
from zero.checkpoint.folders import Folders, Partial
from zero.checkpoint.manifest import FileEntry, Manifest, write_manifest
from zero.checkpoint.metadata import METADATA_FILE, make_metadata
from zero.checkpoint.rank_part import RankPart, data_file, list_file, persistent_buffers, plan_extents, read_list
from zero.checkpoint.reading import CLIENT, RANK, STATE
from zero.checkpoint.small_state import client_part, common_state, rank_state
from zero.checkpoint.source import MODEL
from zero.config import Config
from zero.exchange import Exchange
from zero.replanning import FollowsModel

logger = logging.getLogger("zero")

T = TypeVar("T")


class Together:
    """What all ranks do, so that what fails on one fails on all.

    Args:
        exchange: with the other ranks.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.is_first = exchange.placement.rank == 0

    def do(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on every rank; raise if it failed on any.

        Raises:
            StateError: it failed on another rank; says on which and why.
        """
        error: BaseException | None = None
        result: T | None = None
        try:
            result = action()
        except (ZeroInfinityError, OSError) as failed:
            error = failed
        answers = self._exchange.agree(what, b"" if error is None else f"{type(error).__name__}: {error}".encode())
        if error is not None:
            raise error
        wrong = [f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers) if answer]
        if wrong:
            raise StateError(f"{what} failed on another rank: {'; '.join(wrong)}")
        return result  # type: ignore[return-value]

    def first(self, what: str, action: Callable[[], T]) -> T | None:
        """As `do`, on the first rank alone; None on the others."""
        if self.is_first:
            return self.do(what, action)
        self.do(what, lambda: None)
        return None


class CheckpointSave:
    """One save of one engine, on one rank.

    Args:
        parts: of the engine, at rest.
        config: of the engine.
        exchange: with the other ranks.
        save_dir: the folder of all checkpoints.
        tag: checked, the same on all ranks.
        files: the disk.
    """

    def __init__(
        self, parts: Assembly, config: Config, exchange: Exchange, save_dir: Path, tag: str, files: Files
    ) -> None:
        self._parts, self._config, self.placement, self.tag = parts, config, exchange.placement, tag
        self._files, self._together = files, Together(exchange)
        self._folders = Folders(save_dir, files)
        self._aliases: dict[str, str] = {}
        self._partial: Partial | None = None
        self._global_steps = 0
        self._part: RankPart | None = None

    def begin(self, extents: Extents, state: Mapping[str, Any]) -> RankPart:
        """Make the folder and this rank's file in it, with room for all.

        Args:
            extents: what this rank writes; ended.
            state: what all ranks have in common.

        Raises:
            StorageError: there is no room.
            StateError: it failed on another rank.
        """
        self._global_steps = state["global_steps"]
        self._aliases = {MODEL + alias: MODEL + name for alias, name in state["aliases"].items()}
        self._partial = self._together.first("making the folder of a checkpoint", lambda: self._folders.begin(self.tag))
        folder = self._folders.partial_folder(self.tag)

        def create() -> RankPart:
            return RankPart(self._parts, extents, folder, self.placement.rank, self._files)

        self._part = self._together.do("reserving the room of a checkpoint", create)
        return self._part

    def write(self) -> None:
        """Write this rank's part, to last. Raises as `begin`."""
        part = self._part
        if part is None:
            raise StateError("checkpoint: nothing was begun")
        self._together.do("writing a checkpoint", part.write)

    def commit(self, *, save_latest: bool) -> None:
        """Make it whole. Raises as `begin`."""
        self._together.first("ending a checkpoint", lambda: self.assemble(save_latest=save_latest))

    def assemble(self, *, save_latest: bool) -> None:
        """The first rank's: all parts are written. Raises StorageError, ConfigError."""
        partial, files = self._partial, self._files
        if partial is None:
            raise StateError("checkpoint: nothing was begun")
        entries: dict[str, FileEntry] = {}
        boxes = {}
        for rank in range(self.placement.world_size):
            path = partial.folder / list_file(rank)
            entries[data_file(rank)], boxes[data_file(rank)] = read_list(files, path)
        metadata = make_metadata(boxes, self._aliases)
        files.write_bytes(partial.folder / METADATA_FILE, metadata)
        checksum = kernels.crc32c(bytes_tensor(metadata))
        entries[METADATA_FILE] = FileEntry(bytes=len(metadata), boxes=((0, len(metadata), checksum),))
        for rank in range(self.placement.world_size):
            files.remove(partial.folder / list_file(rank))
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
        if self._config.checkpoint.keep_last is not None:
            self._folders.keep_last(self._config.checkpoint.keep_last)

    def close(self) -> None:
        """Give everything back; what was not made whole is removed."""
        part, self._part = self._part, None
        if part is not None:
            part.close()
        partial, self._partial = self._partial, None
        if partial is not None:
            self._folders.abandon(partial)


class SavesCheckpoints(FollowsModel):
    """Mixed into the engine."""

    global_steps: int
    micro_steps: int
    device: torch.device
    lr_scheduler: Any
    training_dataloader: Any
    files = Files()
    """The disk that checkpoints lie on."""

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save all that training goes on from, in the form of torch.distributed.checkpoint. All ranks come here.

        It loads at every stage, on every tier, with any number of ranks, and with plain torch. It is there as a whole
        or not at all, whatever happens meanwhile.

        Args:
            save_dir: folder of checkpoints, which all nodes see; the checkpoint is `save_dir/tag`.
            tag: its name; None: "global_step" and the number of steps taken. One of that name is replaced.
            client_state: any picklable object under any name; `load_checkpoint` returns it. The first rank's counts.
            save_latest: the file `save_dir/latest` names it from now on.
            exclude_frozen_parameters: leave out what is not trained.

        Returns:
            True.

        Raises:
            ConfigError: a bad tag, or ranks have different ones and `checkpoint.tag_validation` is "fail".
            StorageError: not enough room, or the disk refused; what was there before is as it was.
            StateError: inside forward, backward or `GatheredParameters`; or it failed on another rank.
        """
        self._rest("save_checkpoint")
        name = self._agree_on_tag(f"global_step{self.global_steps}" if tag is None else tag)
        state, extents = self._capture(client_state or {}, exclude_frozen_parameters)
        save = CheckpointSave(self._parts, self._config, self.exchange, Path(save_dir), name, self.files)
        try:
            save.begin(extents, state)
            save.write()
            save.commit(save_latest=save_latest)
        finally:
            save.close()
        logger.info("checkpoint %s: %s of this rank saved", Path(save_dir) / name, format_bytes(extents.nbytes))
        return True

    def _rest(self, what: str) -> None:
        """Nothing is under way, and nothing waits to be written."""
        self.check_open(what)
        if self._parts.hooks.in_forward or self._parts.keeper.editing:
            raise StateError(f"{what}: inside forward or GatheredParameters; call it between them")
        self.replan()
        self.synchronize()

    def _capture(self, client_state: Mapping[str, Any], exclude_frozen: bool) -> tuple[dict[str, Any], Extents]:
        """What all ranks have in common, and all that this rank writes."""
        parts, placement = self._parts, self.exchange.placement
        frozen = {slot.index for unit in parts.layout.units if not unit.trainable for slot in unit.slots}
        counts = self.optimizer.step_counts if self.optimizer is not None else {}
        extents = plan_extents(parts, placement, lambda index: not (exclude_frozen and index in frozen), counts)
        dtypes = {
            parts.leaves[slot.index].names[0]: str(unit.dtype).removeprefix("torch.")
            for unit in parts.layout.units
            for slot in unit.slots
        }
        state = common_state(self, self._config, parts.leaves, dtypes)
        state["frozen"] = [leaf.names[0] for leaf in parts.leaves if leaf.index in frozen]
        state["buffers"] = list(persistent_buffers(parts.model))
        if exclude_frozen:
            left_out = set(state["frozen"])
            state["aliases"] = {alias: name for alias, name in state["aliases"].items() if name not in left_out}
        state["has_frozen"] = not exclude_frozen
        if placement.rank == 0:
            extents.add_blob(STATE, make_archive(state))
            extents.add_blob(CLIENT, make_archive(client_part(self, client_state)))
        extents.add_blob(f"{RANK}.{placement.rank}", make_archive(rank_state(self)))
        extents.end()
        return state, extents

    def _agree_on_tag(self, tag: Any) -> str:
        name = check_tag(tag)
        names = [answer.decode() for answer in self.exchange.agree("checkpoint tag", name.encode())]
        if len(set(names)) > 1:
            told = ", ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(names))
            message = f"save_checkpoint: ranks have different tags ({told})"
            if self._config.checkpoint.tag_validation == "fail":
                raise ConfigError(f"{message}; give all the same one")
            if self._config.checkpoint.tag_validation == "warn":
                logger.warning("%s; the first rank's is taken", message)
        return names[0]

    def check_open(self, what: str) -> None:
        """The engine's."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """The engine's."""
        raise NotImplementedError
