"""Steps: fixed at once, carried out behind the step.

[Note: what a step is] Norm, clipping and hyper-parameters are fixed before the first sub-group is touched, and the
gradients are sealed: later backwards collect new ones. From then on the step is taken, whatever fails meanwhile: every
sub-group is updated once, with these values, before anybody sees its weights.

[Note: what ranks agree on] The number of the step, the norm, and which parameters have a gradient on any of them, in
one message. Which gradients are not finite is found from the counts of each block, so that few blocks are looked at.

[Note: a step that is skipped] Where a gradient is not finite on any rank the step is decided to be none: nothing is
sealed, the gradients are forgotten, and the loss scale follows. The gradients of a scaled loss are divided by the scale
with the factor that clips; the division is exact, since a scale that moves is a power of two.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Callable, Coroutine, Iterable, Iterator
from enum import Enum
from typing import Any

import torch

from offload.errors import StateError, StorageError, tell, was_told
from offload.kernels.square_sums import PACKED_BYTES, SquareSum, nonfinite_of
from offload.sizes import BLOCK_NUMEL
from zero.exchange.exchange import Exchange
from zero.optim.gradients import Gradients, UnitGradient
from zero.optim.loss_scale import LossScaleError, LossScaler
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.pending_updates import DueUpdates
from zero.optim.pipeline import StepArguments, SubGroupPipeline
from zero.params.layout import Slot, SubGroup, Unit
from zero.store.storage import Storage

logger = logging.getLogger("zero")

HEAD = struct.Struct(f"<q?{PACKED_BYTES}s")  # Number of the step, was a backward broken off, sum of squares.
NAMES_MAX = 3  # More would not help: what comes later in backward is made of what came before.
NAMES_SHOWN = 8


def clip_coefficient(norm: float, norm_max: float) -> float:
    """Factor for every gradient so that the global norm is at most `norm_max`; 1.0 when clipping is off.

    Args:
        norm: 2-norm of all gradients.
        norm_max: `gradient_clipping`; 0 turns it off.

    Source: `torch.nn.utils.clip_grad_norm_`, the same 1e-6 included.
    """
    if norm_max <= 0:
        return 1.0
    coefficient = norm_max / (norm + 1e-6)
    # A NaN norm must reach the weights, as it does with torch, and not be hidden by min().
    return coefficient if coefficient < 1.0 or coefficient != coefficient else 1.0


def agree_on_step(
    exchange: Exchange, number: int, square_sum: SquareSum, contributed: set[int], *, torn: bool
) -> tuple[float, set[int]]:
    """The norm of all gradients, and the parameters that have one on any rank. All ranks come here.

    Raises StateError: the ranks are at different steps; TornBackward: a backward was broken off on one of them.

    Args:
        exchange: with the other ranks.
        number: of the step, counted from 1.
        square_sum: of this rank's slices.
        contributed: parameters (indices) that have a gradient on this rank.
        torn: a backward was broken off on this rank.
    """
    mask = bytes(index in contributed for index in range(max(contributed, default=-1) + 1))
    answers = exchange.agree(f"step {number}", HEAD.pack(number, torn, square_sum.pack()) + mask)
    heads = [HEAD.unpack_from(answer) for answer in answers]
    if any(head[0] != number for head in heads):
        steps = ", ".join(f"rank {rank}: {head[0]}" for rank, head in enumerate(heads))
        raise StateError(f"step: the ranks are at different steps ({steps}); every rank must call step() equally often")
    if any(head[1] for head in heads):
        ranks = ", ".join(str(rank) for rank, head in enumerate(heads) if head[1])
        raise TornBackward.behind(f" on rank {ranks}")
    # Slices of one shard group: replicas have the same ones.
    total = SquareSum.merged(SquareSum.unpack(heads[rank][2]) for rank in exchange.placement.shard_ranks)
    if exchange.is_stage:
        mine = SquareSum.merged([total, exchange.everyone.counted_elsewhere()])
        stages = exchange.everyone.over_stages(f"norm of step {number}", mine.pack())
        total = SquareSum.merged(map(SquareSum.unpack, stages))
    union = {index for answer in answers for index, has in enumerate(answer[HEAD.size :]) if has}
    return total.norm(), union


def agree_on_nonfinite(exchange: Exchange, gradients: Gradients, *, loss_is_finite: bool) -> tuple[list[str], bool]:
    """Names of the first parameters whose gradient is inf or NaN on any rank; and was every loss finite?

    All ranks come here. First is what backward has reached first.

    Raises StorageError: a gradient could not be read.

    Args:
        exchange: with the other ranks.
        gradients: at rest, before they are cleared.
        loss_is_finite: of this rank, as far as it knows.
    """
    mine: list[tuple[int, str]] = []
    for position, state, slot in _in_order(gradients):
        if _is_nonfinite(gradients, state, slot):
            mine.append((position, slot.name))
            if len(mine) == NAMES_MAX:
                break
    answers = exchange.agree("gradients that are not finite", json.dumps([mine, loss_is_finite]).encode())
    told = [json.loads(answer) for answer in answers]
    first: dict[str, int] = {}
    for position, name in sorted(pair for theirs, _ in told for pair in theirs):
        first.setdefault(name, position)
    return list(first)[:NAMES_MAX], all(finite for _, finite in told)


def _in_order(gradients: Gradients) -> Iterator[tuple[int, UnitGradient, Slot]]:
    """(rank in the order of arrival, unit, parameter) of what may be; what has come otherwise is last."""
    summed = (state for state in gradients.states() if state.summed)
    states = {state.unit.index: state for state in summed if nonfinite_of(state.sums).any()}
    known = list(gradients.order)
    rest = [(index, i) for index, state in reversed(states.items()) for i in range(len(state.unit.slots))]
    for position, (index, slot) in enumerate(dict.fromkeys([*known, *rest])):
        if index in states:
            yield position, states[index], states[index].unit.slots[slot]


def _is_nonfinite(gradients: Gradients, state: UnitGradient, slot: Slot) -> bool:
    """Does the part of a gradient that this rank keeps hold inf or NaN?"""
    unit = state.unit
    begin, end = (place - unit.begin for place in unit.within(slot))
    for block in range(begin // BLOCK_NUMEL, -(-end // BLOCK_NUMEL)):
        if not int(nonfinite_of(state.sums[block : block + 1])):
            continue
        first, last = block * BLOCK_NUMEL, min((block + 1) * BLOCK_NUMEL, unit.shard_numel)
        if begin <= first and last <= end:
            return True
        values = gradients.read_stored(state, unit.begin + first, unit.begin + last)  # shared with a neighbour
        part = values[max(begin - first, 0) : min(end, last) - first]
        if not bool(torch.isfinite(part).all()):
            return True
    return False


class TornBackward(StateError):
    """Gradients are missing, on this rank or on another."""

    @classmethod
    def behind(cls, where: str = "") -> TornBackward:
        """`where`: " on rank 0" or nothing."""
        return cls(
            f"step: the last backward was broken off{where}, by a transfer that failed or another error, so some "
            "gradients are missing; call zero_grad() and run forward and backward again"
        )


class UnusedParameters(StateError, AssertionError):
    """Trained parameters got no gradient on any rank, and the configuration says that this is a mistake.

    An AssertionError too, which is what DeepSpeed raises.
    """


class StepState(Enum):
    """How far the engine's step is."""

    NONE = "no step is asked for; what the last one has left to do is done when somebody looks"
    ASKED = "it will be taken, whatever fails meanwhile"
    DECIDED = "norm, clipping and hyper-parameters are fixed, or it is skipped; nobody has counted it"
    COUNTED = "counters, loss scale and schedule have it; its updates are about to begin"


