"""The engine: a model, its optimizer and the loop users know, over whatever tiers the plan chose."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

import torch
from torch import nn

from offload.errors import StateError, StorageError
from offload.kernels.threads import kernel_threads
from offload.memory.pinned import return_freed_memory
from offload.stopwatch import Stopwatch
from offload.system.interrupts import uninterrupted, whole
from zero.activations.saved_tensors import Activations
from zero.assembly.assembly import Assembly
from zero.assembly.model_changes import Census
from zero.assembly.state_kinds import TO_RUN, TO_TRAIN, OffloadStateTypeEnum
from zero.compat.engine_getters import ConfigGetters
from zero.config import Config
from zero.data.loaders import LoadsData
from zero.engine.accessors import ValueAccessors
from zero.engine.checkpoints import Checkpoints
from zero.engine.ending import Ends
from zero.engine.engine_api import Surface
from zero.engine.generation import Generates
from zero.engine.loss_scaling import ScalesLoss
from zero.engine.micro_steps import Accumulates
from zero.exchange.exchange import Alone, Exchange
from zero.optim.loss_scale import LossScaleError
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.pipeline import StepArguments
from zero.optim.rules import AdamRule, Trained
from zero.optim.scheduling import scheduler_for
from zero.optim.step import UnusedParameters
from zero.params.layout import Unit
from zero.plan.machine import aliases
from zero.reports.reporting import Reports
from zero.reports.tracing import Traced, Tracer, traced
from zero.schedule.compiling import apart
from zero.store.storage import Storage

logger = logging.getLogger("zero")


class ZeroEngine(
    ConfigGetters,
    ValueAccessors,
    Surface,
    LoadsData,
    Accumulates,
    ScalesLoss,
    Checkpoints,
    Reports,
    Generates,
    Ends,
    Traced,
    nn.Module,
):
    """What `zero.initialize` returns first; a drop-in for DeepSpeed's engine.

    Args:
        model: the module to train; it becomes `engine.module`.
        trained: param groups and how they are updated; None trains nothing (evaluation only).
        config: validated configuration.
        device: where units are computed on.
        exchange: with the other ranks.
        lr_scheduler: stepped after each optimizer step, or what makes one of the optimizer; None: as configured.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Trained | None,
        config: Config,
        device: torch.device,
        exchange: Exchange | None = None,
        lr_scheduler: Any = None,
    ) -> None:
        super().__init__()
        self._closed = False
        self._config, self.device, self.exchange = config, device, exchange or Alone()
        self.in_place = aliases()
        self.threads = kernel_threads(on_cpu=device.type == "cpu")
        trained = trained or Trained([], AdamRule())
        self.rule, groups = trained.rule, trained.groups
        self.updater = ZeroOptimizer(trained, self._optimizer_step, self.zero_grad) if groups else None
        self._make_scaler()
        self.lr_scheduler = scheduler_for(lr_scheduler, self.updater, config)
        self._forward, self._backward, self._step = Stopwatch(), Stopwatch(), Stopwatch()
        self._start_reports()
        self.global_steps = self.micro_steps = 0
        self.activations = Activations(config.activation_checkpointing)
        self._step_asked = self._step_counted = False
        self._persistent_bound = True
        parts = Assembly(self, model, {id(p) for group in groups for p in group["params"]}, config)
        # Users of DeepSpeed rarely close an engine: one that is dropped gives its files and threads back too.
        self._finalizer = weakref.finalize(self, Storage.abandon, parts.storage)
        try:
            self._tracer = Tracer(parts.storage)
            parts.build()
            self._use(parts)
            parts.adopt()
            parts.install()
        except BaseException:
            self._closed = True
            self._finalizer.detach()
            parts.undo()
            self.monitor.close()
            raise
        self.module = model
        self._show_face()
        self._census = Census(model, self.updater)
        self._census.decline()
        self.train(model.training)
        self._begin_reports()

    def _use(self, parts: Assembly) -> None:
        """Run the model with these parts from now on."""
        self._parts = parts
        self.plan, self._layout, self._storage, self._bound = parts.plan, parts.layout, parts.storage, parts.bound
        self._index_of, self._gradients, self._ahead = parts.index_of, parts.gradients, parts.ahead
        self._stepper, self._coordinator, self._watch = parts.stepper, parts.coordinator, parts.watch
        self._hooks, self._keeper = parts.hooks, parts.keeper
        self.activations.use(self._storage.activations, parts.model, self._bound, self._watch.tear)

    # ---- the training loop --------------------------------------------------------------------

    @traced("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; arguments are passed on untouched, unless `fp16.auto_cast` is set."""
        with uninterrupted, apart():
            self.ready("forward", TO_RUN)
            self._follow()
            self._share_buffers()
        try:
            with self._forward.running(), self.activations.forward(), self._precisely(), self._profiled():
                return self.module(*self._cast_inputs(args), **kwargs)
        except BaseException:
            # torch calls no hooks for an interrupt: uses would stay open for ever.
            self._hooks.reset()
            raise

    @traced("backward")
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of one micro-batch; divides the loss by the accumulation steps unless told not to.

        Returns:
            The loss so divided; the loss scale is not in it.

        Raises:
            StateError: the graph was made before the last step, or the engine is closed.
            StorageError: a transfer failed.
        """
        with uninterrupted:
            self.ready("backward", TO_TRAIN)
        accumulation = self._config.gradient_accumulation_steps
        if scale_wrt_gas and accumulation > 1:
            loss = self._part_of(loss, accumulation)
        self._note_loss(loss)
        with self._backward.running():
            self._coordinator.accumulating = not self.is_gradient_accumulation_boundary()
            with self._watch.outermost():
                self._scaled(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return loss

    @whole
    @traced("step")
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """On an accumulation boundary: norm, clipping, and the update of every sub-group. Else only counts.

        Returns once the step is fixed. Sub-groups are updated in the order the next forward needs them; whoever
        looks at a value before waits for it.

        Args:
            lr_kwargs: given to the scheduler's `step`, if this call takes a step and it is not skipped.

        Raises:
            StorageError: a transfer failed. The step is kept and taken by the next call of the engine; calling
                `step()` again is such a call, and no second step.
            LossScaleError: the gradients are not finite at the smallest loss scale; nothing has changed.
        """
        self.check_open("step")
        self._step_applied = False
        if not (self._step_asked or self.is_gradient_accumulation_boundary()):
            self._take_step()  # what an earlier call has left; if it raises, this call has not happened
            self.micro_steps += 1
            return
        if not self._step_asked:
            self._ask_for_step(lr_kwargs)
            self.micro_steps += 1
        self._take_step()
        self._report_step()

    @whole
    def synchronize(self) -> None:
        """Wait until the last step is complete and the gradients since are stored, on every tier, and nothing moves.

        Raises:
            StorageError: a transfer failed. The next call goes on where this one stopped.
        """
        self.ready("synchronize", frozenset())
        self._stepper.finish()
        self._gradients.settle()
        self._coordinator.settle()

    @whole
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated since the last step."""
        if not self._closed:
            self._take_step()
            self.changed()
            self._gradients.clear()
            self.forget_gradients_away()
            self._forget_written()
            self._watch.torn = False

    @whole
    @traced("step")
    def _optimizer_step(self) -> None:
        """`optimizer.step()`: a step now, whatever the micro-step counter says."""
        self.check_open("optimizer.step")
        if not self._step_asked:
            self._ask_for_step()
        self._take_step()
        self._report_step()

    def _ask_for_step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take note of a step that is legal now. From here on it will be taken, whatever fails meanwhile."""
        if self.updater is None:
            raise StateError("step: the engine was made without an optimizer; add one to the config or pass one")
        self._check_snapshot()
        self.bring_back("step")
        if self._keeper.editing:
            raise StateError("step: inside GatheredParameters; the weights would change under the gathered copy")
        if self._watch.torn:
            raise StateError(
                "step: a transfer failed inside the last backward, so some gradients are missing; call zero_grad() and "
                "run forward and backward again"
            )
        self._watch.end_stray()
        self._coordinator.check_idle()
        self.updater.before_step()
        self._schedule_arguments = dict(lr_kwargs or {})
        self._take_written()
        self._stepper.decided = self._step_counted = False
        self._step_asked = True

    def _take_step(self) -> None:
        """Do what an earlier call had to leave undone: edits first, they came before the step."""
        with self._step.running():
            self._stepper.check()
            self.activations.check()
            self._keeper.store_edits()
            if self._step_asked and self.updater is not None:
                try:
                    self._fix_step(self.updater)
                except (UnusedParameters, LossScaleError) as error:
                    self._step_asked = False
                    self.updater.overflow = isinstance(error, LossScaleError)
                    raise
                self._stepper.start()
                self._step_asked = False
                self._coordinator.expect_forward()
                self._after_a_step()
                if self._stepper.applied:
                    self.updater.after_step()

    def arguments_now(self) -> StepArguments:
        """What a step would use now that does not clip, for every parameter."""
        everything = set(self._index_of.values())
        values = {} if self.updater is None else self.updater.values(self._index_of, everything)
        return StepArguments(values, 1.0 / self.scaler.cur_scale, self.global_steps + 1)

    def changed(self, index: int | None = None) -> None:
        """A unit (None: all) changes by other means than a step: what was done ahead of it is worth nothing."""
        if index is not None:
            self.weights_change(index)
        if self._ahead is not None:
            self._ahead.void_all() if index is None else self._ahead.void(index)

    def _fix_step(self, optimizer: ZeroOptimizer) -> None:
        """Decide everything about the step, and count it; once, also if an interrupt makes it two attempts."""
        if self._step_counted:
            return
        self._persistent_bound = False
        self.note_step()
        self._coordinator.release_all()
        self._before_a_step()
        number = self.global_steps + 1
        self._stepper.loss_is_finite = self._loss_was_finite()
        self._stepper.fix(number, optimizer, self._index_of, self._config.gradient_clipping)
        self._coordinator.step_taken()
        self._step_counted = True
        self._watch.generation += 1
        self.global_steps = number
        self.global_samples += self._config.train_batch_size
        self._note_applied(self._stepper.applied)
        optimizer._global_grad_norm = self._stepper.norm
        self._step_was_fixed()

    def ready(self, what: str, needs: frozenset[OffloadStateTypeEnum] | None = None) -> None:
        """Raise if the engine is closed; take a step that was asked for; bind what is always bound.

        Args:
            what: is attempted.
            needs: of these states (None: all) what `offload_states` has put away comes back (BudgetError: no room).

        Raises:
            StateError: closed.
            StorageError: an update of the last step failed and nobody was told yet, or it fails again.
        """
        self.check_open(what)
        self.check_checkpoint()
        self._take_step()
        self.bring_back(what, needs)
        if not self._persistent_bound and not self.offloaded_states & TO_RUN:
            self._stepper.apply_persistent()
            self._bound_again()
            self._coordinator.bind_persistent()
            self._persistent_bound = True

    @whole
    def current(self, what: str, units: Iterable[int] | None = None) -> None:
        """`ready`, and these units (None: all) are stored as of the last step. As `ready`, raises."""
        self.ready(what)
        self._stepper.finish(units)

    def check_open(self, what: str) -> None:
        """Raise StateError if the engine is closed; `what` was attempted."""
        if self._closed:
            raise StateError(f"{what}: the engine is closed")
        if self.half_loaded:
            raise StateError(
                f"{what}: loading {self.half_loaded} has failed half way, so values of two models are mixed; load a "
                "checkpoint, or close the engine"
            )

    # ---- looking at values --------------------------------------------------------------------

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units of the model, in model order."""
        return self._layout.units

    def inject(self, fault: Any) -> None:
        """Inject I/O faults (an `offload.disk.aio.AioFault`, None to stop): for tests of what happens then."""
        if self._storage.disk is not None:
            self._storage.disk.aio.inject(fault)

    # ---- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back: hooks, memory, threads, files. The parameters' values are gone. Idempotent.

        Raises:
            StorageError: a checkpoint that was being written is none. Everything is given back all the same.
        """
        begun, self._closed, self._away = self._closed, True, None
        self._hooks.remove()
        self._watch.remove()
        if self.updater is not None:
            self.updater.lose_states()
        if begun:  # an interrupt may have stopped the first attempt
            self._storage.close()
            self.exchange.close()
            return
        self._finalizer.detach()
        try:
            unsaved = self.end_checkpoint()
            self._commit_last()
            if not self.exchange.placement.alone:  # others may still read this rank's slices
                with suppress(StorageError):
                    self._stepper.finish()
            self._stepper.stop()
            self.changed()
            self._gradients.clear()
            self._hooks.reset()
            self._coordinator.end_backward()
            self._coordinator.release_all()
            self._coordinator.leave_device()
        finally:
            with ExitStack() as ends:  # last first; each runs, whatever another raises
                ends.callback(return_freed_memory)
                for part in (self.monitor, self.activations, self.exchange, self._storage):
                    ends.callback(part.close)
        if unsaved is not None:
            raise unsaved
        logger.debug("engine closed after %d steps", self.global_steps)

    def __enter__(self) -> ZeroEngine:
        """The engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Unknown names are the model's: `engine.generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and name != "module":
                return getattr(modules["module"], name)
            raise
