"""Snapshots on NVMe: each value has two slots, and a snapshot mainly writes which of the two counts.

[Note: when] Whether a step is due for a snapshot is decided when the step is fixed. Small state (counters, random
states, buffers) is captured then. The step's updates continue during the next forward, as always. The snapshot is
committed when all of them are stored, which is before the next step is fixed; until then nothing else writes to the
slots. The model could edit values that are always on the device meanwhile, so these are written as soon as they are
updated.

[Note: void] A change of weights by other means than a step, between fixing and commit, makes the snapshot void: the
snapshot would contain the change, and the program that continues from it would make it again. The next step is due
instead, and some snapshots are then committed inside their step.

[Note: ranks] Each rank writes its manifest, all ranks meet, the first one commits, all meet again. Only then a slot of
the previous snapshot may be written to. Between the two meetings nothing is written, even if something fails.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from offload.array.two_slots import TwoSlotArray
from offload.errors import ConfigError, StateError, StorageError
from offload.files.snapshot_files import Manifest, SnapshotFiles
from offload.system.regular_files import report_read_errors
from zero.config import Config
from zero.config.swap_paths import create_swap_paths
from zero.params.layout import AddressSpace, Layout
from zero.plan.plan import Plan
from zero.plan.sub_group_state import ADAM_STATES
from zero.store.all_ranks import AllRanks
from zero.store.collectives import Collectives
from zero.store.storage import Storage

logger = logging.getLogger("zero")

IN_STEP_SNAPSHOTS = 10  # After a void snapshot the next so many are committed inside their step.
NAMES_MAX = 4  # Parameters that an error names.


class StateOfRun(Protocol):
    """What a run saves besides its arrays, at the step of a snapshot; see `CapturedState`."""

    def to_bytes(self) -> bytes:
        """Called after the step's updates."""


@dataclass(slots=True)
class PendingSnapshot:
    """A snapshot of a step whose updates are not all stored yet."""

    step: int
    state: StateOfRun
    is_persistent_written: bool = False  # Values that are always on the device are written.
    is_memory_written: bool = False  # All values that live in memory are written.
    is_void: bool = False


class SnapshotConsensus(AllRanks):
    """If one rank finds no usable snapshot, all ranks raise ConfigError."""

    shared_errors, default_error = (), ConfigError


