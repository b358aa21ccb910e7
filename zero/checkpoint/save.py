"""`engine.save_checkpoint`: state is captured between two steps, and written at once or while training continues.

[Note: order of a save] The first rank makes a hidden folder. Each rank writes its data file into it, syncs it, and
writes a list of the file's content. Then the first rank writes the metadata and the manifest, and gives the folder its
name. A failure on one rank fails the save on all ranks, and older checkpoints are as they were.

[Note: copy on write] A save in the background writes the state as of the last step. Sub-groups are written one after
the other; a pending update of a sub-group is done first. Before a later step updates a sub-group that has not been read
yet, its old values are read into blocks of memory, from which they are written to the file. The room in the file was
reserved before. So nothing is written twice, and an update waits at most for memory that is being written.

[Note: several ranks] Collectives run only when a save begins, and when the next one begins. In between each rank makes
a file when its part is written, or has failed, and the first rank polls for these files. The other ranks poll until the
folder has its name. A rank that waits also checks on the board whether the ranks that it waits for still live.

[Note: pipelines] Each stage has a part of the names, a checkpoint has all of them. So it can be loaded with another
number of stages, or without a pipeline if the model has the same names.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, StateError, StorageError, ZeroInfinityError, explain_file_limit
from offload.files.archives import bytes_tensor, make_archive, read_archive, unpack_any
from offload.files.durable import Files
from offload.io.io_loop import IoFuture
from offload.kernels import kernels
from offload.sizes import format_bytes
from offload.system.garbage import pause_gc
from offload.system.worker import Worker
from zero.assembly.engine_parts import EngineParts
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.model_changes import ModelChanges
from zero.assembly.run import Run
from zero.assembly.run_state import client_objects, common_state, rank_state
from zero.checkpoint.accumulated_gradients import add_accumulated, ranks_shape
from zero.checkpoint.dcp_format import (
    METADATA_FILE,
    MODEL,
    DataFile,
    FileEntry,
    Manifest,
    make_metadata,
    write_manifest,
)
from zero.checkpoint.folder import CheckpointFolder, PartialCheckpoint, check_folder_argument, check_tag
from zero.checkpoint.frozen import (
    FrozenPart,
    SharedFrozenWeights,
    Stamp,
    Sums,
    digest_of,
    frozen_extents,
    frozen_sums,
)
from zero.checkpoint.rank_data_file import (
    Extent,
    Extents,
    RankDataFile,
    data_file_name,
    failure_file_name,
    list_file_name,
    plan_extents,
    read_list,
)
from zero.checkpoint.source import CLIENT, RANK, STATE
from zero.optim.sub_group_pipeline import StepArguments
from zero.params.buffers import pack_extra_states
from zero.params.layout import SubGroup
from zero.store.all_ranks import AllRanks
from zero.store.collectives import Collectives

logger = logging.getLogger("zero")

BACKGROUND_EXTENTS = 2  # Extents in flight: while one is written the next is read.
POLL_SECONDS = 0.05
LIVENESS_SECONDS = 1.0  # Between two checks whether the ranks that this one waits for still live.
PEER_TIMEOUT_SECONDS = 600.0  # Once its own part is written the first rank waits so long for progress of the others.
LISTS, TABLES = ("parameters", "frozen", "buffers"), ("aliases", "dtypes")


class SaveJob:
    """One save of one engine, on one rank.

    Args:
        save_dir: the folder of all checkpoints.
        tag: checked, the same on all ranks.
        shared_files: files in other folders that are also part of this checkpoint.
        keep_last: the number of checkpoints to keep; None: all.
        tools: name -> text of scripts to write into the folder that has `latest`.
    """

    def __init__(
        self,
        parts: EngineParts,
        save_dir: Path,
        tag: str,
        files: Files,
        *,
        shared_files: Mapping[str, DataFile] = MappingProxyType({}),
        keep_last: int | None = None,
        tools: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._parts = parts
        self.tag = tag
        self._files = files
        self._shared_files = shared_files
        self._keep_last = keep_last
        self._tools = tools
        self._collectives = parts.collectives.world
        self.placement = self._collectives.placement
        self._together = AllRanks(self._collectives)
        self._folders = CheckpointFolder(save_dir, files)
        self._aliases: dict[str, str] = {}
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
        self._together.run_on_all("writing a checkpoint", self.rank_data_file.write_everything)

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
        """Each rank that has not written its part yet, with what changes while it writes.

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
        data_files = dict(self._shared_files)
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
        present = set(self._files.listing(self._folders.save_dir)) if self._tools else set()
        for name in self._tools.keys() - present:
            self._files.write_bytes(self._folders.save_dir / name, self._tools[name], 0o755)

    def _remove_old(self) -> None:
        if self._keep_last is not None and self._folders.keep_last(self._keep_last):
            remaining = [self._folders.save_dir / tag for tag in self._folders.tags()]
            SharedFrozenWeights(self._folders.save_dir, self._files).remove_unused(remaining)

    def close(self) -> None:
        """Close the file and free the memory; an incomplete checkpoint is removed."""
        data_file, self._rank_data_file = self._rank_data_file, None
        if data_file is not None:
            data_file.wait_and_close()
        self.abandon()

    def abandon(self) -> None:
        """Remove an incomplete checkpoint; does nothing after `assemble`."""
        partial, self._partial = self._partial, None
        if partial is not None:
            self._folders.abandon(partial)


