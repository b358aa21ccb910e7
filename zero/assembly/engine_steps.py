"""The engine's steps: asked for, decided, counted, and begun; and how every other call completes the last step first.

[Note: behind the step] `step()` returns once the step is decided and counted; the updates continue after it returns. So
other calls of the engine begin with `make_ready` or `complete_updates`: these complete a step that an error has
interrupted, and the second one also waits for the updates of the values that the call is going to use.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import StateError, StorageError
from offload.system.interrupts import atomic
from offload.timeline import Stopwatch
from zero.assembly.accumulation import Accumulation
from zero.assembly.averages_guard import AveragesGuard
from zero.assembly.device_memory import NEEDED_BY_BACKWARD, NEEDED_BY_FORWARD, DeviceMemory, OffloadStateTypeEnum
from zero.assembly.engine_parts import EngineParts
from zero.assembly.loss_scaling import LossScaling
from zero.assembly.run import Run
from zero.assembly.step_snapshots import StepSnapshots
from zero.optim.gradients import Gradients
from zero.optim.loss_scale import LossScaleError
from zero.optim.lr_scheduler import step_scheduler
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.stepper import InterruptedBackward, StepState, UnusedParameters
from zero.params.managed_parameter import set_torch_gradient, torch_gradient
from zero.params.released_parameter import IS_EXPOSED, name_of
from zero.values.engine_store import EngineOwner
from zero.values.parameter_values import ParameterValues
from zero.values.unit_editor import EDIT

DISCARDS = (
    "zero_grad() discards the gradients of micro-batches whose step is not complete, and that step will take the later "
    "ones only; call it after step(), or leave it out (DeepSpeed's does nothing here at stages 2 and 3)"
)


class StepCheckpoints(Protocol):
    """Checkpoints of one engine, as its steps know them: one may be written while training continues."""

    def check_call(self, what: str) -> None:
        """The call `what` begins: raise if it is not allowed now."""

    def on_engine_call(self) -> None:
        """The engine is called: raise an error that was not raised yet."""

    def on_persistent_unbind(self) -> None:
        """The persistent units are about to be released."""

    def on_step_begin(self) -> None:
        """A step is about to be decided, and the persistent units are about to be released."""

    def on_weights_change(self, index: int) -> None:
        """A unit's weights are about to change by other means than a step."""

    def on_forward_modify(self, index: int) -> None:
        """A forward has changed a unit's weights in place; `on_weights_change` follows."""

    def on_edit_begin(self) -> None:
        """Tiered arrays are about to be moved, or edited in place."""

    def on_rewrite_begin(self) -> None:
        """All tiered arrays are about to be rewritten, or replaced."""


class AttentionClip(Protocol):
    """Scales attention weights down after a step. It reads and changes them through the steps that it is passed."""

    def on_engine_call(self, steps: EngineSteps) -> None:
        """The engine is called: complete what an error has interrupted."""

    def on_step_request(self) -> None:
        """A step is asked for: raise if it is not allowed now."""

    def on_gradients_discarded(self, *, forwards: bool) -> None:
        """The gradients since the last step are discarded; `forwards`: the forwards of the whole batch are, too."""

    def on_eager_updates_done(self, steps: EngineSteps) -> None:
        """The updates that need no disk and no other device are done; those of persistent units are only submitted."""