class Snapshots:
    """The snapshots of one engine.

    Args:
        files: this rank's part.
        every: number of steps from one snapshot to the next.
        facts: description of the layout; a later engine compares it with its own.
        previous: the committed snapshot of an earlier engine, with this layout.

    Attributes:
        has_unloaded: there is an earlier snapshot from which this engine has not continued; nothing is committed.
        committed_step: step of the last committed snapshot; None: there is none.
    """

    def __init__(
        self,
        files: SnapshotFiles,
        every: int,
        collectives: Collectives,
        facts: dict[str, Any],
        previous: Manifest | None,
    ) -> None:
        self.files = files
        self._every = every
        self._collectives = collectives
        self._facts = facts
        self._previous = previous
        self._number = 0 if previous is None else previous.number
        self._storage: Storage | None = None
        self.has_unloaded = previous is not None
        self.pending: PendingSnapshot | None = None
        self.committed_step: int | None = None if previous is None else int(previous.body["step"])
        self._is_overdue = False
        self._is_frozen = False
        self._in_step_left = 0  # So many of the next snapshots are committed inside their step.
        self._is_damaged = False  # The last load could not read the snapshot.
        self._has_unsynced_writes = False  # The last sync has failed.
        self.seconds = 0.0  # Spent on snapshots so far, on the training thread.

    def attach_storage(self, storage: Storage) -> None:
        """Take the new, empty storage. If there is an earlier snapshot, its slots are only read from here on."""
        self._storage = storage
        if self._previous is not None:
            for array, slots in zip(storage.snapshot_arrays, self._previous.body["slots"], strict=True):
                array.set_committed_slots(slots)

    def close(self) -> None:
        """Close the files, if no storage was made that does so."""
        self.files.close()

    def is_due(self, step: int) -> bool:
        return self._is_overdue or step % self._every == 0

    @property
    def commits_in_step(self) -> bool:
        """True when the pending snapshot is to be committed inside its step."""
        return self.pending is not None and self._in_step_left > 0

    def begin_snapshot(self, step: int, state: StateOfRun) -> None:
        """A step is fixed, and its weights are not in use yet."""
        self.pending = PendingSnapshot(step, state)

    def invalidate(self) -> None:
        """Weights change by other means than a step."""
        if self.pending is not None and not self._is_frozen:
            self.pending.is_void = True

    def write_persistent(self) -> None:
        """Write the values that are always on the device, while they still are the step's. Raises StorageError."""
        if self.pending is not None and not self.pending.is_persistent_written:
            start = time.perf_counter()
            self._write_through(persistent=True)
            self.pending.is_persistent_written = True
            self.seconds += time.perf_counter() - start

    def commit(self) -> None:
        """Commit the pending snapshot, if there is one. All updates of its step must be stored.

        All ranks call this. Raises StorageError: something could not be written, here or on another rank; the previous
        snapshot still counts. The next call tries again.
        """
        pending = self.pending
        if pending is None:
            return
        start, failure = time.perf_counter(), None
        try:
            if not pending.is_void:
                self._prepare(pending)
        except StorageError as error:
            failure = error
        if self._agree_on("snapshot written", failure, pending):
            self._freeze(True)  # from here on it may be committed; frozen until all ranks know that it is
            self._commit_on_first_rank(pending)
        self.seconds += time.perf_counter() - start

    def _prepare(self, pending: PendingSnapshot) -> None:
        """Put everything that the manifest names, and the manifest, on stable storage."""
        storage = self._attached_storage
        if storage.disk is None or any(array.has_failed_writes for array in storage.snapshot_arrays):
            raise StateError("snapshot: some values are not on the disk yet")
        self.write_persistent()
        if not pending.is_memory_written:
            self._write_through(persistent=False)
            pending.is_memory_written = True
        for array in storage.snapshot_arrays:
            storage.io_loop.run("checksums of a snapshot", array.complete_checksums())
        if self._has_unsynced_writes:
            for array in storage.snapshot_arrays:
                storage.io_loop.run("writing a snapshot again", array.repeat_writes())
        self._has_unsynced_writes = True  # if the sync fails, the next one says nothing about the writes before it
        storage.io_loop.run("putting a snapshot on stable storage", storage.disk.sync())
        self._has_unsynced_writes = False
        geometry = storage.disk.swap.geometry
        body = {
            "step": pending.step,
            "facts": self._facts,
            "folders": [str(folder) for folder in self.files.folders],
            "stripes": [list(geometry.counts), geometry.stripe_bytes],
            "slots": [array.slots for array in storage.snapshot_arrays],
            "block_checksums": [array.checksums for array in storage.snapshot_arrays],
        }
        self.files.write_manifest(self._number + 1, body, pending.state.to_bytes())

    def _agree_on(self, what: str, failure: StorageError | None, pending: PendingSnapshot) -> bool:
        """Wait for the other ranks. Returns False if the snapshot is void on some rank.

        Raises StorageError: this rank's failure; StateError: another rank's.
        """
        report = {"step": pending.step, "void": pending.is_void, "error": None if failure is None else str(failure)}
        answers = [
            json.loads(answer) for answer in self._collectives.all_gather_bytes(what, json.dumps(report).encode())
        ]
        if any(answer["void"] for answer in answers):
            self.pending, self._is_overdue, self._in_step_left = None, True, IN_STEP_SNAPSHOTS
            logger.info(
                "the snapshot of step %d is dropped, because weights were changed before it was committed; the next "
                "snapshots are committed inside their steps",
                pending.step,
            )
            return False
        if failure is not None:
            raise failure
        failures = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if answer["error"]]
        if failures:
            raise StateError(
                f"snapshot of step {pending.step}: {'; '.join(failures)}. The previous snapshot is still valid"
            )
        return True

    def _freeze(self, frozen: bool) -> None:
        self._is_frozen = frozen
        for array in self._attached_storage.snapshot_arrays:
            array.is_frozen = frozen

    def _commit_on_first_rank(self, pending: PendingSnapshot) -> None:
        """The first rank commits. Once all ranks know, the slots of the previous snapshot are free."""
        failure = None
        if self._collectives.placement.rank == 0:
            try:
                self.files.commit(
                    {"number": self._number + 1, "step": pending.step, "ranks": self._collectives.placement.world_size}
                )
            except StorageError as error:
                failure = error
        self._agree_on("snapshot committed", failure, pending)
        for array in self._attached_storage.snapshot_arrays:
            array.commit_slots()
        self._freeze(False)
        self._number += 1
        self.committed_step, self.pending, self._is_overdue = pending.step, None, False
        self._in_step_left = max(self._in_step_left - 1, 0)
        self.files.has_commit = True

    def _write_through(self, *, persistent: bool) -> None:
        storage = self._attached_storage
        spaces = storage.layout.spaces
        for number, array in enumerate(storage.snapshot_arrays):
            # `snapshot_arrays` begins with the weights, one array for each address space. States are not split by unit.
            space = spaces[number] if number < len(spaces) else None
            pairs = []
            if space is not None:
                for unit in space.units:
                    if unit.persistent == persistent:
                        pairs += array.pairs_in_memory(unit.begin, unit.end)
            elif not persistent:
                pairs = array.pairs_in_memory(0, array.numel)
            if pairs:
                changes_seldom = space is not None and not space.trainable
                job = array.write_through(pairs, storage.host_pool, seldom_changes=changes_seldom)
                storage.io_loop.run("writing a snapshot of what is in memory", job)

    def load(self, check: Callable[[bytes], None]) -> bytes | None:
        """Restore the tiered arrays from the last snapshot; returns the state saved with it. None: there is none.

        The engine must be at rest; all ranks call this. Afterwards the caller has to fetch weights again that other
        ranks or devices have. `check` is called with the saved state before any value changes. Raises StorageError:
        something cannot be read, or is damaged; the tiered arrays have no usable values then. Raises ConfigError: the
        same on another rank.
        """
        if self._is_frozen:
            self.commit()
        if self.committed_step is None:
            return None
        storage, manifest = self._attached_storage, self.files.manifest(self._number)
        if manifest is None:
            raise StateError(f"load_snapshot: manifest {self._number} in {self.files.folders[0]} no longer exists")
        check(manifest.state)
        self.pending, self._is_overdue = None, False
        self.has_unloaded = True  # until all of it is here, no step may replace it

        def read() -> None:
            try:
                self._restore_arrays(storage, manifest)
            except StorageError as error:
                raise error.within(
                    f"load_snapshot: the snapshot {self.files.name!r} of step {self.committed_step} in "
                    f"{self.files.root} cannot be used, and the previous one no longer exists; load a checkpoint, or "
                    "remove the snapshot (zero snapshots rm) and start again"
                ) from error

        self._is_damaged = True
        SnapshotConsensus(self._collectives).run_on_all("snapshot read", read)
        self.has_unloaded = self._is_damaged = False
        return manifest.state

    def on_checkpoint_load(self) -> None:
        """A checkpoint has replaced all values: now the next snapshot may replace one that could not be read."""
        if self._is_damaged:
            self.has_unloaded = self._is_damaged = False

    def _restore_arrays(self, storage: Storage, manifest: Manifest) -> None:
        """Restore the tiered arrays from the slots that the manifest names. Raises StorageError."""
        for array, checksums in zip(storage.snapshot_arrays, manifest.body["block_checksums"], strict=True):
            describe = partial(_describe_range, _space_of(storage, array))
            storage.io_loop.run(
                "going back to a snapshot", array.restore_committed(storage.host_pool, checksums, describe)
            )

    def check_loaded(self) -> None:
        """Raise StateError if the engine has not continued from an existing snapshot: the next one would replace it."""
        if self.has_unloaded:
            raise StateError(
                f"step: the snapshot {self.files.name!r} of step {self.committed_step} is in {self.files.root}, and "
                "a new snapshot would replace it. To continue from it, call engine.load_snapshot(); to start again, "
                "remove it (zero snapshots rm), or set another offload_optimizer.snapshot.name"
            )

    @property
    def _attached_storage(self) -> Storage:
        if self._storage is None:
            raise StateError("snapshots: the storage has not been made yet")
        return self._storage


