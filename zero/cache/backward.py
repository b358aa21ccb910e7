"""Watches a backward: gradients arrive, gradients pass units, and the backward ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.errors import BudgetError, StateError, StorageError
from offload.system.interrupts import atomic, deferring_interrupts
from zero.cache.coordinator import Coordinator
from zero.optim.gradients import Gradients
from zero.params.binding import UnitBinding
from zero.params.layout import Slot, Unit
from zero.params.managed_parameter import set_torch_gradient, torch_gradient
from zero.params.tiles import ENGINE_HOOK

_RUNNING_BACKWARDS: dict[int, tuple[float, int | None]] = {}
"""id(watch) -> (loss scale, None) for each backward that an engine of this process has begun. If the engine has only
scaled the loss, torch's graph task id replaces None: such a backward may raise without notice, and its entry stays."""


class BackwardCalls(Protocol):
    """What the engine does before and in a backward."""

    def check_open(self, what: str) -> None:
        """Raise StateError if the engine is closed. `what`: the call, for the message."""

    def make_ready_to_run(self, what: str) -> None:
        """`check_open`; on return weights are there and persistent units are bound."""

    def take_user_gradients(self) -> None:
        """Gradients that user code has put into `.grad` replace the collected ones."""

    def on_backward_begin(self) -> None:
        """On return everything that a backward needs is on the device."""

    def should_reduce(self) -> bool:
        """True if gradients of the running backward are reduced as soon as possible."""

    def gradient_divisor(self, is_scaled: bool) -> int:
        """Divisor of the gradients of a backward that the engine has not started; raises if it had to start it."""

    def loss_scale(self) -> float: ...


class RowsInBackward(Protocol):
    """Rows of packed experts that a backward uses."""

    def end_backward(self) -> None:
        """A backward is over: none of its uses is open, even if it has not passed all of them."""


