"""The engine's snapshots: when they begin, when they are committed, and how training resumes from one."""

from __future__ import annotations

import logging
import sys
import time

from typing_extensions import override

from offload.errors import StateError, ZeroInfinityError
from zero.assembly.accumulation import Accumulation
from zero.assembly.engine_steps import EngineSteps, StepListener
from zero.assembly.run import Run
from zero.exchange.all_ranks import AllRanks
from zero.reports.log import NOTICE
from zero.snapshots.snapshot_state import capture_state, check_state, restore_state
from zero.snapshots.snapshots import Snapshots

logger = logging.getLogger("zero")


class SnapshotListener(StepListener):
    """Begins a snapshot when a step is due for one, and commits it before the next step."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def begin_snapshot(self, snapshots: Snapshots) -> None:
        """Begin a snapshot of the last step."""
        run = self._run
        snapshots.begin_snapshot(run.global_steps, capture_state(run, run.parts.stepper.norm))

    def commit_last(self) -> None:
        """Commit when the engine closes, but not while an error is raised or handled.

        A step may be incomplete then, and the other ranks may be at any other call.
        """
        snapshots = self._run.parts.snapshots
        if snapshots is None or snapshots.pending is None or sys.exc_info()[0] is not None:
            return
        try:
            self.on_units_evicted()
        except ZeroInfinityError as error:
            logger.warning("the snapshot of step %d could not be committed: %s", snapshots.pending.step, error)

    @override
    def on_step_request(self) -> None:
        if self._run.parts.snapshots is not None:
            self._run.parts.snapshots.check_loaded()

    @override
    def on_units_evicted(self) -> None:
        snapshots = self._run.parts.snapshots
        if snapshots is not None and snapshots.pending is not None:
            self._run.parts.stepper.finish_updates()
            snapshots.commit()

    @override
    def on_step_decided(self) -> None:
        snapshots = self._run.parts.snapshots
        if snapshots is not None and snapshots.is_due(self._run.global_steps):
            began = time.perf_counter()
            self.begin_snapshot(snapshots)
            snapshots.seconds += time.perf_counter() - began

    @override
    def on_eager_updates_done(self) -> None:
        if self._run.parts.snapshots is not None and self._run.parts.snapshots.commits_in_step:
            self.on_units_evicted()

    @override
    def on_persistent_updated(self) -> None:
        if self._run.parts.snapshots is not None:
            self._run.parts.snapshots.write_persistent()

    @override
    def on_weights_change(self, index: int) -> None:
        self.on_rewrite_begin()

    @override
    def on_rewrite_begin(self) -> None:
        if self._run.parts.snapshots is not None:
            self._run.parts.snapshots.invalidate()


class SnapshotCalls:
    """`engine.save_snapshot` and `engine.load_snapshot`."""

    def __init__(self, run: Run, steps: EngineSteps, accumulation: Accumulation, listener: SnapshotListener) -> None:
        self._run = run
        self._steps = steps
        self._accumulation = accumulation
        self._listener = listener

    def save_snapshot(self) -> int:
        """See `ZeroEngine.save_snapshot`."""
        snapshots, parts = self._ready_snapshots("save_snapshot"), self._run.parts
        if parts.has_gradients:
            raise StateError(
                "save_snapshot: gradients have been accumulated since the last step; call it right after step()"
            )
        snapshots.check_loaded()
        parts.stepper.finish_updates()
        self._listener.begin_snapshot(snapshots)
        snapshots.commit()
        if snapshots.committed_step != self._run.global_steps:
            raise StateError("save_snapshot: another rank changed weights during the call; call it again")
        return self._run.global_steps

    def load_snapshot(self) -> int | None:
        """See `ZeroEngine.load_snapshot`."""
        snapshots, run = self._ready_snapshots("load_snapshot"), self._run
        if snapshots.committed_step is None:
            return None
        self._steps.discard_batch()
        together = AllRanks(run.collectives)
        parts = together.run_on_all(
            "load_snapshot", self._steps.prepare_rewrite
        )  # no rank uses this rank's slices any more
        state = snapshots.load(lambda saved: check_state(run, saved))
        if state is None:
            return None
        parts.stepper.norm = restore_state(run, state)
        parts.coordinator.on_rewrite()
        self._accumulation.mark_buffers_different()
        self._steps.make_ready("load_snapshot")  # what only all ranks can gather; later one may evaluate alone
        logger.log(NOTICE, "continuing from the snapshot of step %d", run.global_steps)
        return run.global_steps

    def _ready_snapshots(self, what: str) -> Snapshots:
        self._steps.make_ready(what)
        snapshots = self._run.parts.snapshots
        if snapshots is None:
            raise StateError(
                f"{what}: snapshots are not configured; set zero_optimization.offload_optimizer.snapshot, for example "
                f'to {{"every": 100}}'
            )
        self._run.parts.check_outside_calls(what, "call it between steps")
        return snapshots
