"""Asynchronous saves: training continues while state is written.

[Note: copy on write] A save takes the state as of the last step. Sub-groups are written one after the other; a pending
update of a sub-group is done first. When a later step wants to update a sub-group that has not been taken, its old
values are first read into blocks of memory, from which they are written to the file. The room in the file was reserved
before. So nothing is written twice, and an update waits at most for memory that is being written.

[Note: several ranks] Collectives run only when a save begins, and when the next one begins. In between each rank makes
a file that says that its part is written, or has failed, and the first rank looks for these files. The other ranks look
whether the folder gets its name. Whoever waits also asks the board whether the ranks that it waits for still live.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from typing_extensions import override

from offload.errors import StateError
from offload.mover import IoFuture
from offload.system.worker import Worker
from zero.assembly.assembly import EngineParts
from zero.assembly.run import Run
from zero.assembly.steps import StepListener
from zero.checkpoint.frozen import Sums
from zero.checkpoint.save import CheckpointSave
from zero.checkpoint.writer import Extent
from zero.optim.pipeline import StepArguments
from zero.params.layout import SubGroup

logger = logging.getLogger("zero")

AT_ONCE = 2  # Extents in flight: while one is written the next is read.
LOOK_SECONDS = 0.05
ALIVE_SECONDS = 1.0  # Between two questions whether the ranks that this one waits for still live.
PATIENCE_SECONDS = 600.0  # Once its own part is written the first rank waits so long for a sign of the other ranks.


class BackgroundSave:
    """One save in progress; its room on the disk is reserved. `describe`: the text that is logged at the end."""

    _asked = 0.0  # When the ranks that this one waits for were last looked at.

    def __init__(self, save: CheckpointSave, parts: EngineParts, *, save_latest: bool, describe: str) -> None:
        self._save, self._part, self._updates = save, save.part, parts.stepper.updates
        self._pipeline, self._describe, self._save_latest = parts.stepper.pipeline, describe, save_latest
        self._extent_of = {extent.group: extent for extent in self._part.extents if extent.group is not None}
        self._taking: dict[int, asyncio.Task[None]] = {}  # id(extent) -> the task that reads it into memory.
        self._stores: list[asyncio.Task[None]] = []
        self._as_of = self._updates.arguments  # Arguments of the last step; the save contains its updates.
        self._pipeline.before = self._before_update
        self._began = time.perf_counter()
        self._worker = Worker("zero-checkpoint")  # from here on Python does not exit before the save has ended
        self._transfer: IoFuture[None] = parts.storage.mover.submit(
            "saving a checkpoint", self._run(), self._part.in_flight
        )

    @property
    def settled(self) -> bool:
        return self._transfer.done()

    def end(self) -> BaseException | None:
        """Block until the checkpoint is complete. Returns the error if the save has failed."""
        return self._transfer.wait()

    # ---- on the mover's loop ------------------------------------------------------------------

    async def _run(self) -> None:
        worker = self._worker
        try:
            try:
                await self._take_all()
                await worker.run(self._part.finish)
            except BaseException as error:
                self._part.writer.stopped, why = True, error
                await worker.run(lambda: self._save.say_failed(why))
                await worker.run(self._save.refuse_removed)
                raise
            finally:
                self._pipeline.before = None
            await (self._assemble() if self._save.placement.rank == 0 else self._await_first())
            logger.info("%s in %.1f s, in the background", self._describe, time.perf_counter() - self._began)
        except BaseException as error:
            why = error
            if self._save.placement.rank == 0:  # the others wait for it, and the folder may outlast this
                await worker.run(lambda: self._save.say_failed(why))
            # Logged as well, since the error is only raised by the next call of the engine, which may never happen.
            logger.warning("checkpoint %s could not be saved: %s", self._save.tag, error)
            raise
        finally:
            try:
                await worker.run(self._save.give_up)
            finally:
                self._part.close_on_loop()
                worker.close()

    async def _take_all(self) -> None:
        part = self._part
        try:
            await part.writer.write_all(part.extents, lambda extent: asyncio.shield(self._take(extent)), AT_ONCE)
        finally:
            # When one extent has failed others are still in flight: they need the memory and the file until they end.
            await asyncio.gather(*self._taking.values(), return_exceptions=True)
            results = await asyncio.gather(*self._stores, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _take(self, extent: Extent) -> asyncio.Task[None]:
        if id(extent) not in self._taking:
            self._taking[id(extent)] = asyncio.create_task(self._bring(extent))
        return self._taking[id(extent)]

    async def _bring(self, extent: Extent) -> None:
        group = extent.group
        # Only updates of the last step (`_as_of`) or older belong to the save. A later step begins only when no update
        # is pending, so updates pending after that are not ours. It may begin right now on another thread, which sets
        # `arguments` first. So `is_busy` is asked before `arguments` is compared: if they are still those of the last
        # step, the group was busy with an update of that step, or an older one.
        if group is not None and self._updates.is_busy(group) and self._updates.arguments is self._as_of:
            await self._updates.finish([group])
        self._stores += await self._part.writer.encode(extent)

    async def _before_update(self, group: SubGroup, arguments: StepArguments) -> None:
        extent = self._extent_of.get(group)
        if extent is None or arguments is self._as_of or self._part.writer.stopped:
            return
        await asyncio.wait([self._take(extent)])  # if it fails, the save fails, and not the step

    async def _assemble(self) -> None:
        until, seen, left = 0.0, None, dict[int, str]()
        while missing := await self._worker.run(self._save.missing_parts):
            self._refuse({rank: why for rank, why in left.items() if rank in missing})
            if missing != seen:
                until, seen = time.monotonic() + PATIENCE_SECONDS, missing
            if time.monotonic() > until:
                raise StateError(
                    f"saving a checkpoint: ranks {list(missing)} have written nothing for {PATIENCE_SECONDS:.0f} s, "
                    f"and their parts of {self._save.tag} are not complete"
                )
            left = await self._who_left(missing)
            await asyncio.sleep(LOOK_SECONDS)
        await self._worker.run(lambda: self._save.assemble(save_latest=self._save_latest))

    async def _await_first(self) -> None:
        left = dict[int, str]()
        while not await self._worker.run(self._save.is_completed):
            self._refuse(left)
            left = await self._who_left([0])
            await asyncio.sleep(LOOK_SECONDS)

    async def _who_left(self, ranks: Collection[int]) -> dict[int, str]:
        if time.monotonic() < self._asked + ALIVE_SECONDS:
            return {}
        self._asked = time.monotonic()
        return await self._worker.run(lambda: self._save.gone(ranks))

    def _refuse(self, left: Mapping[int, str]) -> None:
        for rank, why in left.items():  # known before the last look, so what it wrote before its end was seen
            raise StateError(f"saving a checkpoint: rank {rank} {why}, and {self._save.tag} is not complete")


class CheckpointState(StepListener):
    """An engine's knowledge of its checkpoints between calls: the save in progress, and changes of values meanwhile.

    Attributes:
        half_loaded: the checkpoint of which only a part of the values has been loaded; "" for none.
        mixed: names of those values.
        frozen_sums: checksums of the weights that are not trained; None once these may have changed on this rank.
        modified: units that a forward has changed in place so far, in memory that a save reads.
        edited: persistent units that somebody has changed in place: between the last two steps, and since.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._behind: BackgroundSave | None = None
        self.half_loaded, self.mixed = "", frozenset[str]()
        self.frozen_sums: Sums | None = None
        self.modified: set[str] = set()
        self.edited: tuple[frozenset[str], frozenset[str]] = frozenset(), frozenset()

    @contextmanager
    def may_load(self) -> Iterator[None]:
        """Inside, a load that has failed half way forbids nothing: the engine is made ready for another one."""
        failed, self.half_loaded = self.half_loaded, ""
        try:
            yield
        finally:
            self.half_loaded = failed

    @contextmanager
    def loading(self, folder: str, values: frozenset[str], *, everything: bool = False) -> Iterator[None]:
        """Inside, values of these names are replaced. If that fails, they are mixed until others are loaded."""
        before, mixed, snapshots = self.half_loaded, self.mixed, self._run.parts.snapshots
        self.half_loaded, self.mixed = folder, mixed | values
        yield
        self.mixed = frozenset() if everything else mixed - values
        self.half_loaded = before if self.mixed else ""
        if everything and snapshots is not None:
            snapshots.replaced()

    def go_on_with(self, behind: BackgroundSave) -> None:
        self._behind = behind

    def checkpoint_pending(self) -> bool:
        return self._behind is not None and not self._behind.settled

    def wait_for_checkpoint(self) -> None:
        """Return once the checkpoint that is being written is complete.

        Raises StorageError: it could not be written; older checkpoints are as they were. Raises StateError: another
        rank's part could not be written.
        """
        error = self.end()
        if error is not None:
            raise error

    def end(self) -> BaseException | None:
        """Like `wait_for_checkpoint`, but returns the error."""
        behind = self._behind
        error = None if behind is None else behind.end()
        self._behind = None  # an interrupt that ends the wait does not end the save
        return error

    @override
    def check_call(self, what: str) -> None:
        if self.half_loaded:
            raise StateError(
                f"{what}: loading {self.half_loaded} failed half way, so some values are from there and others "
                "are not; load it again or a checkpoint, or close the engine"
            )

    @override
    def on_engine_call(self) -> None:
        if self._behind is not None and self._behind.settled:
            self.wait_for_checkpoint()

    @override
    def on_persistent_unbind(self) -> None:
        bound = (bound for bound in self._run.parts.bound if bound.unit.persistent and bound.bound and bound.differs)
        self.edited = self.edited[0], self.edited[1] | {each.unit.name for each in bound}

    @override
    def on_step_begin(self) -> None:
        self.on_persistent_unbind()
        self.edited = self.edited[1], frozenset()

    @override
    def on_weights_change(self, index: int) -> None:
        # The save has to take the old weights first. An error of the save is left to the next call, which raises it:
        # raised here it would prevent the change.
        if self._behind is not None:
            self._behind.end()
        if not self._run.parts.layout.units[index].trainable:
            self.frozen_sums = None

    @override
    def on_forward_modify(self, index: int) -> None:
        unit = self._run.parts.layout.units[index]
        if self._run.parts.storage.flat(unit) is not None:
            self.modified.add(unit.name)

    @override
    def on_edit_begin(self) -> None:
        self.wait_for_checkpoint()

    @override
    def on_rewrite_begin(self) -> None:
        self.wait_for_checkpoint()
        self.frozen_sums = None