class BackwardWatch:
    """Receives gradients, and calls of the module hooks.

    Attributes:
        graph_version: steps and changes of the model so far; a graph made before the last of them is stale.
        is_torn: since the gradients were last cleared, a backward was aborted, and some of its gradients are missing.
        is_scaled: the engine has scaled and divided the loss of the backward that runs or is about to run.
    """

    def __init__(self, coordinator: Coordinator, gradients: Gradients, steps: BackwardCalls) -> None:
        self._coordinator, self._gradients, self._steps = coordinator, gradients, steps
        self.expert_rows: RowsInBackward | None = None  # Set by the fetcher of rows.
        self._is_running = self._has_gradient = False  # Does a backward run, and has it produced a gradient?
        self._handles: list[RemovableHandle] = []
        self.graph_version = 0
        self.is_torn = self.is_scaled = False
        self._gradient_divisor = 1.0  # Divisor of the gradients of the backward that runs.

    def install(self, bindings: list[UnitBinding], in_tiles: Mapping[int, nn.Parameter]) -> None:
        """Receive the gradient of every parameter.

        Args:
            in_tiles: index -> the model's parameter whose tiles are in `bindings`: it has a gradient of its own if it
                was used while it was gathered.
        """
        pieces: dict[int, list[tuple[Unit, Slot]]] = {}
        for binding in bindings:
            unit = binding.unit
            for slot, parameter in zip(unit.slots, binding.parameters, strict=True):
                self._register_grad_hook(parameter, [(unit, slot)], unit.trainable)
                pieces.setdefault(slot.index, []).append((unit, slot))
        for index, parameter in in_tiles.items():
            self._register_grad_hook(parameter, pieces[index], pieces[index][0][0].trainable)

    def _register_grad_hook(self, parameter: nn.Parameter, pieces: list[tuple[Unit, Slot]], trainable: bool) -> None:
        trained = parameter.requires_grad
        if trained or trainable:
            parameter.requires_grad_(True)  # torch requires it for the hook; a frozen parameter may be thawed later
            with torch._C.DisableTorchFunctionSubclass():
                handle = parameter.register_post_accumulate_grad_hook(self._make_grad_hook(pieces))  # type: ignore[no-untyped-call]
            self._handles.append(handle)
            parameter.requires_grad_(trained)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def outermost_backward(self, *, interleaved: bool = False) -> Iterator[None]:
        """The engine runs a backward inside this context; at its end the backward is over, failed or not.

        `interleaved`: the backward of several micro-batches, which pass each unit one after the other.
        """
        self.end_failed_backward()
        self._gradient_divisor, aborted = 1.0, interleaved
        with deferring_interrupts:
            self._begin_backward(interleaved=interleaved)
            _RUNNING_BACKWARDS[id(self)] = self._steps.loss_scale(), None
        try:
            with self.tearing():
                yield
            aborted = False
        except BaseException:
            self.is_torn |= self._has_gradient
            raise
        finally:
            with deferring_interrupts:
                self._is_running = False
                self._end_backward(aborted=aborted)

    def mark_torn(self) -> None:
        """A backward cannot get something it needs: the gradients it has not reached will be missing."""
        self.is_torn = True

    @contextmanager
    def tearing(self) -> Iterator[None]:
        """Wrap code that autograd calls: if it raises, autograd stops, and gradients not yet reached are missing."""
        try:
            yield
        except (StorageError, BudgetError, torch.OutOfMemoryError):
            self.is_torn = True
            raise

    def begin_scaled(self) -> None:
        """A backward begins whose loss the engine has scaled and divided.

        It is noted here, in the outermost graph: a backward inside a reentrant checkpoint ends with the checkpoint.
        """
        self.is_scaled = True
        self._note_backward()

    def before_backward(self, graph_version: int) -> None:
        """Gradients reach a graph that was made at `graph_version`.

        Raises StateError: the graph is stale, or the engine is closed.
        """
        self._steps.check_open("backward")
        if graph_version != self.graph_version:
            raise StateError(
                "backward: this graph was made before the last step() or change of the model, and its weights have "
                "changed since; run the forward again"
            )
        self._note_backward()

    def on_unit_passed(self, index: int) -> None:
        """Gradients have passed a call that uses the unit: this call needs the unit no longer."""
        with self.tearing():
            if self._coordinator.end_backward_use(index):
                self._gradients.on_unit_backward_end(index)

    def on_forward_begin(self) -> None:
        """The root is called outside any backward, so no backward can be running, even if the last one raised.

        Exception: with micro-batches side by side the backward of another micro-batch may have begun.
        """
        if not self._gradients.is_interleaved:
            self.end_failed_backward()
        self._steps.make_ready_to_run("forward")
        if torch.is_grad_enabled():
            self._steps.take_user_gradients()  # gradients of a `loss.backward()` are added to those of the user

    @atomic
    def end_failed_backward(self) -> None:
        """End a backward that raised: torch drops the callback that would have ended it, and the error."""
        if self._is_running and torch._C._current_graph_task_id() < 0:
            self._is_running = False
            self.is_torn |= self._has_gradient
            self._end_backward()

    def _note_backward(self) -> None:
        """Note a backward that the engine did not start (`loss.backward()`), and queue a callback for its end."""
        if self._is_running:
            return
        self._steps.take_user_gradients()  # a second backward of one forward adds to it too
        graph_task = torch._C._current_graph_task_id()
        others = [
            scale
            for watch, (scale, task) in _RUNNING_BACKWARDS.items()
            if watch != id(self) and task in (None, graph_task)
        ]
        if others and not self.is_scaled:  # another engine has divided the loss, and uses its own loss scale
            self._gradient_divisor = others[-1] / self._steps.loss_scale()
        else:
            self._gradient_divisor = self._steps.gradient_divisor(self.is_scaled)
        self._begin_backward()
        if self.is_scaled:
            _RUNNING_BACKWARDS[id(self)] = self._steps.loss_scale(), graph_task

        @atomic
        def on_autograd_end() -> None:
            self._is_running = False
            self._end_backward()

        torch.autograd.Variable._execution_engine.queue_callback(on_autograd_end)

    def _begin_backward(self, *, interleaved: bool = False) -> None:
        self._is_running, self._has_gradient = True, False
        self._steps.on_backward_begin()
        self._gradients.begin_backward(boundary=self._steps.should_reduce(), interleaved=interleaved)

    def _end_backward(self, *, aborted: bool = False) -> None:
        """`aborted`: the gradients will be dropped, and no collective is started for them."""
        self.is_scaled, self._gradient_divisor = False, 1.0
        _RUNNING_BACKWARDS.pop(id(self), None)
        try:
            if aborted:
                self._gradients.abort_backward()
            else:
                self._gradients.end_backward()
        finally:
            self._coordinator.end_backward()
            if self.expert_rows is not None:
                self.expert_rows.end_backward()

    def _make_grad_hook(self, pieces: list[tuple[Unit, Slot]]) -> Callable[[nn.Parameter], None]:
        # Weak: torch keeps these hooks where Python's collector does not look; they must not keep the engine alive.
        watch_reference = weakref.ref(self)

        @atomic
        def receive(parameter: torch.Tensor) -> None:
            watch = watch_reference()
            gradient = torch_gradient(parameter)
            set_torch_gradient(parameter, None)
            if watch is None or gradient is None or not pieces[0][0].trainable:
                return
            if gradient.is_sparse:  # an embedding with sparse=True; arrays of gradients are dense
                gradient = gradient.to_dense()
            if len(pieces) == 1:
                watch._receive(pieces[0][0], pieces[0][1].position, gradient)
                return
            for unit, slot in pieces:
                part = gradient.flatten()[slot.first_numel : slot.first_numel + slot.numel]
                watch._receive(unit, slot.position, part.view(slot.shape))

        setattr(receive, ENGINE_HOOK, True)
        return receive

    def receive_rows(self, unit: Unit, position: int, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take the gradient of some rows of a parameter; the other rows have gradient zero, as autograd makes it."""
        self._receive(unit, position, gradient, rows)

    def on_rows_passed(self, index: int) -> None:
        """Gradients have passed a call that used rows of the unit."""
        with self.tearing():
            self._gradients.on_unit_backward_end(index)

    def _receive(self, unit: Unit, position: int, gradient: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        self._note_backward()
        self._has_gradient = True
        with self.tearing():
            if self._gradients.add_gradient(unit.index, position, gradient, rows, self._gradient_divisor):
                self._gradients.on_unit_backward_end(unit.index)