def _space_of(storage: Storage, array: TwoSlotArray) -> AddressSpace:
    pairs = zip(storage.layout.spaces, storage.weights, storage.state_arrays, strict=True)
    return next(space for space, weights, states in pairs if array in (weights, states))


def _describe_range(space: AddressSpace, begin: int, end: int) -> str:
    """The parameters in [begin, end) of the address space, for error messages."""
    slots = [(unit, slot) for unit in space.units_between(begin, end) for slot in unit.slots]
    spans = [(slot.name, *unit.shard_range(slot)) for unit, slot in slots]
    names = [name for name, lo, hi in spans if lo < end and begin < hi]
    more = f" and {len(names) - NAMES_MAX:,} more" if len(names) > NAMES_MAX else ""
    return f" ({', '.join(names[:NAMES_MAX])}{more})" if names else " (padding)"


def open_snapshots(config: Config, layout: Layout, plan: Plan, collectives: Collectives) -> Snapshots | None:
    """The snapshots that a configuration requests; None: none. All ranks call this before their storage is made.

    Raises ConfigError: the folder cannot be used, another job uses it, or it holds a snapshot of another layout;
    StorageError: an existing snapshot cannot be read.
    """
    settings = config.zero_optimization.offload_optimizer.snapshot
    if not plan.snapshots or settings is None:
        return None
    consensus, rank, name = SnapshotConsensus(collectives), collectives.placement.rank, settings.name
    with ExitStack() as undo:

        def open_files() -> tuple[SnapshotFiles, dict[str, Any] | None]:
            files = SnapshotFiles(create_swap_paths(config), name, rank, shared=settings.shared_folder)
            undo.callback(_close_files, files)
            return files, files.committed_head if rank == 0 else None

        files, local_head = consensus.run_on_all("snapshot files", open_files)
        head = json.loads(consensus.all_gather_results("snapshot found", json.dumps(local_head).encode())[0])
        facts = facts_of(layout, plan, collectives)
        manifest = consensus.run_on_all(
            "snapshot fits", lambda: report_read_errors(files.root)(_previous_manifest)(files, head, facts, collectives)
        )
        undo.pop_all()
    files.has_commit = manifest is not None
    files.geometry = None if manifest is None else manifest.body["stripes"]
    return Snapshots(files, settings.every, collectives, facts, manifest)


