"""Asynchronous saves: training continues while state is written.

[Note: copy on write] A save writes the state as of the last step. Sub-groups are written one after the other; a pending
update of a sub-group is done first. Before a later step updates a sub-group that has not been read yet, its old values
are read into blocks of memory, from which they are written to the file. The room in the file was reserved before. So
nothing is written twice, and an update waits at most for memory that is being written.

[Note: several ranks] Collectives run only when a save begins, and when the next one begins. In between each rank makes
a file when its part is written, or has failed, and the first rank polls for these files. The other ranks poll until the
folder has its name. A rank that waits also checks on the board whether the ranks that it waits for still live.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from offload.errors import StateError
from offload.io_loop import IoFuture
from offload.system.worker import Worker
from zero.assembly.engine_parts import EngineParts
from zero.assembly.run import Run
from zero.checkpoint.frozen import Sums
from zero.checkpoint.rank_data_file import Extent
from zero.checkpoint.save_job import SaveJob
from zero.optim.sub_group_pipeline import StepArguments
from zero.params.layout import SubGroup

logger = logging.getLogger("zero")

EXTENTS_IN_FLIGHT = 2  # Extents in flight: while one is written the next is read.
POLL_SECONDS = 0.05
LIVENESS_SECONDS = 1.0  # Between two checks whether the ranks that this one waits for still live.
PEER_TIMEOUT_SECONDS = 600.0  # Once its own part is written the first rank waits so long for progress of the others.


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
                self._rank_data_file.writer.is_stopped, why = True, error
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
                self._rank_data_file.close_on_loop()
                worker.close()

    async def _write_all(self) -> None:
        part = self._rank_data_file
        try:
            await part.writer.write_all(
                part.extents, lambda extent: asyncio.shield(self._encode_once(extent)), EXTENTS_IN_FLIGHT
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
        self._store_tasks += await self._rank_data_file.writer.encode(extent)

    async def before_update(self, group: SubGroup, arguments: StepArguments) -> None:
        extent = self._extent_of.get(group)
        if extent is None or arguments is self._step_arguments or self._rank_data_file.writer.is_stopped:
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
        ended = dict[int, str]()
        while not await self._worker.run(self._save.is_completed):
            self._raise_if_ended(ended)
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
        bound = (
            bound for bound in self._run.parts.bound if bound.unit.persistent and bound.is_bound and bound.has_changes
        )
        self.edited_units = self.edited_units[0], self.edited_units[1] | {binding.unit.name for binding in bound}

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
