"""The engine: a model and its optimizer on the tiers that the plan chose, with the training loop that users know."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from offload.errors import StorageError
from offload.memory.host_memory import trim_heap
from offload.system.interrupts import atomic, deferring_interrupts
from zero.assembly.accumulation import Accumulation
from zero.assembly.device_memory import DeviceMemory
from zero.assembly.engine_parts import EngineParts
from zero.assembly.engine_steps import EngineSteps, StepListener
from zero.assembly.loss_scaling import LossScaling
from zero.assembly.model_changes import ModelChanges
from zero.assembly.offload_states import OffloadStates
from zero.assembly.run import Run
from zero.assembly.state_kinds import NEEDED_BY_BACKWARD
from zero.checkpoint.background import CheckpointState
from zero.checkpoint.engine_weights import ExportWeights
from zero.checkpoint.load import LoadCheckpoints
from zero.checkpoint.save_checkpoints import SaveCheckpoints
from zero.compat.engine_getters import ConfigGetters
from zero.config import Config
from zero.data.forward_schedules import ForwardSchedules
from zero.data.loaders import Loaders
from zero.engine.averaged_weights import AveragedWeights, AveragesGuard
from zero.engine.client_calls import ClientCalls
from zero.engine.generation import Generation
from zero.engine.micro_batches import LossOf, loss_by_call, next_batch, run_interleaved
from zero.engine.qk_clip import QkClip
from zero.engine.reports import Reports
from zero.engine.snapshot_calls import SnapshotCalls, SnapshotListener
from zero.engine.values import Values
from zero.exchange.collectives import Collectives, SingleRankCollectives
from zero.optim.loss_scale import make_scaler
from zero.optim.lr_scheduler import scheduler_for
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.rules import AdamRule, Rules, TrainedParameters
from zero.params.initialisation import open_initial_store
from zero.params.layout import Unit
from zero.plan.plan import Plan
from zero.reports.tracing import trace_calls
from zero.schedule.compiling import outside_transforms
from zero.schedule.engine_callbacks import EngineCallbacks

logger = logging.getLogger("zero")


class answered_by:
    """Forwards a name of the engine to one of its collaborators, which has the same name.

    On the class it returns the collaborator's function or property, so that `help` and `inspect` describe that one.

    `part`: the engine's attribute that holds the collaborator; `kind`: its class.
    """

    def __init__(self, part: str, kind: type, name: str) -> None:
        self._part, self._kind, self._name = part, kind, name

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        if engine is None:
            return getattr(self._kind, self._name, self)
        return getattr(getattr(engine, self._part), self._name)

    def __set__(self, engine: Any, value: Any) -> None:
        setattr(getattr(engine, self._part), self._name, value)


class ZeroEngine(ConfigGetters, nn.Module):
    """The first result of `zero.initialize`; a drop-in replacement for DeepSpeed's engine.

    Args:
        model: the module to train; it becomes `engine.module`.
        trained: param groups and how they are updated; None trains nothing (evaluation only).
        config: validated configuration.
        device: units are computed there.
        collectives: transfers between the ranks.
        lr_scheduler: stepped after each optimizer step, or a callable that makes one from the optimizer; None: as
            configured.
        generates: the whole life of the engine is one `generation()`.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: TrainedParameters | None,
        config: Config,
        device: torch.device,
        collectives: Collectives | None = None,
        lr_scheduler: Any = None,
        *,
        generates: bool = False,
    ) -> None:
        super().__init__()
        trained, scaler = trained or TrainedParameters([], Rules((AdamRule(),))), make_scaler(config, device)
        optimizer = ZeroOptimizer(trained, self._optimizer_step, self._zero_grad, scaler) if trained.groups else None
        run = self.run = Run(model, config, device, trained.rules, optimizer, scaler, generations=int(generates))
        run.lr_scheduler = scheduler_for(lr_scheduler, optimizer, config)
        self.accumulation, self.scaling = Accumulation(run), LossScaling(run)
        self.checkpoint_state, self._snapshot_listener, self._device_memory = (
            CheckpointState(run),
            SnapshotListener(run),
            DeviceMemory(run),
        )
        self._averages_guard = AveragesGuard()
        listeners: list[StepListener] = [self.checkpoint_state, self._snapshot_listener, self._averages_guard]
        threshold = None if config.optimizer is None else config.optimizer.params.qk_clip
        if threshold is not None and optimizer is not None:
            listeners.append(QkClip(run, threshold, lambda parameter: self.steps.values_of(parameter, to_change=True)))
        self.steps = EngineSteps(run, self.accumulation, self.scaling, self._device_memory, listeners)
        self.reports = Reports(run, self.steps)
        listeners.append(self.reports)
        events = self._make_callbacks()
        self._build(events, collectives or SingleRankCollectives(), trained)
        self._add_collaborators(events)
        self.module = model
        self.train(model.training)

    def _make_callbacks(self) -> EngineCallbacks:
        steps, accumulation = self.steps, self.accumulation
        return EngineCallbacks(
            check_open=steps.check_open,
            make_ready_to_run=steps.make_ready_to_run,
            on_module_call=self._device_memory.on_module_call,
            take_user_gradients=steps.take_user_gradients,
            on_backward_begin=steps.make_ready_to_train,
            has_offloaded_states=lambda: bool(self._device_memory.offloaded_kinds),
            complete_updates=steps.complete_updates,
            on_weights_change=steps.on_weights_change,
            on_forward_modify=steps.on_forward_modify,
            on_edit_begin=steps.on_edit_begin,
            should_reduce=accumulation.should_reduce,
            gradient_divisor=self.scaling.gradient_divisor,
            loss_scale=lambda: float(self.run.scaler.cur_scale),
            values_of=steps.values_of,
            get_gradients=lambda: self.run.parts.gradients,
            prepare_load=self._prepare_load,
            loading=self.checkpoint_state.loading,
            close=self.close,
        )

    def _prepare_load(self) -> EngineParts:
        with self.checkpoint_state.allow_loading():
            return self.model_changes.prepare_rewrite()

    def _build(self, callbacks: EngineCallbacks, collectives: Collectives, trained: TrainedParameters) -> None:
        """Build the parts and shard the model in place. If that fails, the model is unchanged."""
        run = self.run
        parts = EngineParts(run, callbacks, collectives, trained.rules.numbers(trained.groups))
        try:
            parts.build()
            run.set_parts(parts)
            parts.adopt()
            parts.install()
        except BaseException:
            run.closed = True
            run.detach_finalizer()
            parts.undo()
            self.reports.monitor.close()
            raise

    def _add_collaborators(self, callbacks: EngineCallbacks) -> None:
        run, steps, state = self.run, self.steps, self.checkpoint_state
        changes = self.model_changes = ModelChanges(run, steps, callbacks)
        self.averages = AveragedWeights(run, steps, changes, self._averages_guard)
        self.offloading = OffloadStates(run, steps, self._device_memory)
        self.saves = SaveCheckpoints(run, steps, changes, state)
        self.loads = LoadCheckpoints(run, steps, self.saves, state)
        self.weights_out = ExportWeights(run, steps, changes)
        self.snapshots = SnapshotCalls(run, steps, self.accumulation, self._snapshot_listener)
        self.values, self.generations, self.loaders = Values(run, steps), Generation(run, steps), Loaders(run)
        self.calls = ClientCalls(run, steps, changes, self.offloading)
        self.schedules = ForwardSchedules(run.config)

    # ---- the training loop --------------------------------------------------------------------

    @trace_calls("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; arguments are passed on untouched, unless `fp16.auto_cast` is set.

        In training `curriculum_learning` and `progressive_layer_drop` add their own arguments.
        """
        run, reports, scaling = self.run, self.reports, self.scaling
        if self.training:
            kwargs.update(self.schedules.forward_arguments(run.global_steps))
        with deferring_interrupts, outside_transforms():
            self.steps.make_ready_to_run("forward")
            self.model_changes.apply_pending()
            self.accumulation.share_buffers()
            if self.training and torch.is_grad_enabled():
                self.run.parts.storage.fault_in()
        try:
            with reports.forward.running(), run.activations.forward(), scaling.autocast(), reports.profile_forward():
                return self.module(*scaling.cast_inputs(args), **kwargs)
        except BaseException as error:
            # torch calls no hooks after an interrupt: without the reset, units would count as in use for ever.
            run.parts.scheduler.fail(error)
            run.parts.hooks.reset()
            raise

    @trace_calls("backward")
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of one micro-batch; divides the loss by the accumulation steps if `scale_wrt_gas`.

        Returns:
            The divided loss; it does not contain the loss scale.

        Raises:
            StateError: the graph was made before the last step, or the engine is closed.
            StorageError: a transfer failed.
        """
        loss = self.divide_loss(loss) if scale_wrt_gas else loss
        self.reports.note_loss(loss)
        with self.running_backward():
            self.scaling.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return loss

    def divide_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of one micro-batch divided by the accumulation steps."""
        accumulation = self.run.config.gradient_accumulation_steps
        return self.scaling.divide_loss(loss, accumulation) if accumulation > 1 else loss

    @contextmanager
    def running_backward(self, *, interleaved: bool = False) -> Iterator[None]:
        """Context of one backward through the model; the caller runs it, from a loss or from gradients of its outputs.

        Raises as `backward`. `interleaved`: it is the backward of several micro-batches at once.
        """
        with deferring_interrupts:
            self.steps.make_ready("backward", NEEDED_BY_BACKWARD)
            self.steps.take_user_gradients()  # this backward adds its gradients to the written ones
        parts = self.run.parts
        with self.reports.backward.running():
            parts.coordinator.is_accumulating = not self.accumulation.is_gradient_accumulation_boundary()
            with parts.backward_watch.outermost_backward(interleaved=interleaved):
                yield

    @atomic
    @trace_calls("step")
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """On an accumulation boundary: norm, clipping, and the update of every sub-group. Else it only counts.

        Returns once the step is fixed. Sub-groups are updated in the order in which the next forward needs them; a read
        of a value waits until its update is done.

        Args:
            lr_kwargs: given to the scheduler's `step`, if this call takes a step and it is not skipped.

        Raises:
            StorageError: a transfer failed, on this rank or on another. The step stays pending, and the next call of
                the engine completes it; a second `step()` is such a call too, and takes no second step.
            LossScaleError: the gradients are not finite at the smallest loss scale; nothing has changed.
        """
        self.steps.step(lr_kwargs)
        self.reports.report_step()

    def train_batch(self, data_iter: Iterator[Any], loss_of: LossOf | None = None) -> torch.Tensor:
        """Forward, backward and step of one batch: of the next gradient_accumulation_steps micro-batches.

        With `vertical_accumulation` all micro-batches pass a unit before any of them reaches the next unit. On one rank
        the gradients have the same bits as without it; on several ranks they have the bits of stage 1. A model that
        draws random numbers draws different ones. If a forward or backward fails, the whole batch fails; an engine of
        one rank then keeps no gradient of the batch.

        Args:
            data_iter: gives micro-batches.
            loss_of: calls the engine with a micro-batch and returns the loss, a scalar. None: the engine is called with
                the items of the micro-batch, by name for a dict, in order for a tuple or list. The loss is its output,
                or the output's `loss`.

        Returns:
            The mean of the losses, detached.

        Raises:
            StateError: `data_iter` ends within a batch, and the micro-batches already read are lost; or gradients of
                other micro-batches are pending.
            ConfigError: the model returns no loss.
            StorageError, LossScaleError: as `backward` and `step`.
        """
        loss_of = loss_of or partial(loss_by_call, self)
        self.accumulation.begin_batch("train_batch")
        batches = next_batch(data_iter, self.run.config.gradient_accumulation_steps)
        with self.accumulation.atomic_batch(
            self.steps.discard_batch if self.run.collectives.placement.is_single_rank else None
        ):
            vertical = self.run.config.vertical_accumulation and self.plan.passes < len(batches)
            if vertical and not self.reports.will_profile_forward:
                losses = self._run_interleaved([partial(loss_of, batch) for batch in batches])
            else:
                losses = [
                    self._forward_and_backward(loss_of, batch, index=index) for index, batch in enumerate(batches)
                ]
        self.step()
        return torch.stack([loss.float() for loss in losses]).mean()

    def _run_interleaved(self, forwards: list[partial[torch.Tensor]]) -> list[torch.Tensor]:
        def backward(loss: torch.Tensor) -> None:
            part = self.divide_loss(loss)
            self.reports.note_loss(part)
            self.scaling.scale_loss(part).backward()  # type: ignore[no-untyped-call]

        self.run.micro_steps += len(forwards) - 1  # they share one backward, the last before the step
        try:
            return run_interleaved(
                self.run.parts.scheduler, forwards, backward, self.running_backward(interleaved=True)
            )
        except BaseException:
            self.run.parts.hooks.reset()  # nothing uses the units that this round held any more
            raise

    def _forward_and_backward(self, loss_of: LossOf, batch: Any, *, index: int) -> torch.Tensor:
        self.run.micro_steps += index > 0  # the previous backward was not the last of its step
        loss = loss_of(batch)
        self.backward(loss)
        return loss.detach()

    @atomic
    @trace_calls("step")
    def _optimizer_step(self) -> None:
        self.steps.step_now()
        self.reports.report_step()

    def _zero_grad(self) -> None:
        self.steps.zero_grad()

    # ---- inspection ---------------------------------------------------------------------------

    @property
    def _config(self) -> Config:  # type: ignore[override]
        return self.run.config

    @property
    def plan(self) -> Plan:
        """The plan: which tier holds what, and how many bytes."""
        return self.run.parts.plan

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units of the model, in model order."""
        return self.run.parts.layout.units

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record the steps inside the context and write their timeline, as Trace Event JSON.

        Perfetto (ui.perfetto.dev) and chrome://tracing open the file; `zero trace --draw` makes a PNG of it.

        Args:
            path: overwritten; of several ranks each needs its own. It is also written if the block raises or the engine
                closes inside it. If the disk is full then, a warning is logged.

        Raises:
            ConfigError: `path` cannot be written.
            StateError: another recording is running.
        """
        self.run.tracer.start_recording(path, self.run.global_steps)
        try:
            yield
        finally:
            self.run.tracer.finish_recording()

    def inject(self, fault: Any) -> None:
        """Inject I/O faults (an `offload.disk.aio.AioFault`, None to stop), for tests."""
        disk = self.run.parts.storage.disk
        if disk is not None:
            disk.aio.inject(fault)

    # ---- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release everything: hooks, memory, threads, files. The parameters lose their values. Idempotent.

        Raises:
            StorageError: a checkpoint in the background could not be completed. Everything is released all the same.
        """
        run, parts = self.run, self.run.parts
        if parts.storage.io_loop.is_forked:  # a forked child: threads, files and other ranks are the parent's
            return
        begun, run.closed = run.closed, True
        self._device_memory.drop_all()
        parts.hooks.remove()
        parts.backward_watch.remove()
        if run.updater is not None:
            run.updater.drop_states()
        if begun:  # an interrupt may have stopped the first attempt
            parts.storage.close()
            parts.collectives.close()
            return
        run.detach_finalizer()
        try:
            unsaved = self.checkpoint_state.join()
            self._snapshot_listener.commit_last()
            if not parts.collectives.placement.is_single_rank:  # others may still read this rank's slices
                with suppress(StorageError):
                    parts.stepper.finish_updates()
            parts.stepper.stop_updates()
            parts.gradients.clear()
            parts.hooks.reset()
            parts.coordinator.end_backward()
            parts.coordinator.evict_all()
            parts.coordinator.free_device_memory()
        finally:
            with ExitStack() as ends:  # last first; each runs even if another raises
                ends.callback(trim_heap)
                for part in (self.reports.monitor, run.activations, parts.collectives, parts.storage):
                    ends.callback(part.close)
        if unsaved is not None:
            raise unsaved
        logger.debug("engine closed after %d steps", run.global_steps)

    def destroy(self, *, keeps_shards: bool = False) -> None:
        """As `close`, but a model whose weights are not sharded keeps them, as with DeepSpeed. Idempotent.

        At stages 0 to 2 every rank has all weights: clients free memory with this call, and wrap the model again later.
        All ranks call it together.

        Args:
            keeps_shards: the model keeps sharded weights too, as if it had just been built under `zero.Init`.
        """
        parts = self.run.parts
        try:
            if not self.run.closed:
                if not parts.collectives.placement.weights_sharded:
                    parts.parameter_store.unwrap_model()
                elif keeps_shards:
                    parts.collectives.all_gather_bytes("destroy", b"")  # all ranks live and are here
                    parts.parameter_store.unwrap_model(open_initial_store(self.run.config))
        finally:
            self.close()

    def __enter__(self) -> ZeroEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Unknown names are looked up in the model: `engine.generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and name != "module":
                return getattr(modules["module"], name)
            raise


# (the engine's attribute that holds the collaborator, its class) -> the engine's names that are forwarded to it.
ANSWERS: dict[tuple[str, type], str] = {
    ("run", Run): """
        device collectives activations scaler updater lr_scheduler global_steps global_samples skipped_steps collate_fn
        training_dataloader data_position
    """,
    ("accumulation", Accumulation): """
        micro_steps is_gradient_accumulation_boundary set_gradient_accumulation_boundary no_sync
    """,
    ("scaling", LossScaling): "scale",
    ("steps", EngineSteps): "zero_grad was_step_applied synchronize complete_updates values_of",
    ("offloading", OffloadStates): "offload_states reload_states offloaded_states state_devices",
    ("model_changes", ModelChanges): "replan",
    ("averages", AveragedWeights): "averaged_weights",
    ("generations", Generation): "generate generation",
    ("loaders", Loaders): "deepspeed_io",
    ("schedules", ForwardSchedules): "curriculum_scheduler_legacy progressive_layer_drop",
    ("values", Values): "full_parameter full_master full_state named_full_parameters",
    ("saves", SaveCheckpoints): "save_checkpoint checkpoint_tools files",
    ("loads", LoadCheckpoints): "load_checkpoint",
    ("checkpoint_state", CheckpointState): "checkpoint_pending wait_for_checkpoint partially_loaded_folder",
    ("weights_out", ExportWeights): """
        save_16bit_model save_fp16_model save_fp32_model module_state_dict _zero3_consolidated_16bit_state_dict
        _consolidated_16bit_state_dict
    """,
    ("snapshots", SnapshotCalls): "save_snapshot load_snapshot",
    ("reports", Reports): """
        monitor statistics seconds_so_far log_summary flops_profiler get_wall_clock_timers
    """,
    ("calls", ClientCalls): """
        config optimizer parameter_offload hooks_for_optimizer set_train_batch_size set_train_micro_batch_size
        set_gradient_accumulation_steps get_global_grad_norm set_lr get_lr get_mom empty_partition_cache compile
        is_compiled
    """,
}

for (_part, _kind), _names in ANSWERS.items():
    for _name in _names.split():
        setattr(ZeroEngine, _name, answered_by(_part, _kind, _name))
