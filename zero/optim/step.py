"""One optimizer step: fixed at once, then finished, however many attempts that takes.

[Note: what a failed step is] Norm, clipping and hyper-parameters are fixed before the first sub-group
is touched. If a transfer fails, the step stays pending: whoever comes next finishes it with the same
values before anything else, or sees it fail again. A retry is never a second step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.errors import StateError
from offload.mover import Transfer
from zero.optim.clipping import clip_coefficient
from zero.optim.gradients import Gradients
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.pipeline import StepArguments, SubGroupPipeline
from zero.params.layout import Layout, SubGroup


@dataclass(slots=True)
class PendingStep:
    """A step whose values are fixed and whose sub-groups are not all updated."""

    arguments: StepArguments
    due: list[SubGroup]
    transfer: Transfer[None] | None = None
    """The attempt under way; it is waited for, also after an interrupt, before another one starts."""


class Stepper:
    """Takes steps, one at a time.

    Args:
        done: called once each time a step has been completed.
    """

    def __init__(
        self,
        layout: Layout,
        sub_groups: tuple[SubGroup, ...],
        gradients: Gradients,
        pipeline: SubGroupPipeline,
        done: Callable[[], None],
    ) -> None:
        self._layout, self._sub_groups, self._gradients = layout, sub_groups, gradients
        self._pipeline, self._done = pipeline, done
        self._pending: PendingStep | None = None
        self.norm: float | None = None
        """2-norm of the last step's gradients, before clipping."""

    @property
    def pending(self) -> bool:
        """True while a step is fixed and not completed."""
        return self._pending is not None

    def fix(self, optimizer: ZeroOptimizer, index_of: dict[int, int], norm_max: float) -> None:
        """Decide everything about a step. No weight has changed yet when this returns or raises.

        Raises:
            StorageError: a gradient could not be stored; the next attempt goes on where this one stopped.
            StateError: a step is pending.
        """
        if self._pending is not None:
            raise StateError("step: the previous step is not complete")
        self._gradients.flush_all()
        self._gradients.settle()
        self.norm = self._gradients.norm()
        contributed = {
            slot.index
            for unit in self._layout.units
            if unit.trainable
            for slot, has in zip(unit.slots, self._gradients.contributed(unit.index), strict=True)
            if has
        }
        scale = clip_coefficient(self.norm, norm_max)
        values = optimizer.values_for_step(index_of, contributed)
        self._pending = PendingStep(StepArguments(values, scale), list(self._sub_groups))

    def finish(self) -> None:
        """Complete the pending step, if there is one.

        Raises:
            StorageError: a transfer failed; the step stays pending.
        """
        step = self._pending
        if step is None:
            return
        if step.transfer is None:
            step.transfer = self._pipeline.start(step.due, step.arguments)
        try:
            step.transfer.result()
        finally:
            if step.transfer.settled():
                step.transfer = None
        self._pending = None
        self._gradients.clear()
        self._done()
