"""The engine's snapshots: when they are begun and committed, and how to go on from one."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from offload.errors import StateError, ZeroInfinityError
from zero.schedule.hooks import in_backward
from zero.snapshots.commit import Snapshots
from zero.snapshots.snapshot_state import capture, restore

if TYPE_CHECKING:
    from zero.assembly.assembly import Assembly

logger = logging.getLogger("zero")


class TakesSnapshots:
    """Mixed into the engine."""

    global_steps: int
    _parts: Assembly
    _buffers_differ: bool

    def save_snapshot(self) -> int:
        """Commit a snapshot now, whatever `every` says; returns the step that it is of. All ranks come here.

        Raises:
            StateError: there is no snapshot block, or gradients have been collected since the last step.
            StorageError: it could not be written; the one before still counts.
        """
        self.ready("save_snapshot")
        snapshots, parts = self._snapshots("save_snapshot"), self._parts
        self._refuse_inside("save_snapshot")
        if any(any(state.contributions) or state.arrived for state in parts.gradients.states()):
            raise StateError("save_snapshot: gradients have been collected since the last step; call it after step()")
        snapshots.check_loaded()
        parts.stepper.finish()
        snapshots.begin(self.global_steps, self._small_state())
        snapshots.commit()
        if snapshots.committed_step != self.global_steps:
            raise StateError("save_snapshot: another rank has changed weights meanwhile; call it again")
        return self.global_steps

    def load_snapshot(self) -> int | None:
        """Go on from the last snapshot that was committed; all ranks come here.

        Everything is as it was after that step: weights, states, counters, hyper-parameters, the scheduler, random
        numbers, buffers. Gradients that have been collected since are forgotten. Everything is read and compared with
        its checksums; nothing is copied but what lives in memory.

        Returns:
            The step it is of; None: there is none yet, and nothing has changed.

        Raises:
            StateError: there is no snapshot block, or it is called inside forward, backward or `GatheredParameters`.
            StorageError: something of it cannot be read, or is damaged; the engine holds nothing of use.
            ConfigError: so it is on another rank.
        """
        self.ready("load_snapshot")
        snapshots = self._snapshots("load_snapshot")
        self._refuse_inside("load_snapshot")
        if snapshots.committed_step is None:
            return None
        parts = self.at_rest()
        parts.gradients.clear()
        parts.watch.torn = False
        state = snapshots.load()
        if state is None:
            return None
        parts.stepper.norm = restore(self, self._names(), state)  # type: ignore[arg-type]
        parts.coordinator.rewritten()
        self._buffers_differ = True
        logger.info("going on from the snapshot of step %d", self.global_steps)
        return self.global_steps

    # ---- the engine's -------------------------------------------------------------------------

    def ready(self, what: str) -> None:
        """Take the step that was asked for; the engine's."""
        raise NotImplementedError

    def at_rest(self) -> Assembly:
        """The parts, to rewrite their planes; the engine's."""
        raise NotImplementedError

    def _check_snapshot(self) -> None:
        """Raise StateError if a step would lead to a snapshot that replaces one nobody has gone on from."""
        if self._parts.snapshots is not None:
            self._parts.snapshots.check_loaded()

    def _step_was_fixed(self) -> None:
        """Nobody has seen its weights yet."""
        snapshots = self._parts.snapshots
        if snapshots is not None and snapshots.due(self.global_steps):
            began = time.perf_counter()
            snapshots.begin(self.global_steps, self._small_state())
            snapshots.seconds += time.perf_counter() - began

    def _before_a_step(self) -> None:
        """The next one is about to be fixed: the last one's snapshot, if it has one, is committed."""
        snapshots = self._parts.snapshots
        if snapshots is not None and snapshots.pending is not None:
            self._parts.stepper.finish()
            snapshots.commit()

    def _after_a_step(self) -> None:
        """It has begun."""
        if self._parts.snapshots is not None and self._parts.snapshots.at_once:
            self._before_a_step()

    def _bound_again(self) -> None:
        """What is always on the device is as of the last step, and nobody has touched it."""
        if self._parts.snapshots is not None:
            self._parts.snapshots.write_bound()

    def _weights_changed(self) -> None:
        """By other means than a step."""
        if self._parts.snapshots is not None:
            self._parts.snapshots.void()

    def _commit_last(self) -> None:
        """The engine closes. If that is because of an error, other ranks may be anywhere."""
        snapshots = self._parts.snapshots
        if snapshots is None or snapshots.pending is None or sys.exc_info()[0] is not None:
            return
        try:
            self._before_a_step()
        except ZeroInfinityError as error:
            logger.warning("the snapshot of step %d could not be committed: %s", snapshots.pending.step, error)

    # ---- inside -------------------------------------------------------------------------------

    def _snapshots(self, what: str) -> Snapshots:
        snapshots = self._parts.snapshots
        if snapshots is None:
            raise StateError(
                f"{what}: there are no snapshots; set zero_optimization.offload_optimizer.snapshot, to "
                '{"every": 100} say'
            )
        return snapshots

    def _refuse_inside(self, what: str) -> None:
        if self._parts.hooks.in_forward or in_backward() or self._parts.keeper.editing:
            raise StateError(f"{what}: inside forward, backward or GatheredParameters; call it between steps")

    def _small_state(self) -> bytes:
        return capture(self, self._names(), self._parts.stepper.norm)  # type: ignore[arg-type]

    def _names(self) -> dict[int, Any]:
        return {id(leaf.parameter): leaf.names[0] for leaf in self._parts.leaves}
