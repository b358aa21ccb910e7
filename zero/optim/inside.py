"""Updates inside backward: into the other slot of each record, valid only if `step()` says so.

[Note: commit] A unit whose gradient is complete is updated at once, as if the step were not going to
clip: the result goes to the other slot of its sub-groups, and the state stays as it is. `step()`
exchanges the slots of a sub-group only if nothing has changed since (no further gradient, no edit, no
`zero_grad`, no new hyper-parameter) and the gradients are not clipped. What is void, failed or not done
in time is updated behind the step like everything else, so results do not depend on any of this.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from offload.errors import StorageError
from offload.mover import Transfer
from zero.optim.gradients import Gradients
from zero.optim.pending_updates import DueUpdates
from zero.optim.pipeline import StepArguments, SubGroupPipeline
from zero.params.layout import SubGroup, Unit
from zero.store.storage import Storage

logger = logging.getLogger("zero")

STEPS_WATCHED = 20
VOID_SHARE_MAX = 0.1
"""Above this share of void steps the work is wasted too often."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One unit's updates ahead of the step."""

    arguments: StepArguments
    groups: list[SubGroup]
    done: set[SubGroup] = field(default_factory=set)
    """Sub-groups whose other slot holds the result."""
    over: bool = False
    """No further sub-group is started: void, or the step has come."""
    transfer: Transfer[None] | None = None


class UpdatesInBackward:
    """The attempts since the last step.

    Args:
        arguments_now: what a step would use now that does not clip, for every parameter.
        boundary: will the next `step()` update the parameters?
    """

    def __init__(
        self,
        storage: Storage,
        pipeline: SubGroupPipeline,
        updates: DueUpdates,
        gradients: Gradients,
        arguments_now: Callable[[], StepArguments],
        boundary: Callable[[], bool],
    ) -> None:
        self._storage, self._pipeline, self._updates, self._gradients = storage, pipeline, updates, gradients
        self._arguments_now, self._boundary = arguments_now, boundary
        self._expected = StepArguments({}, 1.0, 0)
        self._attempts: dict[int, Attempt] = {}
        self._ended: dict[int, Attempt] = {}
        """Void ones; something of them may still move."""
        self._void: deque[bool] = deque(maxlen=STEPS_WATCHED)
        self.enabled = True
        self.committed_numel = 0
        """Elements whose update a step has found done."""

    def complete(self, unit: Unit) -> None:
        """All gradients of the unit that this backward was seen to make are in its plane, or on their way."""
        if not self.enabled or not self._boundary() or unit.index in self._attempts:
            return
        groups = [g for g in self._updates.sub_groups_of(unit.index) if self._storage.has_two_slots(g)]
        contributed = self._gradients.contributed_at_rest(unit.index)
        if not groups or not contributed:
            return
        self._settle([self._ended.pop(unit.index)] if unit.index in self._ended else [])
        if not self._attempts:
            self._expected = self._arguments_now()
        values = {index: self._expected.values[index] for index in contributed}
        attempt = Attempt(replace(self._expected, values=values), groups)
        self._attempts[unit.index] = attempt
        attempt.transfer = self._storage.mover.post(f"updating {unit.name} in backward", self._run(unit, attempt))

    def void(self, index: int) -> None:
        """Something of the unit has changed: what was done ahead is worth nothing."""
        attempt = self._attempts.pop(index, None)
        if attempt is not None:
            attempt.over = True
            self._ended[index] = attempt

    def void_all(self) -> None:
        """As `void`, for every unit."""
        for index in list(self._attempts):
            self.void(index)

    def commit(self, arguments: StepArguments) -> set[SubGroup]:
        """Make valid what was done with the values of the step; returns those sub-groups.

        Returns once nothing of any attempt moves any more.
        """
        attempts, self._attempts = self._attempts, {}
        for attempt in attempts.values():
            attempt.over = True
        self._settle([*attempts.values(), *self._ended.values()])
        self._ended = {}
        committed: set[SubGroup] = set()
        for attempt in attempts.values():
            expected = attempt.arguments
            as_expected = all(arguments.values.get(index) == values for index, values in expected.values.items())
            if as_expected and (arguments.grad_scale, arguments.number) == (expected.grad_scale, expected.number):
                committed |= attempt.done
        for group in committed:
            self._storage.exchange_slots(group)
            self.committed_numel += group.end - group.begin
        self._judge(bool(attempts), bool(committed) or not any(attempt.done for attempt in attempts.values()))
        return committed

    def _settle(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            if attempt.transfer is not None:
                attempt.transfer.settle()

    def _judge(self, tried: bool, useful: bool) -> None:
        if tried:
            self._void.append(not useful)
        if len(self._void) == STEPS_WATCHED and sum(self._void) > VOID_SHARE_MAX * STEPS_WATCHED:
            self.enabled = False
            logger.warning(
                "offload_optimizer.update_in_backward: %d of the last %d steps clipped or changed what was done ahead; "
                "it is off from now on. A higher gradient_clipping, or fewer changes between backward and step, help",
                sum(self._void),
                STEPS_WATCHED,
            )

    async def _run(self, unit: Unit, attempt: Attempt) -> None:
        await self._updates.settle_unit(unit)  # the last step's result may still be on its way
        await self._gradients.arrived(unit.index)

        async def update(group: SubGroup) -> None:
            async with self._pipeline.places.slots:
                if attempt.over:
                    return
                try:
                    await self._pipeline.update_aside(group, attempt.arguments, self._updates.threads_beside)
                except StorageError as error:
                    logger.debug("%s is updated behind the step: %s", unit.name, error)
                    return
                attempt.done.add(group)

        await asyncio.gather(*(update(group) for group in attempt.groups))
