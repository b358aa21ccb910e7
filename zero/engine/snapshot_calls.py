"""The engine's snapshots: when they begin, when they are committed, and how training resumes from one."""

from __future__ import annotations

import logging

from offload.errors import StateError
from zero.assembly.accumulation import Accumulation
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.log import NOTICE
from zero.assembly.run import Run
from zero.assembly.run_state import check_state, restore_state
from zero.assembly.snapshots import Snapshots
from zero.store.all_ranks import AllRanks

logger = logging.getLogger("zero")


class SnapshotCalls:
    """`engine.save_snapshot` and `engine.load_snapshot`."""

    def __init__(self, run: Run, steps: EngineSteps, accumulation: Accumulation) -> None:
        self._run = run
        self._steps = steps
        self._accumulation = accumulation

    def save_snapshot(self) -> int:
        """See `ZeroEngine.save_snapshot`."""
        snapshots, parts = self._ready_snapshots("save_snapshot"), self._run.parts
        if parts.has_gradients:
            raise StateError(
                "save_snapshot: gradients have been accumulated since the last step; call it right after step()"
            )
        snapshots.check_loaded()
        parts.stepper.finish_updates()
        self._steps.snapshots.begin_snapshot(snapshots)
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
        )  # no rank uses this rank's shards any more
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
