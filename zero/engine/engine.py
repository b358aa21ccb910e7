"""The engine: a model and its optimizer on the tiers that the plan chose, with the training loop that users know."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from offload.errors import StorageError
from offload.files.durable import Files
from offload.memory.host_memory import trim_heap
from offload.system.interrupts import atomic, deferring_interrupts
from zero.assembly.accumulation import Accumulation
from zero.assembly.device_memory import NEEDED_BY_BACKWARD, DeviceMemory, Kinds, OffloadDeviceEnum, OffloadStateTypeEnum
from zero.assembly.engine_parts import EngineParts
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.loss_scaling import LossScaling
from zero.assembly.model_changes import ModelChanges
from zero.assembly.monitors import Monitors
from zero.assembly.offload_states import OffloadStates
from zero.assembly.run import Run
from zero.assembly.statistics import Statistics
from zero.assembly.tracing import trace_calls
from zero.cache.compiling import outside_transforms
from zero.checkpoint.load import LoadCheckpoints
from zero.checkpoint.save import CheckpointState, SaveCheckpoints
from zero.checkpoint.weights_files import MAX_SHARD_SIZE, ExportWeights
from zero.compat.engine_getters import ConfigGetters
from zero.config import Config
from zero.data.forward_schedules import ForwardSchedules
from zero.data.loaders import Loaders
from zero.engine.averaged_weights import AveragedWeights
from zero.engine.client_calls import ClientCalls
from zero.engine.generation import Generation
from zero.engine.micro_batches import LossOf, loss_by_call, next_batch, run_interleaved
from zero.engine.parameter_offload import ParameterOffload
from zero.engine.qk_clip import QkClip
from zero.engine.reports import Reports
from zero.engine.snapshot_calls import SnapshotCalls
from zero.engine.values import Values
from zero.flops_profiler import FlopsProfiler
from zero.optim.loss_scale import LossScaler, make_scaler
from zero.optim.lr_scheduler import scheduler_for
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.rules import AdamRule, Rules, TrainedParameters
from zero.params.initialisation import open_initial_store
from zero.params.layout import Unit
from zero.plan.plan import Plan
from zero.store.collectives import Collectives
from zero.store.saved_tensors import Activations
from zero.values.parameter_values import ParameterValues

logger = logging.getLogger("zero")


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
        self.checkpoint_state = CheckpointState(run)
        self._device_memory = DeviceMemory(run)
        threshold = None if config.optimizer is None else config.optimizer.params.qk_clip
        clip = None if threshold is None or optimizer is None else QkClip(run, threshold)
        self.steps = EngineSteps(
            run, self, self.accumulation, self.scaling, self._device_memory, self.checkpoint_state, clip
        )
        self.reports = Reports(run, self.steps)
        self._build(collectives or Collectives(), trained)
        self._add_collaborators()
        self.module = model
        self.train(model.training)

    def _build(self, collectives: Collectives, trained: TrainedParameters) -> None:
        """Build the parts and shard the model in place. If that fails, the model is unchanged."""
        run = self.run
        parts = EngineParts(run, self.steps, collectives, trained.rules.numbers(trained.groups))
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

    def _add_collaborators(self) -> None:
        run, steps, state = self.run, self.steps, self.checkpoint_state
        changes = self.model_changes = ModelChanges(run, steps)
        self.averages = AveragedWeights(run, steps, changes)
        self.offloading = OffloadStates(run, steps, self._device_memory)
        self.saves = SaveCheckpoints(run, steps, changes, state)
        self.loads = LoadCheckpoints(run, steps, self.saves, state)
        self.weights_out = ExportWeights(run, steps, changes)
        self.snapshots = SnapshotCalls(run, steps, self.accumulation)
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
        with (
            run.calling_model(),
            reports.forward.running(),
            run.activations.forward(),
            scaling.autocast(),
            reports.profile_forward(),
        ):
            return self.module(*scaling.cast_inputs(args), **kwargs)

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
        with self.steps.atomic_batch():
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
        with self.run.calling_model():
            return run_interleaved(
                self.run.parts.scheduler, forwards, backward, self.running_backward(interleaved=True)
            )

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
        """Inject I/O faults (an `offload.io.aio.AioFault`, None to stop), for tests."""
        disk = self.run.parts.storage.disk
        if disk is not None:
            disk.aio.inject(fault)

    # ---- counters and parts ------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Units are computed there."""
        return self.run.device

    @property
    def collectives(self) -> Collectives:
        return self.run.collectives

    @property
    def activations(self) -> Activations:
        """Where saved activations go."""
        return self.run.activations

    @property
    def scaler(self) -> LossScaler:
        """The loss scaler."""
        return self.run.scaler

    @property
    def updater(self) -> ZeroOptimizer | None:
        """The optimizer that users hold; None: nothing is trained."""
        return self.run.updater

    @property
    def lr_scheduler(self) -> Any:
        """Stepped after each step that changes weights; None: there is none."""
        return self.run.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, value: Any) -> None:
        self.run.lr_scheduler = value

    @property
    def global_steps(self) -> int:
        """Steps taken, including skipped ones."""
        return self.run.global_steps

    @global_steps.setter
    def global_steps(self, value: int) -> None:
        self.run.global_steps = value

    @property
    def global_samples(self) -> int:
        """Samples that steps have used, over all ranks."""
        return self.run.global_samples

    @global_samples.setter
    def global_samples(self, value: int) -> None:
        self.run.global_samples = value

    @property
    def skipped_steps(self) -> int:
        """Steps that changed no weight because a gradient was inf or NaN."""
        return self.run.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self.run.skipped_steps = value

    @property
    def collate_fn(self) -> Callable[..., Any] | None:
        """For loaders that get none."""
        return self.run.collate_fn

    @collate_fn.setter
    def collate_fn(self, value: Callable[..., Any] | None) -> None:
        self.run.collate_fn = value

    @property
    def training_dataloader(self) -> DataLoader[Any] | None:
        """The loader of `training_data`; checkpoints save its position."""
        return self.run.training_dataloader

    @training_dataloader.setter
    def training_dataloader(self, value: DataLoader[Any] | None) -> None:
        self.run.training_dataloader = value

    @property
    def data_position(self) -> Any:
        """The position of the loader in the checkpoint that was loaded last."""
        return self.run.data_position

    @data_position.setter
    def data_position(self, value: Any) -> None:
        self.run.data_position = value

    # ---- accumulation ------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """Calls of `step()`. Setting it also sets the position in the current step: the remainder by its parts."""
        return self.accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.accumulation.micro_steps = value

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the next `step()` updates the parameters."""
        return self.accumulation.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set the boundary explicitly; from then on the micro-step counter is not used for it."""
        self.accumulation.set_gradient_accumulation_boundary(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside need not reduce gradients: stages 0 and 1 add them up on each rank and reduce later.

        Stages 2 and 3 have no room for whole gradients: they still reduce in each backward, with the same results.
        """
        return self.accumulation.no_sync()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for `scaled.backward()` instead of `engine.backward(loss)`.

        Its gradients are also divided by the accumulation steps, as in `engine.backward`. Raises StateError: the loss
        is no scalar with a graph, or there is no optimizer.
        """
        return self.scaling.scale(loss)

    # ---- steps -------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients accumulated since the last step."""
        self.steps.zero_grad(set_to_none)

    def was_step_applied(self) -> bool:
        """True if the last `step()` changed weights: it was on an accumulation boundary and was not skipped."""
        return self.steps.was_step_applied()

    def synchronize(self) -> None:
        """Wait until the last step is complete, later gradients are stored on every tier, and nothing is in flight.

        Raises StorageError: a transfer failed. The next call continues where this one stopped.
        """
        self.steps.synchronize()

    def complete_updates(self, what: str, units: Iterable[int] | None = None) -> None:
        """Wait until these units (None: all) have stored the last step's values.

        Raises StateError: the engine is closed; StorageError: an update failed. `what`: the operation, for the message.
        """
        self.steps.complete_updates(what, units)

    def values_of(self, parameter: nn.Parameter, *, to_change: bool = False) -> ParameterValues:
        """A parameter's exact values, states and gradient after the last step, for `zero.utils.safe_get_full_grad` etc.

        `to_change`: they are going to be replaced, so a background checkpoint is completed first. Raises StateError:
        the engine is closed, or a forward or backward runs; StorageError: the last step could not be completed.
        """
        return self.steps.values_of(parameter, to_change=to_change)

    # ---- offloaded states --------------------------------------------------------------------------

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Copy the engine's states from the device to host memory, and free their device memory.

        States that are on the host or on NVMe stay there. The engine brings states back when it needs them, with a line
        in the log: all of them for a step, a read of values or a save; weights for a forward; weights and gradients for
        a backward. All ranks call this together.

        Args:
            include: states to put away, members of `OffloadStateTypeEnum` or their names; None: everything. Masters and
                optimizer states are stored together: naming one of them moves both.
            device: cpu; none does nothing.
            pin_memory: page-lock the host memory, where there is a GPU.
            non_blocking: no effect: it returns when all is copied, since the device's memory is needed until then.

        Raises:
            ConfigError: an unknown state or device.
            StateError: inside forward, backward or `GatheredParameters`, or the engine is closed.
            BudgetError: the host has no room; nothing has moved.
            StorageError: the last step could not be completed.
        """
        self.offloading.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back everything that `offload_states` has put away, bit for bit; does nothing if nothing is away.

        Args:
            non_blocking: no effect: the call returns when all is copied.

        Raises:
            StateError: the engine is closed.
            BudgetError: the device has no room; everything that is not back is still on the host.
        """
        self.offloading.reload_states(non_blocking)

    @property
    def offloaded_states(self) -> Kinds:
        """The states that `offload_states` has put away and that have not come back since."""
        return self.offloading.offloaded_states

    def state_devices(self, kind: OffloadStateTypeEnum) -> set[torch.device]:
        """The devices that hold this rank's memory of a kind now; NVMe is not among them."""
        return self.offloading.state_devices(kind)

    def replan(self) -> bool:
        """Apply changes of the model now instead of at the next forward. True if there were any.

        Call it before a module is run without the engine's forward (`model.generate`), if its tree has changed.

        All ranks call this together.

        Raises:
            StateError: inside forward, backward or `GatheredParameters`; or ranks have changed their models
                differently, or within a step; or there are snapshots.
            BudgetError: old and new tiered arrays do not fit at the same time, during the change; nothing has changed.
            StorageError: a transfer failed; nothing has changed.
        """
        return self.model_changes.replan()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Inside, the engine's weights are averages, on every tier: to evaluate with, or to save or export.

        They are the moving averages of `ema_decay`, or the averages of AdamWScheduleFree. Both the weights that forward
        uses and their fp32 masters are replaced; a parameter without an update so far is unchanged. Afterwards the
        weights have their old bits again. Inside, training, checkpoints, edits and the optimizer's state dict are
        errors. All ranks call this together.

        Raises:
            StateError: nothing is averaged; inside forward, backward or `GatheredParameters`; the engine is closed.
            StorageError: the last step could not be completed, or a transfer failed; the weights are unchanged.
            BudgetError: there is no room for the masters that are put aside.
        """
        return self.averages.averaged_weights()

    # ---- generation --------------------------------------------------------------------------------

    @property
    def generate(self) -> Callable[..., Any]:
        """The model's own `generate`, inside `generation()`. Raises AttributeError: the model has none.

        With `hybrid_engine`, as many units as fit into the memory that is free now stay on the device, until a forward
        with gradients or a step. If ranks fetch together (stage 3), all of them call it.
        """
        return self.generations.generate

    def generation(self) -> AbstractContextManager[None]:
        """Inside, forwards follow each other with the same weights: `model.generate(...)`, or a loop of your own.

        As many units as fit into `stage3_max_live_parameters` (default: into `memory_budget.device`) are fetched once
        and stay. The rest is streamed for each token; the first units for the next token are prefetched while the last
        units of this token are in use. If all units fit, a token after the first fetches nothing. At the end they are
        released. Results are the same inside and outside; nothing else of the engine changes, and training continues
        as if nothing had been generated. May be nested; a `step()` inside releases the kept units, because it changes
        their values.

        Raises:
            StateError: the engine is closed.
            StorageError: the last step could not be completed.
        """
        return self.generations.generation()

    # ---- data --------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
        *,
        place: tuple[int, int] | None = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's micro-batches; DeepSpeed's name and arguments.

        With several ranks the samples of an epoch are divided among them. If the number of samples is no multiple of
        the ranks, samples from the front are added (or, with `dataloader_drop_last`, the last ones are dropped): a rank
        with one batch less would leave the others waiting. An incomplete last batch is kept (or dropped, likewise); it
        has the same size on every rank.

        The loader has `state_dict` and `load_state_dict` (see `ResumableLoader`), except for an IterableDataset.
        Checkpoints have the position of `engine.training_dataloader` only: if you train on this loader, set it there.

        Args:
            dataset: with `__getitem__` and `__len__`; with one rank also an IterableDataset.
            batch_size: number of samples; None: train_micro_batch_size_per_gpu.
            route: "train" shuffles, "eval" and "predict" keep the order.
            pin_memory: put batches into pinned memory; only with a GPU.
            data_sampler: gives this rank's samples in their order; None: its part of all of them.
            collate_fn: None: the one passed to `zero.initialize`, else torch's.
            num_local_io_workers: number of processes that load; None: none, the training loop loads.
            place: (index, count) of the part of the data; None: (this rank, number of ranks).

        Raises:
            ConfigError: no such route, or data that cannot be divided among the ranks.
        """
        return self.loaders.deepspeed_io(
            dataset, batch_size, route, pin_memory, data_sampler, collate_fn, num_local_io_workers, place=place
        )

    @property
    def curriculum_scheduler_legacy(self) -> Any:
        """The schedule of `curriculum_learning`; None: it is off."""
        return self.schedules.curriculum_scheduler_legacy

    @property
    def progressive_layer_drop(self) -> Any:
        """The schedule of `progressive_layer_drop`; None: it is off."""
        return self.schedules.progressive_layer_drop

    # ---- values ------------------------------------------------------------------------------------

    def full_parameter(self, name: str) -> torch.Tensor:
        """A copy of one parameter's weights, in compute dtype, on the host."""
        return self.values.full_parameter(name)

    def full_master(self, name: str) -> torch.Tensor:
        """A copy of one parameter's fp32 master, on the host."""
        return self.values.full_master(name)

    def full_state(self, name: str) -> dict[str, Any]:
        """Copies of one parameter's states (Adam: `exp_avg`, `exp_avg_sq`; fp32, host), and its `step` count.

        If the optimizer keeps further numbers of a parameter, they are included under their names.
        """
        return self.values.full_state(name)

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, copy of the weights) of every parameter; a tied parameter occurs under each of its names."""
        return self.values.named_full_parameters()

    # ---- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything needed to continue, in the form of torch.distributed.checkpoint. All ranks call this.

        It loads at every stage, on every tier, with any number of ranks, and with plain torch. The checkpoint appears
        complete or not at all, even if the job dies meanwhile.

        Args:
            save_dir: folder of checkpoints, which all nodes see; the checkpoint is `save_dir/tag`.
            tag: its name; None: "global_step" and the number of steps taken. An older one of that name is replaced.
            client_state: any picklable object under any name; `load_checkpoint` returns it. The first rank's counts.
            save_latest: the file `save_dir/latest` names it from now on.
            exclude_frozen_parameters: leave out weights that are not trained.

        Returns:
            True.

        Raises:
            ConfigError: no folder is named; a bad tag, or ranks have different ones and `checkpoint.tag_validation` is
                "fail".
            StorageError: not enough room, or the disk refused; older checkpoints are as they were.
            StateError: inside forward, backward or `GatheredParameters`; or it failed on another rank.
        """
        return self.saves.save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    @property
    def checkpoint_tools(self) -> Mapping[str, str]:
        """Name -> text of scripts that are written into the folder of checkpoints."""
        return self.saves.checkpoint_tools

    @checkpoint_tools.setter
    def checkpoint_tools(self, value: Mapping[str, str]) -> None:
        self.saves.checkpoint_tools = value

    @property
    def files(self) -> Files:
        """The operations on files with which checkpoints are written."""
        return self.saves.files

    @files.setter
    def files(self, value: Files) -> None:
        self.saves.files = value

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        allow_pickle: bool | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Continue from a checkpoint of any stage, tier and number of ranks. All ranks call this.

        Everything is checked before a value changes. Collected gradients are dropped.

        Args:
            load_dir: folder of checkpoints.
            tag: which; None: the one that `latest` names, or the newest complete one; if it is damaged, the next.
            load_module_strict: False loads what fits by name.
            load_optimizer_states: states, step counts, the options of param groups and the loss scale.
            load_lr_scheduler_states: of `engine.lr_scheduler`.
            load_module_only: load weights, buffers and extra states of modules; the returned client state is empty.
            custom_load_fn: not available: must be None.
            allow_pickle: make objects of any class in the client state and in states of schedulers, loaders and
                modules, which can run any code that the folder names. False: only plain values, tensors, and what
                `torch.serialization.add_safe_globals` names. None: as `checkpoint.allow_pickle` says.

        Returns:
            (the folder, the client state); (None, {}) if there is no checkpoint in `load_dir`.

        Raises:
            ConfigError: it is damaged, does not fit, or has an object that is not loaded; says what was expected.
            StorageError: a read failed. Then some values may be the new ones, as after a ConfigError that names a
                checksum, and every other call is refused until a checkpoint is loaded.
            StateError: inside forward, backward or `GatheredParameters`.
        """
        return self.loads.load_checkpoint(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
            allow_pickle,
        )

    def checkpoint_pending(self) -> bool:
        return self.checkpoint_state.checkpoint_pending()

    def wait_for_checkpoint(self) -> None:
        """Return once the checkpoint that is being written is complete.

        Raises StorageError: it could not be written; older checkpoints are as they were. Raises StateError: another
        rank's part could not be written.
        """
        self.checkpoint_state.wait_for_checkpoint()

    @property
    def partially_loaded_folder(self) -> str:
        """The checkpoint of which only a part has been loaded; "" for none."""
        return self.checkpoint_state.partially_loaded_folder

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str | None = MAX_SHARD_SIZE,
    ) -> bool:
        """Write the weights that the model computes with, as files that `from_pretrained` reads.

        All ranks call this, the first one writes. Only a few blocks are in memory at a time. Tied parameters are
        stored once, under their first name; buffers are stored as in a state dict. Files of an earlier model of that
        name in the folder are replaced once the new ones are complete.

        Args:
            save_dir: made if it is not there.
            save_filename: of the file, or of the index. A name that ends in .bin, .pt or .pth ("pytorch_model.bin")
                makes archives of torch.save, which hold tied parameters under all their names.
            exclude_frozen_parameters: leave out weights that are not trained.
            max_shard_size: bytes of a file, or text such as "5GB"; None: one file.

        Returns:
            True; False if nothing was written, since at stage 3 `stage3_gather_16bit_weights_on_model_save` is off.

        Raises:
            StateError: inside forward, backward or `GatheredParameters`.
            StorageError: a transfer failed or the disk has no room; the folder has no new model.
        """
        return self.weights_out.save(save_dir, save_filename, exclude_frozen_parameters, max_shard_size, masters=False)

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "model.safetensors") -> bool:
        """DeepSpeed's old name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def save_fp32_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str | None = MAX_SHARD_SIZE,
    ) -> bool:
        """Like `save_16bit_model`, but writes the exact fp32 masters.

        Weights that are not trained are widened; quantised codes are unchanged. Returns True.
        """
        return self.weights_out.save(save_dir, save_filename, exclude_frozen_parameters, max_shard_size, masters=True)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """The model's own state dict, without offloaded or sharded values; see `_zero3_consolidated_16bit_...`."""
        return self.weights_out.module_state_dict(destination, prefix, keep_vars, exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> OrderedDict[str, torch.Tensor] | None:
        """A state dict of copies in host memory, on the first rank; None on others. All ranks call this.

        Tied parameters are one tensor under each of their names. Works at any stage. Raises StateError: inside forward,
        backward or `GatheredParameters`; StorageError: a transfer failed, on any rank.
        """
        return self.weights_out.consolidated_state_dict(exclude_frozen=exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> OrderedDict[str, torch.Tensor] | None:
        """DeepSpeed's name of `_zero3_consolidated_16bit_state_dict` that does not depend on the stage."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    # ---- snapshots ---------------------------------------------------------------------------------

    def save_snapshot(self) -> int:
        """Commit a snapshot now, independently of `every`, and return its step. All ranks call this together.

        Raises:
            StateError: there is no snapshot block, or gradients have been collected since the last step.
            StorageError: it could not be written; the previous snapshot stays valid.
        """
        return self.snapshots.save_snapshot()

    def load_snapshot(self) -> int | None:
        """Resume from the last committed snapshot; all ranks call this together.

        It restores the state after that step: weights, states, counters, hyper-parameters, the scheduler, random
        numbers, buffers. Gradients that were collected since then are discarded. Everything is read and compared with
        its checksums; only data that lives in memory is copied.

        Returns:
            The snapshot's step; None: there is no snapshot yet, and nothing has changed.

        Raises:
            StateError: there is no snapshot block, it is called inside forward, backward or `GatheredParameters`, or
                the param groups differ; nothing has been read.
            StorageError: a part of it cannot be read, or is damaged; the engine's values are useless then.
            ConfigError: this happened on another rank.
        """
        return self.snapshots.load_snapshot()

    # ---- reports -----------------------------------------------------------------------------------

    @property
    def monitor(self) -> Monitors:
        """Writes metrics to the configured services."""
        return self.reports.monitor

    @monitor.setter
    def monitor(self, value: Monitors) -> None:
        self.reports.monitor = value

    def statistics(self) -> Statistics:
        """Statistics of the run so far."""
        return self.reports.statistics()

    def log_summary(self) -> dict[str, dict[str, int]]:
        """Log the traffic of collectives on this rank so far, and return it: purpose -> calls, elements, bytes.

        With `comms_logger` and its `prof_all` false, only the names in `prof_ops`.
        """
        return self.reports.log_summary()

    @property
    def flops_profiler(self) -> FlopsProfiler:
        """The result of `flops_profiler`: `flops`, `macs` and `params`; 0 before it has run, and on other ranks."""
        return self.reports.flops_profiler

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last step, by `TIMES`; empty without `wall_clock_breakdown`."""
        return self.reports.get_wall_clock_timers()

    # ---- DeepSpeed's calls -------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The given dict, with values for "auto" and the stage. The model's config is `engine.module.config`."""
        return self.calls.config

    @property
    def optimizer(self) -> Any:
        """The second result of `initialize`: the optimizer; None if nothing trains (but see `hooks_for_optimizer`)."""
        return self.calls.optimizer

    @property
    def parameter_offload(self) -> ParameterOffload | None:
        """The handle on the hooks, at stage 3."""
        return self.calls.parameter_offload

    @property
    def hooks_for_optimizer(self) -> bool:
        """`optimizer` is that handle if nothing is trained, as in DeepSpeed."""
        return self.calls.hooks_for_optimizer

    @hooks_for_optimizer.setter
    def hooks_for_optimizer(self, value: bool) -> None:
        self.calls.hooks_for_optimizer = value

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step; the number of micro-batches changes, their size stays.

        Raises ConfigError: it is no multiple of the samples in one micro-batch of every rank.
        """
        self.calls.set_train_batch_size(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward on one rank; the number of micro-batches stays.

        Raises ConfigError: not positive.
        """
        self.calls.set_train_micro_batch_size(micro_batch_size)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Change the micro-batches per step; the size of each stays. Raises ConfigError: not positive."""
        self.calls.set_gradient_accumulation_steps(steps)

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the gradients of the last step, before clipping; None before the first."""
        return self.calls.get_global_grad_norm()

    def set_lr(self, lr: float) -> None:
        """Give every param group this learning rate."""
        self.calls.set_lr(lr)

    def get_lr(self) -> list[float]:
        """Learning rate of each param group."""
        return self.calls.get_lr()

    def get_mom(self) -> list[Any]:
        """The betas or the momentum of each param group."""
        return self.calls.get_mom()

    def empty_partition_cache(self) -> None:
        """Release every gathered weight that is not in use; a later forward fetches it again.

        Raises StateError: the engine is closed, or a forward or backward is running.
        """
        self.calls.empty_partition_cache()

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Have torch compile the model in place, as `engine.module.compile(backend=backend, **compile_kwargs)`.

        Raises ConfigError: `schedule` or `compiled_autograd_enabled`: DeepCompile is not available.
        """
        self.calls.compile(backend, compile_kwargs, **more)

    @property
    def is_compiled(self) -> bool:
        """True once `compile` was called."""
        return self.calls.is_compiled

    # ---- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release everything: hooks, memory, threads, files. The parameters lose their values. Idempotent.

        Raises:
            StorageError: a checkpoint in the background could not be completed. Everything is released all the same.
        """
        run, parts = self.run, self.run.parts
        if parts.storage.io_loop.is_forked:  # a forked child: threads, files and other ranks are the parent's
            return
        was_closed, run.closed = run.closed, True
        self._device_memory.drop_all()
        parts.hooks.remove()
        parts.backward_watch.remove()
        if run.updater is not None:
            run.updater.drop_states()
        if was_closed:  # an interrupt may have stopped the first attempt
            parts.storage.close()
            parts.collectives.close()
            return
        run.detach_finalizer()
        try:
            unsaved = self.checkpoint_state.join()
            self.steps.snapshots.commit_last()
            if not parts.collectives.placement.is_single_rank:  # others may still read this rank's shards
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