# State -> those that may follow. An interrupt or an error leaves a step where it is: the next call goes on there.
STEP_MOVES = {
    StepState.NONE: {StepState.ASKED},
    StepState.ASKED: {StepState.DECIDED, StepState.NONE},
    StepState.DECIDED: {StepState.COUNTED},
    StepState.COUNTED: {StepState.NONE},
}


class Stepper:
    """Takes steps, one at a time; the one writer of `state`.

    Args:
        exchange: with the other ranks.
        scaler: of the loss.
        needs_all: a step without a gradient for every trained parameter is a mistake.
    """

    def __init__(
        self,
        storage: Storage,
        gradients: Gradients,
        pipeline: SubGroupPipeline,
        updates: DueUpdates,
        exchange: Exchange,
        scaler: LossScaler,
        *,
        needs_all: bool,
    ) -> None:
        self._layout, self._storage, self._gradients, self._exchange = storage.layout, storage, gradients, exchange
        self.pipeline, self.updates, self._scaler = pipeline, updates, scaler
        self._persistent = [unit.index for unit in storage.layout.units if unit.persistent]
        self._arguments = StepArguments({}, 1.0, 0)
        self._needs_all = needs_all
        self.state = StepState.NONE
        self.applied = False  # The step that was decided last changes weights; False: it is skipped.
        self.norm: float | None = None  # 2-norm of the last step's gradients, before clipping.
        gradients.reclaim = self._reclaim

    def ask(self) -> None:
        """A step is legal now, and will be taken."""
        self._move(StepState.ASKED)

    def count(self) -> None:
        """The decided step is in all counters."""
        self._move(StepState.COUNTED)

    def begun(self) -> None:
        """Its updates have begun, and go on behind it."""
        self._move(StepState.NONE)

    def _move(self, state: StepState) -> None:
        if state not in STEP_MOVES[self.state]:
            raise StateError(f"step: cannot go from {self.state.name} to {state.name}")
        self.state = state

    def fix(
        self,
        number: int,
        optimizer: ZeroOptimizer,
        index_of: dict[int, int],
        norm_max: float,
        *,
        loss_is_finite: Callable[[], bool],
        torn: bool,
    ) -> None:
        """Decide everything about the step that was asked for. No weight has changed when this returns or raises.

        Raises UnusedParameters: see `needs_all`; the step is none. Raises LossScaleError: the gradients are not finite,
        and the loss scale cannot be less; the step is none. Raises StorageError: a gradient could not be stored, or the
        step before cannot be completed; the next attempt goes on where this one stopped.

        Args:
            number: of the step, from 1.
            optimizer: whose hyper-parameters count, as they are now.
            index_of: id(parameter) -> parameter index.
            norm_max: clip to it; 0: do not.
            loss_is_finite: asked if a gradient is not.
            torn: a backward was broken off on this rank; then the step is none, on all ranks (TornBackward).
        """
        self.finish()  # updates of the last step read the gradients that it has sealed
        self._gradients.complete()
        mine = {
            slot.index
            for unit in self._layout.units
            if unit.trainable
            for slot, has in zip(unit.slots, self._gradients.contributed(unit.index), strict=True)
            if has
        }
        square_sum = self._gradients.square_sum()
        try:
            scaled_norm, contributed = agree_on_step(self._exchange, number, square_sum, mine, torn=torn)
        except TornBackward:
            self._move(StepState.NONE)
            raise
        if self._needs_all:
            self._refuse_unused(contributed, optimizer, index_of)
        if self._scaler.refuses(scaled_norm):
            self._skip(number, loss_is_finite())
            return
        self.norm = scaled_norm / self._scaler.cur_scale
        scale = clip_coefficient(self.norm, norm_max) / self._scaler.cur_scale
        values = optimizer.values(index_of, contributed)
        small = optimizer.small_states(index_of, values)
        arguments = StepArguments(values, scale, number, self._storage.streams.fence(), small)
        due = [group for group in self._storage.plan.sub_groups if self.pipeline.trained_units(group, arguments)]
        # No waiting and no searching from here on: half of this is no step.
        optimizer.count_step(index_of, arguments.values)
        self._gradients.seal()
        self.updates.begin_step(arguments, due)
        self._arguments, self.applied = arguments, True
        self._move(StepState.DECIDED)
        self._scaler.update(overflow=False)

    def _skip(self, number: int, loss_is_finite: bool) -> None:
        """Decide that the step is none, on all ranks."""
        scaler = self._scaler
        names, finite = agree_on_nonfinite(self._exchange, self._gradients, loss_is_finite=loss_is_finite)
        found = f"{'the loss and ' * (not finite)}the gradients of {', '.join(names)} (first in backward)"
        if scaler.at_minimum:
            self._gradients.clear()
            self._move(StepState.NONE)
            raise LossScaleError(
                f"step {number}: {found} are inf or NaN with a loss scale of {scaler.cur_scale:.10g}. Current loss "
                "scale already at minimum - cannot decrease scale anymore (fp16.min_loss_scale). No step is taken: "
                "weights, states and counters are as before it, and engine.save_checkpoint() saves them. Weights that "
                'were trained in bf16 often exceed what fp16 can hold: use "bf16": {"enabled": true} then'
            )
        before = scaler.cur_scale
        self.applied, self.norm = False, math.inf
        self._move(StepState.DECIDED)
        scaler.update(overflow=True)
        self._gradients.clear()
        if self._exchange.placement.rank == 0:
            logger.warning("step %d is skipped: %s are inf or NaN%s", number, found, _told(scaler, before))

    def _refuse_unused(self, contributed: set[int], optimizer: ZeroOptimizer, index_of: dict[int, int]) -> None:
        """Of parameters that require a gradient now: one that is frozen since stays in its unit."""
        with torch._C.DisableTorchFunctionSubclass():
            held = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
            wanted = {index_of[id(p)] for p in held if id(p) in index_of} - contributed
        slots = (slot for unit in self._layout.units if unit.trainable for slot in unit.slots)
        unused = [slot.name for slot in slots if slot.index in wanted]
        if unused:
            self._move(StepState.NONE)
            more = f" and {len(unused) - NAMES_SHOWN} more" if len(unused) > NAMES_SHOWN else ""
            raise UnusedParameters(
                f"step: no gradient for {', '.join(unused[:NAMES_SHOWN])}{more}; use them in every step, call "
                "requires_grad_(False) on them, or set zero_optimization.ignore_unused_parameters to true"
            )

    def start(self) -> None:
        """The step is counted: begin with what cannot wait for a fetch, which needs no disk or is always bound.

        Raises StorageError: as `finish`; the next call begins again.
        """
        if not self.applied:
            return
        due = self.updates.groups_of(None)
        self._finish_groups([group for group in due if self.pipeline.at_once(group, self._arguments)])
        bound = self.updates.groups_of(self._persistent)
        if bound:
            self._storage.mover.post("updating what is always bound", self.updates.bring(bound))

    def check(self) -> None:
        """Raise an error of an update that nobody has seen yet; else write what could not be written.

        Raises StorageError: names the step. Nothing is lost; the next call tries again.
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

        Raises StorageError: names the step; the next call goes on.
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


def _told(scaler: LossScaler, before: float) -> str:
    """What has become of the scale, for the log."""
    if not scaler.dynamic:
        return "" if before == 1.0 else f"; the loss scale is {before:.10g} and static"
    if scaler.cur_scale == before:
        return f"; the loss scale stays {before:.10g}, overflows until it is halved: {scaler.cur_hysteresis}"
    return f"; loss scale {before:.10g} -> {scaler.cur_scale:.10g}"