class BackgroundSave:
    """One save in progress; its room on the disk is reserved. `describe`: the text that is logged at the end."""

    _last_liveness_check = 0.0  # Time of the last check of the ranks that this one waits for.

    def __init__(self, save: SaveJob, parts: EngineParts, *, save_latest: bool, describe: str) -> None:
        self._save = save
        self._rank_data_file = save.rank_data_file
        self._updates = parts.stepper.updates
        self._pipeline = parts.stepper.pipeline
        self._describe = describe
        self._save_latest = save_latest
        self._extent_of = {extent.group: extent for extent in self._rank_data_file.extents if extent.group is not None}
        self._encode_tasks: dict[int, asyncio.Task[None]] = {}  # id(extent) -> the task that reads it into memory.
        self._store_tasks: list[asyncio.Task[None]] = []
        self._step_arguments = self._updates.arguments  # Arguments of the last step; the save contains its updates.
        self._pipeline.old_values_reader = self
        self._begin_seconds = time.perf_counter()
        self._worker = Worker("zero-checkpoint")  # from here on Python does not exit before the save has ended
        self._future: IoFuture[None] = parts.storage.io_loop.submit(
            "saving a checkpoint", self._run(), self._rank_data_file.in_flight
        )

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def join(self) -> BaseException | None:
        """Block until the checkpoint is complete. Returns the error if the save has failed."""
        return self._future.wait()

    # ---- on the I/O loop ----------------------------------------------------------------------

    async def _run(self) -> None:
        worker = self._worker
        try:
            try:
                await self._write_all()
                await worker.run(self._rank_data_file.finish)
            except BaseException as error:
                self._rank_data_file.is_stopped, why = True, error
                await worker.run(lambda: self._save.report_failure(why))
                await worker.run(self._save.raise_if_removed)
                raise
            finally:
                self._pipeline.old_values_reader = None
            await (self._assemble() if self._save.placement.rank == 0 else self._await_first())
            logger.info("%s in %.1f s, in the background", self._describe, time.perf_counter() - self._begin_seconds)
        except BaseException as error:
            why = error
            if self._save.placement.rank == 0:  # the others wait for it, and the folder may outlast this
                await worker.run(lambda: self._save.report_failure(why))
            # Logged as well, since the error is only raised by the next call of the engine, which may never happen.
            logger.warning("checkpoint %s could not be saved: %s", self._save.tag, error)
            raise
        finally:
            try:
                await worker.run(self._save.abandon)
            finally:
                self._rank_data_file.close()
                worker.close()

    async def _write_all(self) -> None:
        part = self._rank_data_file
        try:
            await part.write_all(
                part.extents, lambda extent: asyncio.shield(self._encode_once(extent)), BACKGROUND_EXTENTS
            )
        finally:
            # When one extent has failed others are still in flight: they need the memory and the file until they end.
            await asyncio.gather(*self._encode_tasks.values(), return_exceptions=True)
            results = await asyncio.gather(*self._store_tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _encode_once(self, extent: Extent) -> asyncio.Task[None]:
        if id(extent) not in self._encode_tasks:
            self._encode_tasks[id(extent)] = asyncio.create_task(self._encode(extent))
        return self._encode_tasks[id(extent)]

    async def _encode(self, extent: Extent) -> None:
        group = extent.group
        # Only updates of the last step (`_step_arguments`) or older belong to the save. A later step begins when no
        # update is pending, so updates that are pending after that do not belong to it. The step may begin right now on
        # another thread, which sets `arguments` first. So `is_busy` is read before `arguments` is compared: if they are
        # still those of the last step, the group was busy with an update of that step, or an older one.
        if group is not None and self._updates.is_busy(group) and self._updates.arguments is self._step_arguments:
            await self._updates.finish_groups([group])
        self._store_tasks += await self._rank_data_file.encode(extent)

    async def before_update(self, group: SubGroup, arguments: StepArguments) -> None:
        extent = self._extent_of.get(group)
        if extent is None or arguments is self._step_arguments or self._rank_data_file.is_stopped:
            return
        await asyncio.wait([self._encode_once(extent)])  # if it fails, the save fails, and not the step

    async def _assemble(self) -> None:
        deadline, last_missing, ended = 0.0, None, dict[int, str]()
        while missing := await self._worker.run(self._save.missing_parts):
            self._raise_if_ended({rank: why for rank, why in ended.items() if rank in missing})
            if missing != last_missing:
                deadline, last_missing = time.monotonic() + PEER_TIMEOUT_SECONDS, missing
            if time.monotonic() > deadline:
                raise StateError(
                    f"saving a checkpoint: ranks {list(missing)} have written nothing for "
                    f"{PEER_TIMEOUT_SECONDS:.0f} s, and their parts of {self._save.tag} are not complete"
                )
            ended = await self._ended_ranks(missing)
            await asyncio.sleep(POLL_SECONDS)
        await self._worker.run(lambda: self._save.assemble(save_latest=self._save_latest))

    async def _await_first(self) -> None:
        # The first rank gives up after PEER_TIMEOUT_SECONDS without progress, and removes the folder. If it has ended
        # on another machine, it removes nothing, and perhaps nobody can tell.
        missing, last_missing, ended = dict[int, object](), None, dict[int, str]()
        deadline = 0.0
        while not await self._worker.run(self._save.is_completed):
            self._raise_if_ended(ended)
            with suppress(StorageError):  # the first rank renames or removes the folder: `is_completed` says so
                missing = await self._worker.run(self._save.missing_parts)
            if missing != last_missing:
                deadline, last_missing = time.monotonic() + 2 * PEER_TIMEOUT_SECONDS, missing
            if time.monotonic() > deadline:
                raise StateError(
                    f"saving a checkpoint: nothing was written for {2 * PEER_TIMEOUT_SECONDS:.0f} s, and rank 0 has "
                    f"not completed {self._save.tag}; it has perhaps ended"
                )
            ended = await self._ended_ranks([0])
            await asyncio.sleep(POLL_SECONDS)

    async def _ended_ranks(self, ranks: Collection[int]) -> dict[int, str]:
        if time.monotonic() < self._last_liveness_check + LIVENESS_SECONDS:
            return {}
        self._last_liveness_check = time.monotonic()
        return await self._worker.run(lambda: self._save.ended_ranks(ranks))

    def _raise_if_ended(self, ended: Mapping[int, str]) -> None:
        # It was known before the last poll, which has found all that the rank wrote before its end.
        for rank, why in ended.items():
            raise StateError(f"saving a checkpoint: rank {rank} {why}, and {self._save.tag} is not complete")


class CheckpointState:
    """An engine's knowledge of its checkpoints between calls: the save in progress, and changes of values meanwhile.

    Attributes:
        partially_loaded_folder: the checkpoint of which only a part of the values has been loaded; "" for none.
        partially_loaded_names: names of those values.
        frozen_sums: checksums of the weights that are not trained; None once these may have changed on this rank.
        modified_units: units that a forward has changed in place so far, in memory that a save reads.
        edited_units: persistent units that were changed in place: between the last two steps, and since.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._background_save: BackgroundSave | None = None
        self.partially_loaded_folder = ""
        self.partially_loaded_names = frozenset[str]()
        self.frozen_sums: Sums | None = None
        self.modified_units: set[str] = set()
        self.edited_units: tuple[frozenset[str], frozenset[str]] = frozenset(), frozenset()

    @contextmanager
    def allow_loading(self) -> Iterator[None]:
        """Inside, a load that has failed half way forbids nothing: the engine is made ready for another one."""
        failed, self.partially_loaded_folder = self.partially_loaded_folder, ""
        try:
            yield
        finally:
            self.partially_loaded_folder = failed

    @contextmanager
    def loading(self, folder: str, values: frozenset[str], *, everything: bool = False) -> Iterator[None]:
        """Inside, values of these names are replaced. If that fails, they are mixed until others are loaded."""
        before, mixed, snapshots = self.partially_loaded_folder, self.partially_loaded_names, self._run.parts.snapshots
        self.partially_loaded_folder, self.partially_loaded_names = folder, mixed | values
        yield
        self.partially_loaded_names = frozenset() if everything else mixed - values
        self.partially_loaded_folder = before if self.partially_loaded_names else ""
        if everything and snapshots is not None:
            snapshots.on_checkpoint_load()

    def set_background_save(self, background_save: BackgroundSave) -> None:
        self._background_save = background_save

    def checkpoint_pending(self) -> bool:
        return self._background_save is not None and not self._background_save.is_done

    def wait_for_checkpoint(self) -> None:
        """See `ZeroEngine.wait_for_checkpoint`."""
        error = self.join()
        if error is not None:
            raise error

    def join(self) -> BaseException | None:
        """Like `wait_for_checkpoint`, but returns the error."""
        save = self._background_save
        error = None if save is None else save.join()
        self._background_save = None  # an interrupt that ends the wait does not end the save
        return error

    def check_call(self, what: str) -> None:
        if self.partially_loaded_folder:
            raise StateError(
                f"{what}: loading {self.partially_loaded_folder} failed half way, so some values are from there and "
                "others are not; load it again or a checkpoint, or close the engine"
            )

    def on_engine_call(self) -> None:
        if self._background_save is not None and self._background_save.is_done:
            self.wait_for_checkpoint()

    def on_persistent_unbind(self) -> None:
        bound = (binding for binding in self._run.parts.bindings if binding.unit.persistent and binding.is_bound)
        edited = {binding.unit.name for binding in bound if binding.has_changes}
        self.edited_units = self.edited_units[0], self.edited_units[1] | edited

    def on_step_begin(self) -> None:
        self.on_persistent_unbind()
        self.edited_units = self.edited_units[1], frozenset()

    def on_weights_change(self, index: int) -> None:
        # The save has to read the old weights first. The next call raises an error of the save: raised here it would
        # prevent the change.
        if self._background_save is not None:
            self._background_save.join()
        if not self._run.parts.layout.units[index].trainable:
            self.frozen_sums = None

    def on_forward_modify(self, index: int) -> None:
        unit = self._run.parts.layout.units[index]
        if self._run.parts.storage.flat_buffer(unit) is not None:
            self.modified_units.add(unit.name)

    def on_edit_begin(self) -> None:
        self.wait_for_checkpoint()

    def on_rewrite_begin(self) -> None:
        self.wait_for_checkpoint()
        self.frozen_sums = None


class SaveCheckpoints:
    """Saves checkpoints of one engine.

    Args:
        state: knowledge of checkpoints between calls.

    Attributes:
        files: operations on the disk with the checkpoints.
        checkpoint_tools: name -> text of scripts that are written into the folder of checkpoints, for clients that look
            for them.
    """

    def __init__(self, run: Run, steps: EngineSteps, changes: ModelChanges, state: CheckpointState) -> None:
        self._run = run
        self._steps = steps
        self._changes = changes
        self._state = state
        self.files = Files()
        self.checkpoint_tools: Mapping[str, str] = MappingProxyType({})
        self._shared_stamp: Stamp = ()  # Of the files with frozen weights that were last verified or written.

    @explain_file_limit("save_checkpoint")
    @pause_gc()
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """See `ZeroEngine.save_checkpoint`."""
        # Absolute, because the program may change its folder while a save continues beside training.
        folder = check_folder_argument(save_dir, "save_checkpoint: save_dir").absolute()
        self.ensure_between_steps("save_checkpoint")
        name = self._agree_on_tag(f"global_step{self._run.global_steps}" if tag is None else tag)
        frozen = self._save_frozen(folder, left_out=exclude_frozen_parameters)
        parts = self._run.parts
        if self._run.updater is not None and self._run.updater.has_small_states:
            self._steps.synchronize()  # small states are captured now, so the updates that change them must be done
        state, extents = self._capture(client_state or {}, frozen)
        is_async = self._may_save_async(state)
        if not is_async:
            self._steps.synchronize()
        save = SaveJob(
            parts,
            folder,
            name,
            self.files,
            shared_files=frozen.shared_files,
            keep_last=self._run.config.checkpoint.keep_last,
            tools=self.checkpoint_tools,
        )
        description = f"checkpoint {folder / name}: {format_bytes(extents.nbytes)} of this rank saved"
        try:
            save.begin(extents, state)
            if is_async:
                self._state.set_background_save(
                    BackgroundSave(save, parts, save_latest=save_latest, describe=description)
                )
                return True
            save.write()
            save.commit(save_latest=save_latest)
        except BaseException:
            save.close()
            raise
        save.close()
        logger.info("%s", description)
        return True

    def _may_save_async(self, state: Mapping[str, Any]) -> bool:
        """True when training may continue while this is written; else the reason is logged."""
        if not self._run.config.checkpoint.async_save:
            return False
        why, modified = "", sorted(self._state.modified_units.union(*self._state.edited_units))
        if self._run.collectives.is_pipeline_stage:
            why = "the stages of a pipeline save at the same time"
        elif state["accumulating"] is not None:
            why = "gradients have been accumulated since the last step, and the next backward would change them"
        elif modified:
            # A forward may modify them again, and the save could not notice it in time to read the old values.
            why = f"weights have been modified in place ({modified[0]})"
        reasons = [
            answer.decode() for answer in self._run.collectives.all_gather_bytes("saving beside training", why.encode())
        ]
        why = next(filter(None, reasons), "")
        if why:
            logger.warning(
                "save_checkpoint: this checkpoint is written before the call returns, not in the background: %s", why
            )
        return not why

    def ensure_between_steps(self, what: str) -> None:
        """Make sure that no part of the model is in use, and that no other checkpoint is being written."""
        self._steps.check_open(what)
        self._run.parts.check_outside_calls(what)
        self._state.wait_for_checkpoint()
        self._changes.replan()
        modified = any(binding.is_bound and binding.has_changes for binding in self._run.parts.bindings)
        answers = self._run.collectives.all_gather_bytes(
            f"{what}: weights modified in place", b"yes" if modified else b"no"
        )
        if b"yes" in answers:  # one rank's edit in `GatheredParameters` is made in place on that rank only
            # Weights modified in place are stored when their unit is evicted; all ranks gather it again together.
            self._steps.evict_all()
            self._steps.make_ready(what)
        self._steps.take_user_gradients()
        self._run.parts.gradients.wait_until_stored()

    def _save_frozen(self, save_dir: Path, *, left_out: bool) -> FrozenPart:
        """Decide how the weights that are not trained are saved; writes the shared ones. All ranks call this."""
        mode, parts = self._run.config.checkpoint.frozen, self._run.parts
        if (
            left_out
            or mode == "always"
            or parts.collectives.is_pipeline_stage
            or len(parts.trained_indices) == len(parts.leaves)
        ):
            return FrozenPart(is_inside=not left_out)
        self._state.frozen_sums = frozen_sums(parts, self._state.frozen_sums)
        if mode == "reference":
            return FrozenPart(is_inside=False, sums=self._state.frozen_sums)
        digest, shared = digest_of(self._state.frozen_sums), SharedFrozenWeights(save_dir, self.files)
        if not self._may_share(shared, digest):
            save = SaveJob(parts, shared.folders.save_dir, digest, self.files)
            try:
                save.begin(frozen_extents(parts), {"global_steps": self._run.global_steps})
                save.write()
                save.commit(save_latest=False)
            finally:
                save.close()
        self._shared_stamp = shared.stamp(digest)
        return FrozenPart(is_inside=False, shared_files=shared.entries(digest))

    def _may_share(self, shared: SharedFrozenWeights, digest: str) -> bool:
        """True if the files exist, undamaged. Files verified before are not read again. All ranks call this."""
        stamp, placement = shared.stamp(digest), self._run.collectives.placement
        status = "known" if stamp and stamp == self._shared_stamp else "there" if stamp else "missing"
        answers = self._run.collectives.all_gather_bytes("shared weights", status.encode())
        if b"missing" in answers:
            return False
        if b"there" not in answers:
            return True
        damage = b""
        try:
            shared.verify(digest, placement.rank, placement.world_size)
        except (ConfigError, StorageError) as error:
            damage = str(error).encode()
        damages = [
            answer.decode()
            for answer in self._run.collectives.all_gather_bytes("shared weights read", damage)
            if answer
        ]
        if damages and placement.rank == 0:
            logger.warning(
                'save_checkpoint: the file of frozen weights that checkpoints share (checkpoint.frozen is "once") '
                "is damaged and is written again: %s",
                "; ".join(damages),
            )
        return not damages

    def _capture(self, client_state: Mapping[str, Any], frozen: FrozenPart) -> tuple[dict[str, Any], Extents]:
        """The common state of all ranks, and everything that this rank writes."""
        parts, trained = self._run.parts, self._run.parts.trained_indices
        is_saved_here = parts.collectives.world.is_saved_here
        here = frozenset(leaf.index for leaf in parts.leaves if is_saved_here(leaf.names[0]))
        extents = plan_extents(parts, here if frozen.is_inside else here & trained, self._run.updater)
        state = common_state(self._run)
        state["has_frozen"], state["frozen_sums"] = frozen.is_inside or bool(frozen.shared_files), dict(frozen.sums)
        if not state["has_frozen"]:
            left_out = set(state["frozen"])
            state["aliases"] = {alias: name for alias, name in state["aliases"].items() if name not in left_out}
        extra = None
        if parts.collectives.is_pipeline_stage:
            state = _gather_stage_states(parts.collectives.world, state)
            extra = _gather_extra_states(parts.collectives.world, parts.model)
        together = AllRanks(parts.collectives.world)
        accumulated = None
        if self._is_backward_torn():
            state["step_began"] = state["micro_steps"]
        else:
            accumulated = together.run_on_all("saving collected gradients", lambda: add_accumulated(extents, parts))
        answers = self._run.collectives.all_gather_bytes("collected gradients", b"" if accumulated is None else b"some")
        state["accumulating"] = ranks_shape(parts.collectives.placement) if any(answers) else None
        blobs = together.run_on_all(
            "capturing what is saved", lambda: self._make_blobs(state, client_state, extra, accumulated)
        )
        for name, archive in blobs.items():
            extents.add_blob(name, archive)
        extents.finish()
        return state, extents

    def _is_backward_torn(self) -> bool:
        """True, with a warning, if gradients are missing: they are not saved, so that no later step can use them."""
        watch, everyone = self._run.parts.backward_watch, self._run.collectives.world
        watch.end_failed_backward()
        is_torn = watch.is_torn or self._run.parts.gradients.has_lost
        is_any_torn = any(everyone.all_gather_bytes("a backward that was broken off", b"torn" if is_torn else b""))
        if is_any_torn:
            logger.warning(
                "save_checkpoint: the last backward was broken off, so the gradients since the last step are not "
                "saved; a run that is continued from this checkpoint begins that step again"
            )
        return is_any_torn

    def _make_blobs(
        self,
        state: dict[str, Any],
        client_state: Mapping[str, Any],
        extra: dict[str, Any] | None,
        accumulated: dict[str, Any] | None,
    ) -> dict[str, torch.Tensor]:
        """Objects that this rank saves besides tensors, as archives. Raises ConfigError: a user's cannot be saved."""
        rank = self._run.collectives.world.placement.rank
        values: dict[str, Callable[[], Any]] = {f"{RANK}.{rank}": lambda: rank_state(self._run, accumulated)}
        if rank == 0:
            values = {STATE: lambda: state, CLIENT: lambda: client_objects(self._run, client_state, extra), **values}
        blobs = {}
        for name, value in values.items():
            try:
                blobs[name] = bytes_tensor(make_archive(value()))
            except Exception as error:
                whose = {STATE: "the configuration", CLIENT: "client_state, or a scheduler's or module's state"}
                raise ConfigError(
                    f"save_checkpoint: {whose.get(name, 'the position in the data')} cannot be pickled: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return blobs

    def _agree_on_tag(self, tag: Any) -> str:
        name = check_tag(tag)
        names = [
            answer.decode() for answer in self._run.collectives.world.all_gather_bytes("checkpoint tag", name.encode())
        ]
        if len(set(names)) > 1:
            tags = ", ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(names))
            message = f"save_checkpoint: ranks have different tags ({tags})"
            if self._run.config.checkpoint.tag_validation == "fail":
                raise ConfigError(f"{message}; pass the same tag on all ranks")
            if self._run.config.checkpoint.tag_validation == "warn":
                logger.warning("%s; the tag of the first rank is used", message)
        return names[0]


def _gather_stage_states(everyone: Collectives, state: Mapping[str, Any]) -> dict[str, Any]:
    """The common state of all stages, with the names of all of them. All ranks call this."""
    payload = json.dumps([{key: state[key] for key in (*LISTS, *TABLES)}, state["has_frozen"]]).encode()
    answers = everyone.all_gather_bytes("names of all stages", payload)
    names_of_stages, frozen = zip(*(json.loads(answer) for answer in answers), strict=True)
    packed = dict.fromkeys(everyone.all_gather_bytes("groups of all stages", make_archive(state["groups"])))
    groups: list[list[dict[str, Any]]] = [read_archive(archive, "groups of a stage") for archive in packed]
    common = dict(state)
    for key in LISTS:
        common[key] = list(dict.fromkeys(name for part in names_of_stages for name in part[key]))
    for key in TABLES:
        common[key] = {name: value for part in names_of_stages for name, value in part[key].items()}
    common["groups"], common["stage_groups"] = [], groups
    for number in range(max(map(len, groups))):
        alike = [part[number] for part in groups if number < len(part)]
        names = list(dict.fromkeys(name for group in alike for name in group["params"]))
        common["groups"].append({**alike[0], "params": names})
    common["has_frozen"] = any(frozen)
    return common


def _gather_extra_states(everyone: Collectives, model: nn.Module) -> dict[str, Any]:
    """The extra states of the modules of all stages; of a tied module the first stage's count. All ranks call this."""
    own = AllRanks(everyone).run_on_all("extra states", lambda: pack_extra_states(model, "save_checkpoint"))
    payload = b"" if own is None else make_archive(own)
    common: dict[str, Any] = {}
    for answer in filter(None, everyone.all_gather_bytes("extra states of all stages", payload)):
        stage_states = unpack_any(
            read_archive(answer, "extra states of a stage"), "extra states of a stage", trusted=True
        )
        common = {**stage_states, **common}
    return common
