"""Steps: fixed at once, carried out behind the step.

[Note: what a step is] Norm, clipping and hyper-parameters are fixed before the first sub-group is
touched, and the gradients are sealed: later backwards collect new ones. From then on the step is
taken, whatever fails meanwhile: every sub-group is updated once, with these values, before anybody
sees its weights.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any

from offload.errors import StateError, StorageError, tell, was_told
from zero.exchange import Exchange
from zero.optim.agreement import agree_on_step
from zero.optim.behind import DueUpdates
from zero.optim.clipping import clip_coefficient
from zero.optim.gradients import Gradients
from zero.optim.inside import UpdatesInBackward
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.pipeline import StepArguments, SubGroupPipeline
from zero.params.layout import Layout, SubGroup, Unit
from zero.storage import Storage

NAMES_SHOWN = 8


class UnusedParameters(StateError):
    """Trained parameters got no gradient on any rank, and the configuration says that this is a mistake."""


class Stepper:
    """Takes steps, one at a time.

    Args:
        ahead: what was updated inside backward, if anything is.
        exchange: with the other ranks.
    """

    def __init__(
        self,
        layout: Layout,
        storage: Storage,
        gradients: Gradients,
        pipeline: SubGroupPipeline,
        updates: DueUpdates,
        ahead: UpdatesInBackward | None,
        exchange: Exchange,
    ) -> None:
        self._layout, self._storage, self._gradients, self._exchange = layout, storage, gradients, exchange
        self.pipeline, self.updates, self._ahead = pipeline, updates, ahead
        self._persistent = [unit.index for unit in layout.units if unit.persistent]
        self._arguments = StepArguments({}, 1.0, 0)
        self.decided = False
        """`fix` has decided; set to False when the next step is asked for."""
        self.needs_all = False
        """A step without a gradient for every trained parameter is a mistake."""
        self.norm: float | None = None
        """2-norm of the last step's gradients, before clipping."""
        gradients.reclaim = self._reclaim

    def fix(self, number: int, optimizer: ZeroOptimizer, index_of: dict[int, int], norm_max: float) -> None:
        """Decide everything about a step. No weight has changed yet when this returns or raises.

        A step that is decided stays so: a further call does nothing.

        Raises:
            UnusedParameters: see `needs_all`; the step is none.
            StorageError: a gradient could not be stored, or the step before cannot be completed; the next attempt
                goes on where this one stopped.
        """
        if self.decided:
            return
        self.finish()
        self._gradients.complete()
        mine = {
            slot.index
            for unit in self._layout.units
            if unit.trainable
            for slot, has in zip(unit.slots, self._gradients.contributed(unit.index), strict=True)
            if has
        }
        self.norm, contributed = agree_on_step(self._exchange, number, self._gradients.square_sum(), mine)
        if self.needs_all:
            self._refuse_unused(contributed)
        scale = clip_coefficient(self.norm, norm_max)
        arguments = StepArguments(optimizer.values(index_of, contributed), scale, number, self._storage.streams.fence())
        due = [group for group in self._storage.plan.sub_groups if self.pipeline.trained_units(group, arguments)]
        # No waiting and no searching from here on: half of this is no step.
        done = self._ahead.commit(arguments) if self._ahead is not None else set()
        optimizer.count_step(index_of, arguments.values)
        self._gradients.seal()
        self.updates.begin_step(arguments, [group for group in due if group not in done])
        self._arguments, self.decided = arguments, True

    def _refuse_unused(self, contributed: set[int]) -> None:
        trained = (slot for unit in self._layout.units if unit.trainable for slot in unit.slots)
        unused = [slot.name for slot in trained if slot.index not in contributed]
        if unused:
            more = f" and {len(unused) - NAMES_SHOWN} more" if len(unused) > NAMES_SHOWN else ""
            raise UnusedParameters(
                f"step: no gradient for {', '.join(unused[:NAMES_SHOWN])}{more}; use them in every step, call "
                "requires_grad_(False) on them, or set zero_optimization.ignore_unused_parameters to true"
            )

    def start(self) -> None:
        """Begin with what cannot wait for a fetch: what needs no disk, and units that are always bound.

        Raises:
            StorageError: as `finish`.
        """
        due = self.updates.groups_of(None)
        self._finish_groups([group for group in due if self.pipeline.at_once(group, self._arguments)])
        bound = self.updates.groups_of(self._persistent)
        if bound:
            self._storage.mover.post("updating what is always bound", self.updates.bring(bound))

    def check(self) -> None:
        """Raise an error of an update that nobody has seen yet; else write what could not be written.

        Raises:
            StorageError: names the step. Nothing is lost; the next call tries again.
        """
        failure = self.updates.failure
        if failure is None:
            return
        if not was_told(failure):
            tell(failure)
            raise failure
        self._storage.mover.run("storing the results of a step", self.updates.retry())

    def finish(self, units: Iterable[int] | None = None) -> None:
        """Complete the step for these units (None: all): updated, and stored.

        Raises:
            StorageError: names the step; the next call goes on.
        """
        # In this order: an update that fails says so before it ends.
        if self.updates.all_settled and self.updates.failure is None:
            return
        self.check()
        self._finish_groups(self.updates.groups_of(units))

    def apply(self, index: int) -> None:
        """Update the unit: its gradient is used no longer, its weights are those of the step."""
        if not self.updates.current(index):
            unit = self._layout.units[index]
            self._run(f"updating unit {unit.name}", self.updates.bring_unit(unit))

    def _reclaim(self, unit: Unit) -> None:
        """The unit's gradient gets its memory back from updates that have been lent it."""
        spare = self.pipeline.spare
        if spare.holds(unit.index):
            self._storage.mover.run(f"storing results out of the way of {unit.name}", spare.withdraw(unit))

    def stop(self) -> None:
        """The engine closes: updates that have not begun never will, nobody could see them."""
        self.updates.stopped = True

    def apply_persistent(self) -> None:
        """Update the units that are always bound."""
        for index in self._persistent:
            self.apply(index)

    def _finish_groups(self, groups: list[SubGroup]) -> None:
        if groups:
            self._run("optimizer step", self.updates.finish(groups))

    def _run(self, what: str, job: Coroutine[Any, Any, None]) -> None:
        try:
            self._storage.mover.run(what, job)
        except StorageError as error:
            tell(error)
            raise