def _close_files(files: SnapshotFiles) -> None:
    """Close the files of an engine that could not be made; an existing snapshot is kept."""
    files.has_commit = True
    files.close()


def _previous_manifest(
    files: SnapshotFiles, head: dict[str, Any] | None, facts: dict[str, Any], collectives: Collectives
) -> Manifest | None:
    """This rank's manifest of the committed snapshot. Raises ConfigError: a rank has none, or one of another layout."""
    if head is None:
        return None
    where = f"offload_optimizer.snapshot: {files.name!r} (step {head['step']}) in {files.root}"
    fix = (
        "use the model, configuration and ranks that it was made with, remove it (zero snapshots rm), or set "
        "another snapshot.name"
    )
    if head["ranks"] != collectives.placement.world_size:
        raise ConfigError(
            f"{where} was made by {head['ranks']} ranks, and there are {collectives.placement.world_size} now; {fix}"
        )
    manifest = files.manifest(head["number"])
    if manifest is None:
        raise ConfigError(f"{where}: rank {files.rank} does not find its part in {files.folders[0]}; {fix}")
    saved_facts = manifest.body["facts"]
    keys = {**saved_facts, **facts}  # some facts are only there if they differ from the default
    differences = [
        f"{key}: {saved_facts.get(key)} then, {facts.get(key)} now"
        for key in keys
        if saved_facts.get(key) != facts.get(key)
    ]
    if differences:
        raise ConfigError(f"{where} has another layout ({'; '.join(differences)}); {fix}")
    return manifest


def facts_of(layout: Layout, plan: Plan, collectives: Collectives) -> dict[str, Any]:
    """The facts that must be equal for the bytes of a snapshot to have the same meaning."""
    units = [
        [u.name, str(u.dtype), u.trainable, u.numel, u.shard_numel, u.begin]
        + [[slot.names, list(slot.shape), slot.offset_numel, slot.first_numel] for slot in u.slots]
        for u in layout.units
    ]
    groups = [[group.space, group.begin, group.end] for group in plan.sub_groups]
    return {
        "ranks": collectives.placement.world_size,
        "ranks of a shard group": collectives.placement.shard_size,
        "parameters": sum(len(unit.slots) for unit in layout.units),
        "elements": layout.numel,
        "trained elements": sum(unit.numel for unit in layout.units if unit.trainable),
        "state_dtype": str(plan.state_dtype),
        **({"masters": "bf16"} if any(space.rounds_stochastically for space in layout.spaces) else {}),
        **({} if set(plan.states) == {ADAM_STATES} else {"states": [name for names in plan.states for name in names]}),
        **({"small states": f"{plan.small_bytes:,} bytes"} if plan.small_bytes else {}),
        "sub-groups": f"{len(groups)} of up to {max((g.end - g.begin for g in plan.sub_groups), default=0):,} elements",
        "layout": _digest([units, groups]),
    }


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