class EngineSteps:
    """The steps of one engine.

    Args:
        owner: the engine.
        accumulation: counts the micro-batches.
        device_memory: the states that `offload_states` has put away.
        checkpoints: those in progress.
        attention_clip: None: the weights of attention are not clipped.

    Attributes:
        decided_steps: steps decided and counted by this engine; a checkpoint that is loaded does not change it.
        decided_samples: samples of these steps, on all ranks.
        discards: how often the gradients of a step were discarded.
    """

    def __init__(
        self,
        run: Run,
        owner: EngineOwner,
        accumulation: Accumulation,
        scaling: LossScaling,
        device_memory: DeviceMemory,
        checkpoints: StepCheckpoints,
        attention_clip: AttentionClip | None,
    ) -> None:
        self._run = run
        self.owner = owner
        self._accumulation = accumulation
        self._scaling = scaling
        self._device_memory = device_memory
        self._checkpoints = checkpoints
        self.snapshots = StepSnapshots(run)
        self.averages_guard = AveragesGuard()
        self._attention_clip = attention_clip
        self._schedule_arguments: Mapping[str, Any] = {}  # Of the last step asked for; passed to the scheduler.
        self._was_applied = False
        self._backwards = 0  # Since the last step.
        self.decided_steps = self.decided_samples = self.discards = 0
        self.stopwatch = Stopwatch()  # Time of the steps.

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        run = self._run
        self.check_open("step")
        self._was_applied = False
        if run.parts.stepper.state == StepState.NONE:
            if not self._accumulation.is_gradient_accumulation_boundary():
                self._complete_pending()  # complete an earlier step; if that raises, this call is not counted
                run.micro_steps += 1
                return
            self._request_step(lr_kwargs)
            run.micro_steps += 1
        self._complete_pending()

    def step_now(self) -> None:
        """`optimizer.step()`: take a step now, independently of the micro-step counter."""
        self.check_open("optimizer.step")
        if self._run.parts.stepper.state == StepState.NONE:
            self._request_step()
        self._complete_pending()

    def was_step_applied(self) -> bool:
        """See `ZeroEngine.was_step_applied`."""
        return self._was_applied

    @atomic
    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `ZeroEngine.zero_grad`."""
        torn = not self._run.closed and self._run.parts.backward_watch.is_torn
        if torn and self._accumulation.micro_step_index:
            warnings.warn(
                "zero_grad() discards the gradients of the micro-batches before the backward that was interrupted too: "
                "run forward and backward of all of them again before step()",
                stacklevel=4,
            )
        elif not self._run.closed and not torn and self._accumulation.collected_micro_batches:
            warnings.warn(DISCARDS, stacklevel=4)
        self._discard_gradients(forwards=False)

    @atomic
    def discard_gradients(self) -> None:
        """As `zero_grad`, for callers that replace them."""
        self._discard_gradients(forwards=False)

    @atomic
    def discard_batch(self) -> None:
        """As `zero_grad`, and the forwards of the batch do not count either: none of them waits for its backward."""
        self._discard_gradients(forwards=True)

    @contextmanager
    def atomic_batch(self) -> Iterator[None]:
        """Context around all forwards and backwards of a step: if one fails, none of them counts.

        With several ranks the others have a part in the gradients: then the next step is refused on all ranks.
        """
        run = self._run
        first_micro_step = run.micro_steps
        try:
            yield
        except BaseException:
            run.micro_steps = first_micro_step
            if run.collectives.placement.is_single_rank:
                with suppress(StorageError):  # the next call raises it again
                    self.discard_batch()
            else:
                run.parts.backward_watch.is_torn |= run.parts.has_gradients
            raise

    def _discard_gradients(self, *, forwards: bool) -> None:
        run = self._run
        if not run.closed:
            self._complete_pending()
            run.parts.backward_watch.end_failed_backward()
            run.parts.gradients.clear()
            self._device_memory.discard_gradients()
            self._accumulation.restart_collection()
            self._notify_discarded(forwards=forwards)
            for parameter in self._parameters_with_grad():
                set_torch_gradient(parameter, None)
            run.parts.backward_watch.is_torn = False

    def _notify_discarded(self, *, forwards: bool) -> None:
        self._backwards = 0
        self._scaling.begin_step()
        if self._attention_clip is not None:
            self._attention_clip.on_gradients_discarded(forwards=forwards)
        self.discards += 1

    def _request_step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Register a legal step. It will be taken, even after an interrupt, unless `Stepper.decide` refuses it."""
        run, parts = self._run, self._run.parts
        if run.updater is None:
            raise StateError("step: the engine was made without an optimizer; add one to the config or pass one")
        self.snapshots.check_loaded()
        if self._attention_clip is not None:
            self._attention_clip.on_step_request()
        self._device_memory.reload("step")
        if parts.parameter_store.editor.is_editing:
            raise StateError(
                "step: called inside GatheredParameters, where it would change the weights but not the gathered "
                "copy; call it outside"
            )
        parts.backward_watch.end_failed_backward()
        if (
            parts.backward_watch.is_torn and parts.collectives.placement.is_single_rank
        ):  # with several ranks all must raise: see `Stepper.decide`
            raise InterruptedBackward.on_ranks()
        parts.coordinator.check_idle()
        run.updater.call_pre_hooks()
        self._schedule_arguments = dict(lr_kwargs or {})
        self._take_assigned_gradients()
        parts.stepper.request()

    def _complete_pending(self) -> None:
        """Complete the work that an earlier call has left: first the edits, since they were made before the step."""
        run, parts = self._run, self._run.parts
        with self.stopwatch.running():
            parts.stepper.check_updates()
            run.activations.check_stores()
            parts.parameter_store.editor.store_edits()
            if parts.stepper.state == StepState.NONE or run.updater is None:
                return
            self._decide_step(run.updater)
            parts.stepper.start_updates()
            parts.stepper.on_updates_begun()
            parts.coordinator.expect_forward()
            try:
                self.snapshots.commit_in_step()
                if self._attention_clip is not None:
                    self._attention_clip.on_eager_updates_done(self)
            finally:  # The step was taken, even if one of these raises.
                if parts.stepper.changes_weights:
                    run.updater.call_post_hooks()

    def _decide_step(self, optimizer: ZeroOptimizer) -> None:
        """Decide everything about the step, and count it: each once, even if an interrupt splits it into two calls."""
        run, stepper = self._run, self._run.parts.stepper
        number = run.global_steps + 1
        if stepper.state == StepState.REQUESTED:
            self._checkpoints.on_step_begin()
            run.parts.coordinator.evict_all()
            self.snapshots.commit_pending()
            if run.parts.gradients.factors:
                stepper.finish_updates()  # updates of the last step read the gradients that it has sealed
                run.parts.gradients.finish_for_step()  # until then ranks differ in which gradients there are
                self._apply_factors(if_alike=False)
            try:
                stepper.decide(
                    number,
                    optimizer,
                    run.parts.index_of,
                    run.config.gradient_clipping,
                    loss_is_finite=self._scaling.losses_were_finite,
                    backward_interrupted=run.parts.backward_watch.is_torn,
                )
            except InterruptedBackward:
                run.parts.backward_watch.is_torn = True  # on all ranks: none of them may begin a batch before zero_grad
                raise
            except (UnusedParameters, LossScaleError) as error:
                optimizer.overflow = isinstance(error, LossScaleError)
                if optimizer.overflow:  # its gradients are discarded; UnusedParameters keeps them for another attempt
                    self._accumulation.begin_step()
                    self._notify_discarded(forwards=True)
                raise
        if stepper.state == StepState.DECIDED:
            self._count_step(optimizer, number)

    def _count_step(self, optimizer: ZeroOptimizer, number: int) -> None:
        """Count the decided step. The scheduler is stepped only if the step changes weights."""
        run, parts, applied = self._run, self._run.parts, self._run.parts.stepper.changes_weights
        parts.coordinator.on_step()
        parts.stepper.on_counted()
        parts.backward_watch.graph_version += 1
        self._was_applied, optimizer.overflow = applied, not applied
        try:
            if applied:
                optimizer.set_step_called()
                if run.lr_scheduler is not None:
                    step_scheduler(run.lr_scheduler, self._schedule_arguments, run.config.train_batch_size)
        finally:  # As in DeepSpeed, a schedule that reads the counters sees those of the steps before.
            run.global_steps = number
            samples = self._samples()
            run.global_samples += samples
            run.skipped_steps += not applied
            self._backwards = 0
            self._accumulation.begin_step()
            self._scaling.begin_step()
        optimizer._global_grad_norm = parts.stepper.norm
        self.snapshots.begin_if_due()
        self.decided_steps += 1
        self.decided_samples += samples

    def _samples(self) -> int:
        """Samples of the counted step on all ranks. If the user sets the boundaries, its backwards are counted."""
        config = self._run.config
        if config.managed_gradient_accumulation:
            return config.train_batch_size
        micro_batches = max(self._backwards, self._accumulation.micro_step_index)  # one backward may cover several
        return micro_batches * config.train_batch_size // config.gradient_accumulation_steps

    def take_user_gradients(self) -> None:
        """A gradient that the user has put into `parameter.grad` replaces the collected one, as with torch.

        All ranks must have put the same gradient there: each rank takes its shard from its own. What the user has
        multiplied is multiplied now: a backward may be going to add to it.
        """
        self._take_assigned_gradients()
        self._apply_factors()

    def _take_assigned_gradients(self) -> None:
        for parameter in self._parameters_with_grad():
            self._take_gradient(parameter)

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        gradient = torch_gradient(parameter)
        if gradient is None:
            return
        set_torch_gradient(parameter, None)
        scale = self._run.scaler.cur_scale
        if IS_EXPOSED in gradient.__dict__:  # it is rounded, so what was collected stays unless it was changed
            found = self.values_of(parameter).gradient()
            if found is not None and torch.equal((found / scale).to(gradient), gradient):
                return
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        self.values_of(parameter, to_change=True).set_gradient(dense.float() * scale)

    def _parameters_with_grad(self) -> list[nn.Parameter]:
        """Parameters with a `.grad` of torch's own: backward leaves none, since the engine collects the gradients."""
        run = self._run
        groups = run.updater.param_groups if run.updater is not None else []
        assigned = (p for group in groups for p in group["params"] if torch_gradient(p) is not None)
        return [p for p in assigned if id(p) in run.parts.index_of]

    def _apply_factors(self, *, if_alike: bool = True) -> None:
        """Apply the factors that gradients were given; if not `if_alike`, one of all gradients is left to the step."""
        run, parts = self._run, self._run.parts
        factors = parts.gradients.factors
        if not factors or not (if_alike or parts.gradients.common_factor() is None):
            return
        if if_alike and None in factors.values() and self._accumulation.collected_micro_batches:
            warnings.warn(DISCARDS, stacklevel=3)
        self.on_edit_begin()
        parameters = parts.parameters()
        for index in list(factors):
            try:
                ParameterValues(parts, parts.collectives, parameters[index], run.updater).apply_factor()
            except BaseException as error:  # a part of it is multiplied, so no second attempt could be right
                gradients, alone = parts.gradients, parts.collectives.placement.is_single_rank
                gradients.has_lost, parts.backward_watch.is_torn = True, parts.backward_watch.is_torn or alone
                factors.clear()
                if alone or not isinstance(error, StorageError):  # such as an interrupt
                    raise
                gradients.failure = gradients.failure or error
                return  # the other ranks have not failed: the step raises, on all of them

    def check_open(self, what: str) -> None:
        """Raise StateError if the engine is closed. `what`: the call, for the message."""
        if self._run.closed:
            raise StateError(f"{what}: the engine is closed")
        self._check_call(what)

    def _check_call(self, what: str) -> None:
        self._checkpoints.check_call(what)
        self.averages_guard.check_call(what)

    def make_ready(self, what: str, needs: frozenset[OffloadStateTypeEnum] | None = None) -> None:
        """Raise if the engine is closed; complete a step that was asked for; bind the persistent units.

        `needs`: bring these states (None: all) back if `offload_states` has put them away (BudgetError: no room).
        Raises StateError: closed; StorageError: an update of the last step failed and this was not raised yet, or it
        fails again.
        """
        self.check_open(what)
        self._checkpoints.on_engine_call()
        if self._attention_clip is not None:
            self._attention_clip.on_engine_call(self)
        self._complete_pending()
        self._device_memory.reload(what, needs)
        parts = self._run.parts
        if not parts.coordinator.is_persistent_bound and not self._device_memory.offloaded_kinds & NEEDED_BY_FORWARD:
            parts.stepper.update_persistent_units()
            self.snapshots.write_persistent()
            parts.coordinator.bind_persistent()

    def make_ready_to_run(self, what: str) -> None:
        """`make_ready` for calls that need only weights."""
        self.make_ready(what, NEEDED_BY_FORWARD)

    def ensure_weights_on_device(self) -> None:
        """Bring weights back that `offload_states` has moved away: a module may be called by itself."""
        self._device_memory.ensure_weights_on_device()

    def has_offloaded_states(self) -> bool:
        """`offload_states` has moved something away; no update is due."""
        return bool(self._device_memory.offloaded_kinds)

    def should_reduce(self) -> bool:
        """See `Accumulation.should_reduce`."""
        return self._accumulation.should_reduce()

    def gradient_divisor(self, is_scaled: bool) -> int:
        """See `LossScaling.gradient_divisor`."""
        return self._scaling.gradient_divisor(is_scaled)

    def loss_scale(self) -> float:
        return float(self._run.scaler.cur_scale)

    def get_gradients(self) -> Gradients:
        """Those of the model as it is: it may change."""
        return self._run.parts.gradients

    def on_backward_begin(self) -> None:
        """A backward begins: on return everything that it needs is on the device."""
        self._backwards += 1
        self._check_call("backward")
        if self._device_memory.offloaded_kinds & NEEDED_BY_BACKWARD:
            self.make_ready("backward", NEEDED_BY_BACKWARD)

    @atomic
    def complete_updates(self, what: str, units: Iterable[int] | None = None) -> None:
        """See `ZeroEngine.complete_updates`."""
        self.make_ready(what)
        self._run.parts.stepper.finish_updates(units)

    @atomic
    def synchronize(self) -> None:
        """See `ZeroEngine.synchronize`."""
        self.make_ready("synchronize", frozenset())
        parts = self._run.parts
        parts.stepper.finish_updates()
        parts.gradients.wait_until_stored()
        parts.coordinator.wait_for_prefetches()
        streams = parts.storage.streams  # updates may be queued on the GPU and not be done yet
        parts.storage.io_loop.run("waiting for the device", streams.synchronize(streams.record_update_event()))

    def on_weights_change(self, index: int) -> None:
        """A unit is about to change by other means than a step."""
        self._checkpoints.on_weights_change(index)
        self.snapshots.invalidate()

    def on_forward_modify(self, index: int) -> None:
        """A forward has changed a unit in place."""
        self._checkpoints.on_forward_modify(index)
        self.on_weights_change(index)

    def on_edit_begin(self) -> None:
        self._checkpoints.on_edit_begin()

    def prepare_rewrite(self) -> EngineParts:
        """The parts, ready for rewriting their arrays: nothing is in flight, no unit is bound, graphs are invalid."""
        parts = self._run.parts
        self._device_memory.reload("a change of the model or of its values")
        parts.wait_until_idle()
        self._checkpoints.on_rewrite_begin()
        self.snapshots.invalidate()
        self.averages_guard.check_rewrite()
        parts.coordinator.evict_all()
        parts.backward_watch.graph_version += 1
        # A forward that is still queued on the device reads the weights in place, or copies of them: wait for it.
        streams = parts.storage.streams
        used = streams.synchronize(streams.record_event(), streams.record_copy_event(), streams.record_update_event())
        parts.storage.io_loop.run("waiting for the device", used)
        return parts

    def evict_all(self) -> None:
        """Evict every unit, and unbind the persistent ones; `make_ready` binds these again."""
        self._checkpoints.on_persistent_unbind()
        self._run.parts.coordinator.evict_all()

    def values_of(self, parameter: nn.Parameter, *, to_change: bool = False) -> ParameterValues:
        """See `ZeroEngine.values_of`."""
        if to_change:
            self.check_open(EDIT)
        parts = self._run.parts
        name = name_of(parameter)
        units = parts.parameter_store.units_of(name)
        self.complete_updates(f"values of {name}", units)
        if to_change:
            parts.parameter_store.editor.on_change_begin(units)
        found = ParameterValues(parts, parts.collectives, parameter, self._run.updater)
        if found.is_trained and torch_gradient(parameter) is not None:
            self._take_gradient(parameter)
        return found
