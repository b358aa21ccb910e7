"""The snapshots of one engine's steps: when they begin, and when they are committed."""

from __future__ import annotations

import logging
import sys
import time

from offload.errors import ZeroInfinityError
from zero.assembly.run import Run
from zero.assembly.run_state import CapturedState
from zero.assembly.snapshots import Snapshots

logger = logging.getLogger("zero")


class StepSnapshots:
    """Begins a snapshot when a step is due for one, and commits it before the next step. Without snapshots: nothing."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def _snapshots(self) -> Snapshots | None:
        return self._run.parts.snapshots

    def begin_snapshot(self, snapshots: Snapshots) -> None:
        """Begin a snapshot of the last step."""
        run = self._run
        snapshots.begin_snapshot(run.global_steps, CapturedState(run, run.parts.stepper.norm))

    def commit_last(self) -> None:
        """Commit when the engine closes, but not while an error is raised or handled.

        A step may be incomplete then, and the other ranks may be at any other call.
        """
        snapshots = self._snapshots
        if snapshots is None or snapshots.pending is None or sys.exc_info()[0] is not None:
            return
        try:
            self.commit_pending()
        except ZeroInfinityError as error:
            logger.warning("the snapshot of step %d could not be committed: %s", snapshots.pending.step, error)

    def check_loaded(self) -> None:
        """Before a step: raise if the snapshot that the swap space has must be loaded first."""
        if self._snapshots is not None:
            self._snapshots.check_loaded()

    def commit_pending(self) -> None:
        """Before a step is decided, with no unit bound: commit the snapshot that has begun."""
        if self._snapshots is not None and self._snapshots.pending is not None:
            self._run.parts.stepper.finish_updates()
            self._snapshots.commit()

    def begin_if_due(self) -> None:
        """A step is decided and counted, and nothing has used its new weights yet: begin its snapshot if it is due."""
        snapshots = self._snapshots
        if snapshots is not None and snapshots.is_due(self._run.global_steps):
            began = time.perf_counter()
            self.begin_snapshot(snapshots)
            snapshots.seconds += time.perf_counter() - began

    def commit_in_step(self) -> None:
        """Updates without disk are done, those of persistent units submitted: commit if snapshots do in their step."""
        if self._snapshots is not None and self._snapshots.commits_in_step:
            self.commit_pending()

    def write_persistent(self) -> None:
        """The persistent units have their values of the last step, and nothing has used them yet."""
        if self._snapshots is not None:
            self._snapshots.write_persistent()

    def invalidate(self) -> None:
        """Weights are about to change by other means than a step."""
        if self._snapshots is not None:
            self._snapshots.invalidate()
