"""Steps: `step()` decides them, and their updates run later.

[Note: what a step is] Norm, clipping and hyper-parameters are fixed before the first sub-group is touched, and the
gradients are sealed: later backwards collect new ones. From then on the step counts as taken, even if something fails:
every sub-group is updated once, with these values, before its weights are used.

[Note: what ranks agree on] In one message: the number of the step, the norm, and the parameters that have a gradient on
any rank. Each rank updates its part of a weight by its own options, so a checksum shows whether they are equal.
Gradients that are not finite are found from the counts of each block, so only few blocks are read.

[Note: a step that is skipped] If a gradient is not finite on any rank, all ranks skip the step: nothing is sealed, the
gradients are dropped, and the loss scale is adapted. The factor that clips also divides the gradients of a scaled loss
by the scale; the division is exact, because a dynamic scale is a power of two. It also contains the factor by which
user code has multiplied all gradients, as `torch.nn.utils.clip_grad_norm_` does.
"""

from __future__ import annotations

import json
import logging
import math
import struct
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from itertools import zip_longest
from typing import Any

import torch

from offload.errors import ConfigError, StateError, StorageError, is_reported, mark_reported
from offload.kernels.square_sums import PACKED_BYTES, SquareSum, nonfinite_of
from offload.sizes import BLOCK_NUMEL
from zero.optim.gradients import Gradients, UnitGradient
from zero.optim.loss_scale import LossScaleError, LossScaler
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.pending_updates import PendingUpdates
from zero.optim.sub_group_pipeline import StepArguments, SubGroupPipeline
from zero.params.layout import Slot, SubGroup, Unit
from zero.store.all_ranks import DeferringFailures
from zero.store.collectives import Collectives
from zero.store.storage import Storage

logger = logging.getLogger("zero")

HEAD = struct.Struct(f"<qBI{PACKED_BYTES}s")
"""Number of the step, what is wrong with its gradients, checksum of the settings, sum of squares."""
UNSTORED, INTERRUPTED = 1, 2  # What is wrong: a write has failed, and nothing is lost; a backward was aborted.
COMPARED_OPTIONS = ("lr", "betas", "momentum", "weight_decay", "eps")
"""Options by which each rank updates its part of a weight; a class may change other options freely."""
NAMES_MAX = 3  # More names would not help: gradients that come later in backward are computed from earlier ones.
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
    collectives: Collectives,
    number: int,
    square_sum: SquareSum,
    contributed: set[int],
    *,
    backward_interrupted: bool,
    failure: StorageError | None,
    settings: list[dict[str, Any]],
) -> tuple[float, set[int]]:
    """The norm of all gradients, and the parameters that have a gradient on any rank. Collective.

    Raises StateError: the ranks are at different steps; InterruptedBackward: a backward was aborted on one of them;
    StorageError: a write has failed on one of them; ConfigError: their settings differ.

    Args:
        collectives: with the other ranks.
        number: of the step, counted from 1.
        square_sum: of this rank's shards.
        contributed: indices of parameters that have a gradient on this rank.
        backward_interrupted: a backward was aborted on this rank.
        failure: a transfer of this rank that has failed since the last step.
        settings: of the step, and of each param group.
    """
    mask = bytes(index in contributed for index in range(max(contributed, default=-1) + 1))
    settings_json = json.dumps(settings).encode()
    problem = INTERRUPTED if backward_interrupted else UNSTORED if failure is not None else 0
    head = HEAD.pack(number, problem, zlib.crc32(settings_json), square_sum.pack())
    answers = collectives.all_gather_bytes(f"step {number}", head + mask)
    heads = [HEAD.unpack_from(answer) for answer in answers]
    if any(head[0] != number for head in heads):
        steps = ", ".join(f"rank {rank}: {head[0]}" for rank, head in enumerate(heads))
        raise StateError(f"step: the ranks are at different steps ({steps}); every rank must call step() equally often")
    if any(head[1] == INTERRUPTED for head in heads):
        ranks = ", ".join(str(rank) for rank, head in enumerate(heads) if head[1] == INTERRUPTED)
        raise InterruptedBackward.on_ranks(f" on rank {ranks}") from failure
    if any(head[1] == UNSTORED for head in heads):
        DeferringFailures(collectives).all_gather_results(f"step {number}, which can be tried again,", failure=failure)
    if len({head[2] for head in heads}) > 1:
        answers = collectives.all_gather_bytes(f"settings of step {number}", settings_json)
        raise _difference_error([json.loads(answer) for answer in answers])
    # Only the shards of one shard group: replicas have the same ones.
    total = SquareSum.merge(SquareSum.unpack(heads[rank][3]) for rank in collectives.placement.shard_ranks)
    if collectives.is_pipeline_stage:
        stage_sum = SquareSum.merge([total, collectives.world.duplicate_square_sum()])
        stage_sums = collectives.world.gather_over_stages(f"norm of step {number}", stage_sum.pack())
        total = SquareSum.merge(map(SquareSum.unpack, stage_sums))
    union = {index for answer in answers for index, has in enumerate(answer[HEAD.size :]) if has}
    return total.norm(), union


