"""The engine: a model, its optimizer and the loop users know, over whatever tiers the plan chose."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from offload.binding import Poison
from offload.errors import StateError
from offload.pinned import keep_freed_memory, return_freed_memory
from offload.stats import Stopwatch
from offload.threads import update_threads
from zero.accessors import ConfigAccessors, ValueAccessors
from zero.adoption import Adoption, read_parameter
from zero.backward import BackwardWatch
from zero.config import Config
from zero.covering import cover_model
from zero.editing import UnitEditor
from zero.keeping import EngineKeeper, take_back
from zero.machine import read_machine
from zero.optim.behind import DueUpdates
from zero.optim.gradients import Gradients
from zero.optim.inside import UpdatesInBackward
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.pipeline import StepArguments, SubGroupPipeline
from zero.optim.step import Stepper
from zero.params.binding import BoundUnit
from zero.params.buffers import move_buffers
from zero.params.initialisation import forget, provisional_source
from zero.params.layout import Slot, Unit, build_layout
from zero.params.units import CoveredUnit, collect_leaves, nested_numel
from zero.planner import Planner
from zero.schedule.coordinator import Coordinator
from zero.schedule.hooks import ModuleHooks
from zero.schedule.loading import Loader
from zero.statistics import LoopCounters, Statistics, collect
from zero.storage import Storage
from zero.tracing import Traced, Tracer, traced

logger = logging.getLogger("zero")


class ZeroEngine(ConfigAccessors, ValueAccessors, Traced, nn.Module):
    """What `zero.initialize` returns first; a drop-in for DeepSpeed's engine.

    Args:
        model: the module to train; it becomes `engine.module`.
        groups: torch-style param groups; None trains nothing (evaluation only).
        config: validated configuration.
        device: where units are computed on.
    """

    def __init__(
        self, model: nn.Module, groups: list[dict[str, Any]] | None, config: Config, device: torch.device
    ) -> None:
        super().__init__()
        self._closed = False
        self._config, self.device = config, device
        self._in_place = os.environ.get("ZERO_NO_ALIAS", "0") in ("", "0")
        self._threads = max(torch.get_num_threads(), 1)
        self._leaves = collect_leaves(model)
        self._index_of = {id(leaf.parameter): leaf.index for leaf in self._leaves}
        self.optimizer = ZeroOptimizer(groups, self._optimizer_step, self.zero_grad) if groups else None
        if self.optimizer is not None and groups is not None:
            self.optimizer.param_groups = groups
        self.lr_scheduler: Any = None
        trainable = {id(p) for group in groups or () for p in group["params"]}
        covered = cover_model(model, self._leaves, trainable, config)
        self._layout = build_layout([unit.content for unit in covered], world_size=1)
        take_back(leaf.parameter for leaf in self._leaves)
        self.plan = Planner(
            self._layout, config, read_machine(device), device, self._in_place, nested_numel(covered, self._layout)
        ).make()
        logger.info("%s", self.plan.table())
        self._storage = Storage(self._layout, self.plan, config, device)
        # Users of DeepSpeed rarely close an engine: one that is dropped gives its files and threads back too.
        self._finalizer = weakref.finalize(self, Storage.abandon, self._storage)
        try:
            self._tracer = Tracer(self._storage)
            self._build(model, covered)
        except BaseException:
            self._undo_build()
            raise
        self.module = model
        self.train(model.training)

    # ---- construction -------------------------------------------------------------------------

    def _build(self, model: nn.Module, covered: list[CoveredUnit]) -> None:
        layout, storage, device = self._layout, self._storage, self.device
        poison = Poison(max((unit.nbytes for unit in layout.units), default=1), device)
        self._bound = [
            BoundUnit(unit, [self._leaves[slot.index].parameter for slot in unit.slots], poison, device)
            for unit in layout.units
        ]
        self._gradients = Gradients(layout, storage, device, self._in_place, self._threads)
        pipeline = SubGroupPipeline(layout, storage, self._gradients)
        updates = DueUpdates(layout, storage, pipeline, update_threads(layout.numel, self._threads))
        self._ahead = None
        if self.plan.two_slots:
            self._ahead = UpdatesInBackward(
                storage, pipeline, updates, self._gradients, self._arguments_now, self.is_gradient_accumulation_boundary
            )
        self._stepper = Stepper(layout, storage, self._gradients, pipeline, updates, self._ahead)
        self._gradients.update = self._stepper.apply
        loader = Loader(layout, self._bound, storage, updates, self._in_place, self._changed)
        self._coordinator = Coordinator(layout, self._bound, storage, self.plan.limits, loader)
        scopes: dict[nn.Module, list[int]] = {}
        for index, unit in enumerate(covered):
            for module in unit.scopes:
                scopes.setdefault(module, []).append(index)
        self._watch = BackwardWatch(self._coordinator, self._gradients, self._ahead, self._check_open)
        self._hooks = ModuleHooks(model, scopes, self._bound, self._coordinator, self._watch, storage.timeline)
        editor = UnitEditor(layout, self._bound, storage, self._coordinator, self._changed)
        self._keeper = EngineKeeper(self, self._bound, self._coordinator, self._hooks, editor)
        self._adopt()
        self._hooks.install()
        move_buffers(model, device, torch.bfloat16 if self._config.bf16.enabled else None)
        self._coordinator.bind_persistent()
        self._watch.install(self._bound)
        self._forward, self._backward, self._step = Stopwatch(), Stopwatch(), Stopwatch()
        self.global_steps = self.micro_steps = 0
        self._boundary: bool | None = None
        self._step_asked = self._step_counted = False
        self._persistent_bound = True

    def _undo_build(self) -> None:
        """Initialisation failed: the model gets back what the planes have taken, and no hook stays."""
        self._closed = True
        try:
            if hasattr(self, "_keeper"):
                self._hooks.remove()
                self._keeper.return_values()
        finally:
            self._finalizer.detach()
            self._storage.close()

    def _adopt(self) -> None:
        def read(parameter: nn.Parameter, begin: int, end: int) -> torch.Tensor:
            keeper = provisional_source(parameter)
            return keeper.read(parameter, begin, end) if keeper else read_parameter(parameter, begin, end)

        def done(bound: BoundUnit, slot: Slot) -> None:
            forget(self._leaves[slot.index].parameter)
            bound.adopt(slot, self._keeper)

        Adoption(self._layout, self._bound, self._storage, read, done).run()
        return_freed_memory()
        keep_freed_memory()

    # ---- the training loop --------------------------------------------------------------------

    @traced("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; arguments are passed on untouched."""
        self.ready("forward")
        try:
            with self._forward.running():
                return self.module(*args, **kwargs)
        except BaseException:
            # torch calls no hooks for an interrupt: uses would stay open for ever.
            self._hooks.reset()
            raise

    @traced("backward")
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of one micro-batch; divides the loss by the accumulation steps unless told not to.

        Raises:
            StateError: the graph was made before the last step, or the engine is closed.
            StorageError: a transfer failed.
        """
        self.ready("backward")
        accumulation = self._config.gradient_accumulation_steps
        if scale_wrt_gas and accumulation > 1:
            loss = loss / accumulation
        with self._backward.running():
            self._coordinator.accumulating = not self.is_gradient_accumulation_boundary()
            with self._watch.outermost():
                loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return loss

    @traced("step")
    def step(self) -> None:
        """On an accumulation boundary: norm, clipping, and the update of every sub-group. Else only counts.

        Returns once the step is fixed. Sub-groups are updated in the order the next forward needs them; whoever
        looks at a value before waits for it.

        Raises:
            StorageError: a transfer failed. The step is kept and taken by the next call of the engine; calling
                `step()` again is such a call, and no second step.
        """
        self._check_open("step")
        if not (self._step_asked or self.is_gradient_accumulation_boundary()):
            self._take_step()  # what an earlier call has left; if it raises, this call has not happened
            self.micro_steps += 1
            return
        if not self._step_asked:
            self._ask_for_step()
            self.micro_steps += 1
        self._take_step()

    def synchronize(self) -> None:
        """Wait until the last step is complete and the gradients since are stored, on every tier.

        Raises:
            StorageError: a transfer failed. The next call goes on where this one stopped.
        """
        self.ready("synchronize")
        self._stepper.finish()
        self._gradients.settle()

    def is_gradient_accumulation_boundary(self) -> bool:
        """True when the next `step()` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._config.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say so from outside; from then on the micro-step counter decides nothing."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated since the last step."""
        if not self._closed:
            self._take_step()
            self._changed()
            self._gradients.clear()
            self._watch.torn = False

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the gradients of the last step, before clipping; None before the first."""
        return self._stepper.norm

    @traced("step")
    def _optimizer_step(self) -> None:
        """`optimizer.step()`: a step now, whatever the micro-step counter says."""
        self._check_open("optimizer.step")
        if not self._step_asked:
            self._ask_for_step()
        self._take_step()

    def _ask_for_step(self) -> None:
        """Take note of a step that is legal now. From here on it will be taken, whatever fails meanwhile."""
        if self.optimizer is None:
            raise StateError("step: the engine was made without an optimizer; add one to the config or pass one")
        if self._keeper.editing:
            raise StateError("step: inside GatheredParameters; the weights would change under the gathered copy")
        if self._watch.torn:
            raise StateError(
                "step: a transfer failed inside the last backward, so some gradients are missing; call zero_grad() and "
                "run forward and backward again"
            )
        self._watch.end_stray()
        self._coordinator.check_idle()
        self._stepper.decided = self._step_counted = False
        self._step_asked = True

    def _take_step(self) -> None:
        """Do what an earlier call had to leave undone: edits first, they came before the step."""
        with self._step.running():
            self._stepper.check()
            self._keeper.store_edits()
            if self._step_asked and self.optimizer is not None:
                self._fix_step(self.optimizer)
                self._stepper.start()
                self._step_asked = False
                self._coordinator.expect_forward()

    def _arguments_now(self) -> StepArguments:
        everything = set(self._index_of.values())
        values = {} if self.optimizer is None else self.optimizer.values(self._index_of, everything)
        return StepArguments(values, 1.0, self.global_steps + 1)

    def _changed(self, index: int | None = None) -> None:
        """A unit (None: all) changes by other means than a step: what was done ahead of it is worth nothing."""
        if self._ahead is not None:
            self._ahead.void_all() if index is None else self._ahead.void(index)

    def _fix_step(self, optimizer: ZeroOptimizer) -> None:
        """Decide everything about the step, and count it; once, also if an interrupt makes it two attempts."""
        if self._step_counted:
            return
        self._persistent_bound = False
        self._coordinator.release_all()
        number = self.global_steps + 1
        self._stepper.fix(number, optimizer, self._index_of, self._config.gradient_clipping)
        self._step_counted = True
        self._watch.generation += 1
        self.global_steps = number
        optimizer.mark_stepped()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def ready(self, what: str) -> None:
        """Raise if the engine is closed; take a step that was asked for; bind what is always bound.

        Raises:
            StateError: closed.
            StorageError: an update of the last step failed and nobody was told yet, or it fails again.
        """
        self._check_open(what)
        self._take_step()
        if not self._persistent_bound:
            self._stepper.apply_persistent()
            self._coordinator.bind_persistent()
            self._persistent_bound = True

    def current(self, what: str, units: Iterable[int] | None = None) -> None:
        """`ready`, and these units (None: all) are stored as of the last step. As `ready`, raises."""
        self.ready(what)
        self._stepper.finish(units)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise StateError(f"{what}: the engine is closed")

    # ---- looking at values --------------------------------------------------------------------

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units of the model, in model order."""
        return self._layout.units

    def inject(self, fault: Any) -> None:
        """Inject I/O faults (an `offload.aio.AioFault`, None to stop): for tests of what happens then."""
        if self._storage.disk is not None:
            self._storage.disk.aio.inject(fault)

    def statistics(self) -> Statistics:
        """What was done so far."""
        return collect(
            self._coordinator.counters,
            self._storage,
            [unit.name for unit in self._layout.units],
            LoopCounters(
                self.global_steps,
                self.micro_steps,
                self._forward.seconds,
                self._backward.seconds,
                self._step.seconds,
                self._ahead.committed_numel if self._ahead is not None else 0,
            ),
        )

    # ---- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back: hooks, memory, threads, files. The parameters' values are gone. Idempotent."""
        begun, self._closed = self._closed, True
        self._hooks.remove()
        self._watch.remove()
        if begun:  # an interrupt may have stopped the first attempt
            self._storage.close()
            return
        self._finalizer.detach()
        try:
            self._stepper.stop()
            self._changed()
            self._gradients.clear()
            self._hooks.reset()
            self._coordinator.end_backward()
            self._coordinator.release_all()
        finally:
            self._storage.close()
            return_freed_memory()
        logger.debug("engine closed after %d steps", self.global_steps)

    def destroy(self) -> None:
        """DeepSpeed's name for `close`."""
        self.close()

    def __enter__(self) -> ZeroEngine:
        """The engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Unknown names are the model's: `engine.generate`, `engine.config`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and name != "module":
                return getattr(modules["module"], name)
            raise