def options_to_compare(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    """The options of each param group that must be equal on all ranks, as numbers."""

    def number(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return list(map(number, value))
        with suppress(TypeError, ValueError):  # None, as in Adafactor's `eps`, and what the rule will refuse
            return float(f"{float(value):.6g}")  # the C libraries of two nodes round a schedule's cosine differently
        return None

    return [
        {name: number(group[name]) for name in COMPARED_OPTIONS if name in group} for group in optimizer.param_groups
    ]


def _difference_error(settings_of_ranks: list[list[dict[str, Any]]]) -> ConfigError:
    """Names the first setting of any rank, in rank order, that is not the first rank's."""
    pairs = (
        (rank, index, *pair)
        for rank, settings in enumerate(settings_of_ranks)
        for index, pair in enumerate(zip_longest(settings_of_ranks[0], settings))
    )
    for rank, index, first, other in pairs:
        for name in {**(first or {}), **(other or {})}:
            values = [f"{name} {settings.get(name)}" if settings else "no such group" for settings in (first, other)]
            if values[0] != values[1]:
                where = f"in param group {index - 1}" if index else "in the configuration"
                return ConfigError(
                    f"step: expected the same options on all ranks, got {where}: {values[0]} on rank 0, {values[1]} on "
                    f"rank {rank}. Each rank updates a part of every weight; make them equal, for example "
                    "average the scheduler's metric over the ranks"
                )
    return ConfigError("step: expected the same options on all ranks, got different ones")


def agree_on_nonfinite(
    collectives: Collectives, gradients: Gradients, *, loss_is_finite: bool
) -> tuple[list[str], bool]:
    """(names of the first parameters whose gradient is inf or NaN on any rank, whether every loss was finite).

    Collective. The names are in the order in which backward reached the parameters.

    Raises StorageError: a gradient could not be read.

    Args:
        collectives: with the other ranks.
        gradients: stored, and not cleared yet.
        loss_is_finite: for this rank's loss, as far as it knows.
    """
    names: list[tuple[int, str]] = []
    for position, state, slot in _in_arrival_order(gradients):
        if _is_nonfinite(gradients, state, slot):
            names.append((position, slot.name))
            if len(names) == NAMES_MAX:
                break
    message = json.dumps([names, loss_is_finite]).encode()
    answers = [json.loads(a) for a in collectives.all_gather_bytes("gradients that are not finite", message)]
    first: dict[str, int] = {}
    for position, name in sorted(pair for rank_names, _ in answers for pair in rank_names):
        first.setdefault(name, position)
    return list(first)[:NAMES_MAX], all(finite for _, finite in answers)


def _in_arrival_order(gradients: Gradients) -> Iterator[tuple[int, UnitGradient, Slot]]:
    """(position in order of arrival, unit, parameter) of gradients that may be not finite; unknown ones are last."""
    stored = (state for state in gradients.states() if state.is_stored)
    states = {state.unit.index: state for state in stored if nonfinite_of(state.sums).any()}
    known = list(gradients.arrival_order)
    every = [(index, i) for index, state in reversed(states.items()) for i in range(len(state.unit.slots))]
    for position, (index, slot) in enumerate(dict.fromkeys([*known, *every])):
        if index in states:
            yield position, states[index], states[index].unit.slots[slot]


def _is_nonfinite(gradients: Gradients, state: UnitGradient, slot: Slot) -> bool:
    """True if this rank's part of a gradient contains inf or NaN."""
    unit = state.unit
    begin, end = (place - unit.begin for place in unit.shard_range(slot))
    for block in range(begin // BLOCK_NUMEL, -(-end // BLOCK_NUMEL)):
        if not int(nonfinite_of(state.sums[block : block + 1])):
            continue
        first, last = block * BLOCK_NUMEL, min((block + 1) * BLOCK_NUMEL, unit.shard_numel)
        if begin <= first and last <= end:
            return True
        values = gradients.read_stored(state, unit.begin + first, unit.begin + last)  # a neighbour is in the block too
        part = values[max(begin - first, 0) : min(end, last) - first]
        if not bool(torch.isfinite(part).all()):
            return True
    return False


class InterruptedBackward(StateError):
    """Gradients are missing, on this rank or on another."""

    @classmethod
    def on_ranks(cls, where: str = "") -> InterruptedBackward:
        """`where`: " on rank 0" or nothing."""
        return cls(
            f"step: the last backward was interrupted{where} by a failed transfer or another error, so some gradients "
            "are missing; call zero_grad() and run forward and backward again"
        )


class UnusedParameters(StateError, AssertionError):
    """Trained parameters got no gradient on any rank, and the configuration does not allow this.

    Also an AssertionError, because DeepSpeed raises one.
    """


class StepState(Enum):
    """The progress of the engine's step."""

    NONE = "no step is requested; remaining updates of the last one run when their weights are needed"
    REQUESTED = "it will be taken, unless `Stepper.decide` refuses it: then it is NONE again"
    DECIDED = "norm, clipping and hyper-parameters are fixed, or it is skipped; the engine has not counted it"
    COUNTED = "the engine counts it: counters and schedule follow at once, then its updates begin"


# State -> states that may follow. After an interrupt or a failed transfer the step keeps its state, and the next call
# continues.
STEP_MOVES = {
    StepState.NONE: {StepState.REQUESTED},
    StepState.REQUESTED: {StepState.DECIDED, StepState.NONE},
    StepState.DECIDED: {StepState.COUNTED},
    StepState.COUNTED: {StepState.NONE},
}


class Stepper:
    """Takes steps, one at a time; the only writer of `state`.

    Args:
        collectives: with the other ranks.
        scaler: of the loss.
        needs_all: every trained parameter must have a gradient in a step.
    """

    def __init__(
        self,
        storage: Storage,
        gradients: Gradients,
        pipeline: SubGroupPipeline,
        updates: PendingUpdates,
        collectives: Collectives,
        scaler: LossScaler,
        *,
        needs_all: bool,
    ) -> None:
        self._layout = storage.layout
        self._storage = storage
        self._gradients = gradients
        self._collectives = collectives
        self.pipeline = pipeline
        self.updates = updates
        self._scaler = scaler
        self._persistent = [unit.index for unit in storage.layout.units if unit.persistent]
        self._arguments = StepArguments({}, 1.0, 0)
        self._needs_all = needs_all
        self.state = StepState.NONE
        self.changes_weights = False  # The last decided step changes weights; False: it is skipped.
        self.norm: float | None = None  # 2-norm of the last step's gradients, before clipping.
        gradients.updates = self

    def request(self) -> None:
        """A step is legal now, and will be taken unless `decide` refuses it."""
        self._set_state(StepState.REQUESTED)

    def on_counted(self) -> None:
        """The decided step is being counted: the counters of the engine follow."""
        self._set_state(StepState.COUNTED)

    def on_updates_begun(self) -> None:
        """The step's updates have begun or are due, and continue after it."""
        self._set_state(StepState.NONE)

    def _set_state(self, state: StepState) -> None:
        if state not in STEP_MOVES[self.state]:
            raise StateError(f"step: cannot go from {self.state.name} to {state.name}")
        self.state = state

    def decide(
        self,
        number: int,
        optimizer: ZeroOptimizer,
        index_of: dict[int, int],
        norm_max: float,
        *,
        loss_is_finite: Callable[[], bool],
        backward_interrupted: bool,
    ) -> None:
        """Decide everything about the requested step. No weight has changed when this returns or raises.

        Raises UnusedParameters: see `needs_all`; no step is taken. Raises LossScaleError: the gradients are not finite,
        and the loss scale is at its minimum; no step is taken. Raises StorageError: a gradient or a result of the
        previous step could not be stored, on this or another rank, or the previous step cannot be completed; the next
        attempt continues where this one stopped.

        Args:
            number: of the step, from 1.
            optimizer: its present hyper-parameters are used.
            index_of: id(parameter) -> parameter index.
            norm_max: clip to this norm; 0: do not clip.
            loss_is_finite: called if a gradient is not finite.
            backward_interrupted: a backward was aborted on this rank; then no rank takes the step
                (InterruptedBackward).
        """
        self.finish_updates()  # updates of the last step read the gradients that it has sealed
        self._gradients.finish_for_step()
        backward_interrupted = backward_interrupted or self._gradients.has_lost
        square_sum, factor = self._gradients.square_sum(), self._gradients.common_factor()
        if factor is None:
            raise StateError("step: gradients have different factors that were not applied before it")
        settings = [{"gradient_clipping": norm_max, "factor of p.grad": factor}, *options_to_compare(optimizer)]
        failure = self._take_failure(number)
        try:
            scaled_norm, contributed = agree_on_step(
                self._collectives,
                number,
                square_sum,
                self._parameters_with_gradient(),
                backward_interrupted=backward_interrupted,
                failure=failure,
                settings=settings,
            )
        except (InterruptedBackward, ConfigError):
            self._set_state(StepState.NONE)
            raise
        scaled_norm *= abs(factor)
        if self._needs_all:
            self._check_unused(contributed, optimizer, index_of)
        if self._scaler.must_skip(scaled_norm):
            self._skip(number, loss_is_finite())
            return
        self.norm = scaled_norm / self._scaler.cur_scale
        scale = clip_coefficient(self.norm, norm_max) * factor / self._scaler.cur_scale
        values, small = self._fix_values(optimizer, index_of, contributed)
        arguments = StepArguments(values, scale, number, self._storage.streams.record_event(), small)
        due = [group for group in self._storage.plan.sub_groups if self.pipeline.trained_units(group, arguments)]
        # From here on no waits and no searches: the step must be decided completely or not at all.
        optimizer.count_step(index_of, arguments.values)
        self._gradients.hand_to_step()
        self.updates.begin_step(arguments, due)
        self._arguments, self.changes_weights = arguments, True
        self._set_state(StepState.DECIDED)
        self._scaler.update_scale(overflow=False)

    def _take_failure(self, number: int) -> StorageError | None:
        """The failure on this rank since the last step, which is reported only once. None with a single rank."""
        of_gradients, of_updates = self._gradients.failure, self.updates.unreported
        self._gradients.failure = self.updates.unreported = None
        return of_updates if of_gradients is None else of_gradients.within(f"gradients of step {number}")

    def _parameters_with_gradient(self) -> set[int]:
        """Indices of the parameters that have a gradient on this rank."""
        trained = (unit for unit in self._layout.units if unit.trainable)
        pairs = (zip(unit.slots, self._gradients.slots_with_gradient(unit.index), strict=True) for unit in trained)
        return {slot.index for unit_pairs in pairs for slot, has in unit_pairs if has}

    def _fix_values(self, optimizer: ZeroOptimizer, index_of: dict[int, int], contributed: set[int]) -> Any:
        """The values of the groups, and the small states. If the groups' options do not allow any, no step is taken;
        the gradients stay for another attempt.
        """
        try:
            values = optimizer.step_values(index_of, contributed)
            return values, optimizer.small_states(index_of, values)
        except Exception:
            self._set_state(StepState.NONE)
            raise

    def _skip(self, number: int, loss_is_finite: bool) -> None:
        """Decide that all ranks skip the step."""
        scaler = self._scaler
        names, finite = agree_on_nonfinite(self._collectives, self._gradients, loss_is_finite=loss_is_finite)
        description = f"{'the loss and ' * (not finite)}the gradients of {', '.join(names)} (first in backward)"
        if scaler.is_at_minimum:
            self._gradients.clear()
            self._set_state(StepState.NONE)
            raise LossScaleError(
                f"step {number}: {description} are inf or NaN with a loss scale of {scaler.cur_scale:.10g}. Current "
                "loss scale already at minimum - cannot decrease scale anymore (fp16.min_loss_scale). No step is taken"
                ": weights, states and counters are as before it, and engine.save_checkpoint() saves them. Weights "
                f'that were trained in bf16 often exceed the range of fp16: use "bf16": {{"enabled": true}} for '
                "them"
            )
        old_scale = scaler.cur_scale
        self.changes_weights, self.norm = False, math.inf
        self._set_state(StepState.DECIDED)
        scaler.update_scale(overflow=True)
        self._gradients.clear()
        if self._collectives.placement.rank == 0:
            logger.warning(
                "step %d is skipped: %s are inf or NaN%s",
                number,
                description,
                _describe_scale_change(scaler, old_scale),
            )

    def _check_unused(self, contributed: set[int], optimizer: ZeroOptimizer, index_of: dict[int, int]) -> None:
        """Check parameters that require a gradient now: a parameter that was frozen later is still in its unit."""
        with torch._C.DisableTorchFunctionSubclass():
            trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
            lacking = {index_of[id(p)] for p in trained if id(p) in index_of} - contributed
        slots = (slot for unit in self._layout.units if unit.trainable for slot in unit.slots)
        unused = [slot.name for slot in slots if slot.index in lacking]
        if unused:
            self._set_state(StepState.NONE)
            more = f" and {len(unused) - NAMES_SHOWN} more" if len(unused) > NAMES_SHOWN else ""
            raise UnusedParameters(
                f"step: no gradient for {', '.join(unused[:NAMES_SHOWN])}{more}; use them in every step, call "
                "requires_grad_(False) on them, or set zero_optimization.ignore_unused_parameters to true"
            )

    def start_updates(self) -> None:
        """The step is counted: begin updates that must not wait for a fetch: without the disk, or of persistent units.

        Raises StorageError: as `finish_updates`; the next call begins again.
        """
        if not self.changes_weights:
            return
        due = self.updates.groups_of(None)
        self._finish_groups([group for group in due if self.pipeline.can_update_now(group, self._arguments)])
        persistent = self.updates.groups_of(self._persistent)
        if persistent:
            self._storage.io_loop.submit("updating persistent units", self.updates.update_groups(persistent))

    def check_updates(self) -> None:
        """Raise the error of an update if it was not reported yet; otherwise repeat the writes that failed.

        With several ranks the next step reports it. Raises StorageError: names the step. Nothing is lost; the next call
        tries again.
        """
        failure = self.updates.failure
        if failure is None:
            return
        if self.updates.is_single_rank and not is_reported(failure):
            mark_reported(failure)
            raise failure
        self._storage.io_loop.run("storing the results of a step", self.updates.retry_writes())

    def finish_updates(self, units: Iterable[int] | None = None) -> None:
        """Complete the step for these units (None: all): update and store them.

        Raises StorageError: names the step; the next call continues.
        """
        # In this order: a failing update sets `failure` before `is_idle` becomes true.
        if self.updates.is_idle and self.updates.failure is None:
            return
        self.check_updates()
        self._finish_groups(self.updates.groups_of(units))

    def update_unit(self, index: int) -> None:
        """Update the unit: then its gradient is not needed any more, and its weights are the step's."""
        if not self.updates.is_current(index):
            unit = self._layout.units[index]
            self._run_job(f"updating unit {unit.name}", self.updates.update_unit(unit))

    def reclaim_memory(self, unit: Unit) -> None:
        """Wait until updates return the memory of the unit's gradient."""
        spare = self.pipeline.spare_memory
        if spare.is_offered(unit.index):
            self._storage.io_loop.run(f"storing results out of the way of {unit.name}", spare.withdraw(unit))

    def stop_updates(self) -> None:
        """The engine closes: updates that have not begun are dropped, because nobody can see their results."""
        self.updates.is_stopped = True

    def update_persistent_units(self) -> None:
        for index in self._persistent:
            self.update_unit(index)

    def _finish_groups(self, groups: list[SubGroup]) -> None:
        if groups:
            self._run_job("optimizer step", self.updates.finish_groups(groups))

    def _run_job(self, what: str, job: Coroutine[Any, Any, None]) -> None:
        try:
            self._storage.io_loop.run(what, job)
        except StorageError as error:
            mark_reported(error)
            raise


def _describe_scale_change(scaler: LossScaler, old_scale: float) -> str:
    """The change of the scale, for the log."""
    if not scaler.dynamic:
        return "" if old_scale == 1.0 else f"; the loss scale is {old_scale:.10g} and static"
    if scaler.cur_scale == old_scale:
        return f"; the loss scale stays {old_scale:.10g}, overflows until it is halved: {scaler.cur_hysteresis}"
    return f"; loss scale {old_scale:.10g} -> {scaler.cur_scale:.10g}"
