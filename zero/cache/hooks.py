"""Hooks that turn module calls and autograd events into uses of units.

[Note: what a use is] In forward, a use of a unit lasts from the outermost call of a module that owns one of its
parameters to that call's return. In backward it lasts from the moment gradients reach such a call to the moment they
have passed it (see autograd_markers.py). A module may borrow weights: it reads another module's parameter directly.
Then the innermost open call uses them; or a single operation, if only its result needs them, as in
`sum(p.square().sum() for p in model.parameters())`. A forward inside a backward (recomputation) ends no use.

[Note: transforms] Inside a transform of torch.func we cannot see gradients pass, because torch refuses our marker
nodes. Units used there stay until the end of the next backward, or until the next step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.array.saved_views import version_of
from offload.system.interrupts import atomic
from offload.timeline import COMPUTE, Timeline
from zero.cache.autograd_markers import join_outputs, make_sentinel, replace_tensors, tensors_in
from zero.cache.backward import BackwardWatch
from zero.cache.compiling import (
    graph_break_hook,
    is_in_transform,
    outside_transforms,
    register_numbered,
    skip_when_compiling,
)
from zero.cache.coordinator import Coordinator
from zero.cache.micro_batch_scheduler import MicroBatchScheduler, OpenCall, OpenCalls
from zero.params.binding import UnitBinding
from zero.params.units import can_root

FORWARD, BACKWARD = "forward", "backward"
"""Why a round of micro-batches pins a unit."""


def in_backward() -> bool:
    """True inside an autograd backward, and therefore also in the forward of a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def count_open_calls(module: nn.Module) -> int:
    """How many calls of the module are on the stacks of this process's threads."""
    count = 0
    for frame in sys._current_frames().values():
        while frame is not None:
            name = frame.f_code.co_name  # a compiled call goes on in functions named after it, without its variables
            is_call = name == "_call_impl" or "resume_in__call_impl" in name
            is_of_module = is_call and frame.f_locals.get("self", module) is module
            count, frame = count + is_of_module, frame.f_back  # type: ignore[assignment]
    return count


class _WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters` that reports each read of a parameter."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], on_read: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._on_read = on_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None and not torch.compiler.is_compiling():
            self._on_read(parameter)
        return parameter

    def __reduce__(self) -> Any:
        """Copies and pickles are plain dicts."""
        return dict, (dict(self),)


def _modules_around_units(root: nn.Module, fetched: dict[nn.Module, set[int]]) -> set[nn.Module]:
    """Modules around fetched units or next to them: units that such a module borrows are in use until it returns.

    `fetched`: scope -> its units that are fetched and evicted.
    """
    if not any(fetched.values()):
        return set()
    below: dict[nn.Module, set[int]] = {}

    def units_below(module: nn.Module) -> set[int]:
        if module not in below:
            below[module] = set().union(*(units_below(c) | fetched.get(c, set()) for c in module.children()))
        return below[module]

    modules: set[nn.Module] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        own = fetched.get(module)
        if module not in modules and not (own and units_below(module) <= own):
            pending += module.children()
        modules.add(module)
    return {module for module in modules if can_root(module)}


class ExpertDispatch(Protocol):
    """Has the model's packed experts fetched by rows."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


class ModuleHooks:
    """Installs and removes the hooks of one model.

    `root`: the model; its forward bounds the trace. `scopes`: module -> indices of the units that its calls use.
    `expert_dispatch`: it is installed and removed with the hooks.
    """

    def __init__(
        self,
        root: nn.Module,
        scopes: dict[nn.Module, list[int]],
        bindings: list[UnitBinding],
        coordinator: Coordinator,
        backward_watch: BackwardWatch,
        scheduler: MicroBatchScheduler,
        timeline: Timeline,
        expert_dispatch: ExpertDispatch,
    ) -> None:
        self._root, self._bindings, self._scheduler = root, bindings, scheduler
        self._expert_dispatch = expert_dispatch
        fetched = {module: {i for i in units if not bindings[i].unit.persistent} for module, units in scopes.items()}
        outside = _modules_around_units(root, fetched)
        self._scopes = {root: [], **{module: [] for module in outside}, **scopes}
        # Modules inside a fetched one that have only persistent units: their hooks matter when they are called alone.
        self._persistent_only = {module for module, units in fetched.items() if not units} - outside - {root}
        self._coordinator, self._backward_watch, self._timeline = coordinator, backward_watch, timeline
        self._names = {module: name or type(module).__name__ for name, module in root.named_modules()}
        self._unit_of = {id(p): binding.unit.index for binding in bindings for p in binding.parameters}
        self._handles: list[RemovableHandle] = []
        # Modules whose parameters are watched; some may have left the tree since.
        self._watched_modules: list[nn.Module] = []
        self._is_suspended = False

    @property
    def _open_calls(self) -> OpenCalls:
        return self._scheduler.task.open_calls

    @property
    def _calls(self) -> list[OpenCall]:
        return self._scheduler.task.open_calls.calls

    @property
    def in_forward(self) -> bool:
        self._forget_interrupted()
        return self._scheduler.open_root_calls > 0

    @property
    def in_call(self) -> bool:
        return bool(self._calls)

    def install(self) -> None:
        """Install the hooks; the values of the model are in the engine already."""
        self._handles.append(self._root.register_forward_pre_hook(graph_break_hook(self._begin_root), prepend=True))
        enclosed, number = self._enclosed_modules(), RemovableHandle.next_id
        for module, units in self._scopes.items():
            make_hook = skip_when_compiling if module in enclosed else graph_break_hook
            pre, post = make_hook(self._pre_forward(units)), make_hook(self._post_forward(units))
            first = module is not self._root  # the root's own hook above comes before
            before = register_numbered(module.register_forward_pre_hook, pre, number, with_kwargs=True, prepend=first)
            # First, before users' hooks: outputs that they capture are joined then, so a loss on them gets the weights.
            after = register_numbered(
                module.register_forward_hook, post, number, with_kwargs=True, prepend=True, always_call=True
            )
            self._handles += [before, after]
        self._handles.append(self._root.register_forward_hook(graph_break_hook(self._end_root), always_call=True))
        for module in self._root.modules():
            # Python code does not read the parameters of a ScriptModule, and its dict cannot be replaced.
            if module._parameters and not isinstance(module, torch.jit.ScriptModule):
                module._parameters = _WatchedParameters(module._parameters, self._on_parameter_read)
                self._watched_modules.append(module)
        self._expert_dispatch.install()

    def suspend(self) -> None:
        """Remove every hook until `resume`. Idempotent."""
        if self._handles:
            self.reset()
            self.remove()
            self._is_suspended = True

    def resume(self) -> None:
        """Install the hooks again if `suspend` removed them."""
        if self._is_suspended:
            self._is_suspended = False
            self.install()

    def _enclosed_modules(self) -> set[nn.Module]:
        """Modules whose units all have another scope around them: their calls begin and end no use."""
        around: set[tuple[nn.Module, int]] = set()
        for module, units in self._scopes.items():
            below = [child for child in module.modules() if child is not module and child in self._scopes]
            around.update((child, index) for child in below for index in units)
        return {
            module
            for module, units in self._scopes.items()
            if module is not self._root and all((module, index) in around for index in units)
        }

    def remove(self) -> None:
        self._is_suspended = False
        self._expert_dispatch.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._watched_modules:
            if isinstance(module._parameters, _WatchedParameters):
                module._parameters = dict(module._parameters)
        self._watched_modules.clear()

    @atomic
    def reset(self) -> None:
        """Forget the open calls: a forward was interrupted, so none is running."""
        self._scheduler.open_root_calls = self._open_calls.root_depth = 0
        self._open_calls.clear()
        self._coordinator.end_forward()

    def _forget_interrupted(self, uncounted_calls: int = 0) -> None:
        """Forget calls that an interrupt has ended: torch calls no hooks then, nor for a call past the engine.

        `uncounted_calls`: calls of the root that are not counted yet.
        """
        depth, calls = self._open_calls.root_depth, self._calls
        if self._scheduler.is_active or not (depth or calls):
            return
        if depth > count_open_calls(self._root) - uncounted_calls or not (depth or count_open_calls(calls[-1].module)):
            self.reset()

    @atomic
    def borrow(self, index: int) -> None:
        """The innermost open call uses the unit although its module does not own it."""
        if in_backward():
            joined = [call for call in self._calls[-1:] if index not in call.units]
            with outside_transforms(), self._backward_watch.tearing():
                self._coordinator.begin_recompute(index, by_call=any(call.recompute for call in joined))
            for call in joined:  # it stays until gradients have passed this call
                call.units.append(index)
                self._make_sentinel_once(call)
        elif self._calls and not self._is_in_use(index):
            self._begin_use_in_graph(index, self._calls[-1])

    def _is_in_use(self, index: int) -> bool:
        """True while an open call of this forward uses the unit, and always for a persistent unit."""
        operation = self._open_calls.operation
        if self._bindings[index].unit.persistent or (operation is not None and index in operation.forward_uses):
            return True
        return any(index in call.forward_uses for call in self._calls)

    def _begin_use_in_graph(self, index: int, call: OpenCall) -> None:
        """A forward use of the unit that ends with the call."""
        self._begin_use(index, call)
        self._make_sentinel_once(call)

    def _begin_use(self, index: int, call: OpenCall) -> None:
        follows, end = torch.is_grad_enabled(), self._coordinator.end_forward_use
        with outside_transforms() as inside_transform:
            self._coordinator.begin_forward_use(index, backward_follows=follows)
            is_fetched = not self._bindings[index].unit.persistent
            if is_fetched and self._scheduler.pin_once((FORWARD, index), lambda: end(index, backward_follows=follows)):
                self._coordinator.begin_forward_use(index, backward_follows=follows)
            if inside_transform:
                self._coordinator.note_read(index)
        call.forward_uses.append(index)
        call.units.append(index)

    def _end_uses(self, call: OpenCall) -> None:
        with outside_transforms():
            for index in reversed(call.forward_uses):  # the use that began first encloses the others
                if (
                    self._scheduler.is_active
                    and not self._scheduler.is_pinned((FORWARD, index))
                    and self._coordinator.is_last_use(index)
                ):
                    self._scheduler.unpin(FORWARD)  # uses that the round pins are inside this use, so they end first
                self._coordinator.end_forward_use(index, backward_follows=torch.is_grad_enabled())

    @atomic
    def begin_operation(self, index: int) -> None:
        """An operation inside a call reads the unit without its owning module; `end_operation` follows it."""
        if in_backward() or self._is_in_use(index):
            self.borrow(index)
            return
        self._open_calls.operation = self._open_calls.operation or OpenCall(self._calls[-1].module, recompute=False)
        self._begin_use_in_graph(index, self._open_calls.operation)

    @atomic
    def end_operation(self, inputs: list[Any], result: Any) -> Any:
        """The operation is over; returns its result, joined so that we see its gradients.

        The units are evicted, and fetched again for its backward. In some cases they stay until the innermost call
        returns: the result is a view of them, or the operation has changed its input, or it has no result.
        """
        operation, self._open_calls.operation = self._open_calls.operation, None
        if operation is None:
            return result
        tensors = tensors_in(result)
        stays = result is None or any(
            any(tensor is old for old in inputs) or self._is_memory_of(operation.units, tensor) for tensor in tensors
        )
        if operation.sentinel is not None and not stays:
            result = join_outputs(operation.sentinel, result, self._reached_callback(operation))
        operation.drop_graph()
        for index in operation.forward_uses if stays else ():
            self._begin_use_in_graph(index, self._calls[-1])  # before the operation's own use ends
        self._end_uses(operation)
        return result

    def _is_memory_of(self, units: list[int], tensor: torch.Tensor) -> bool:
        return not is_in_transform() and any(self._bindings[index].contains(tensor) for index in units)

    def _on_parameter_read(self, parameter: nn.Parameter) -> None:
        """`module.weight` was read; outside a forward this has no effect."""
        index = self._unit_of.get(id(parameter))
        if index is not None and self._calls:
            self.borrow(index)

    def _begin_root(self, module: nn.Module, args: Any) -> None:
        if in_backward() or module is not self._root:
            return
        self._forget_interrupted(uncounted_calls=1)
        self._open_calls.root_depth += 1
        if self._open_calls.root_depth == 1:
            self._open_calls.backward_follows = follows = torch.is_grad_enabled()
            self._scheduler.open_root_calls += 1
            if self._scheduler.open_root_calls > 1:
                return
            with outside_transforms():
                self._backward_watch.on_forward_begin()
                self._coordinator.begin_forward(training=module.training, backward_follows=follows)

    def _end_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or module is not self._root:
            return
        self._open_calls.root_depth = max(self._open_calls.root_depth - 1, 0)
        if self._open_calls.root_depth == 0:
            self._open_calls.clear()
            self._scheduler.open_root_calls = max(self._scheduler.open_root_calls - 1, 0)
            if self._scheduler.open_root_calls:
                return
            # A forward without gradients runs again soon, for the next token or batch.
            with outside_transforms():
                self._scheduler.unpin(FORWARD)
                self._coordinator.end_forward(None if self._open_calls.backward_follows or output is None else "eval")

    def _pre_forward(self, units: list[int]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module not in self._scopes:
                return  # a copy of one of our modules, with its hooks: it has parameters of its own
            if self._calls and module in self._persistent_only:
                return
            call = OpenCall(module, in_backward())
            self._yield_to_others(units)
            self._calls.append(call)
            for index in units:
                if call.recompute:
                    with outside_transforms(), self._backward_watch.tearing():
                        self._coordinator.begin_recompute(index, by_call=True)
                        self._pin_in_backward(index)
                    call.units.append(index)
                else:
                    self._begin_use(index, call)
            call.forward_ns = time.perf_counter_ns()
            if torch.is_grad_enabled() and units and not is_in_transform():
                call.versions = [(t, version_of(t), t.grad_fn) for t in tensors_in((args, kwargs), 2)]
                self._make_sentinel(call)

        return hook

    def _yield_to_others(self, units: list[int]) -> None:
        """Micro-batches side by side: before a unit that none of them uses is begun, the others compute."""
        if self._scheduler.is_active and not all(self._coordinator.is_used(index) for index in units):
            self._scheduler.yield_to_next()

    def _pin_in_backward(self, index: int) -> None:
        if self._scheduler.pin_once((BACKWARD, index), lambda: self._backward_watch.on_unit_passed(index)):
            self._coordinator.begin_backward_use(index)

    def _make_sentinel_once(self, call: OpenCall) -> None:
        if torch.is_grad_enabled() and call.sentinel is None and not is_in_transform():
            self._make_sentinel(call)

    def _make_sentinel(self, call: OpenCall) -> None:
        call.sentinel = make_sentinel(self._passed_callback(call), self._coordinator.device)

    def _post_forward(self, units: list[int]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not self._calls or self._calls[-1].module is not module:
                return None  # another hook raised before ours saw the call begin
            call = self._calls.pop()
            self._add_span("recompute" if call.recompute else "forward", call, call.forward_ns)
            if output is not None:
                output = self._clone_views(call, output)
            if call.sentinel is not None and torch.is_grad_enabled():
                on_reached = self._reached_callback(call)
                if output is not None:
                    output = join_outputs(call.sentinel, output, on_reached)
                self._hook_modified_inputs(call, on_reached)
            call.drop_graph()
            if call.recompute:
                with outside_transforms():
                    self._coordinator.end_recompute(call.units)
            self._end_uses(call)
            return output

        return hook

    def _passed_callback(self, call: OpenCall) -> Callable[[], None]:
        @atomic
        def on_passed() -> None:
            self._add_span("backward", call, call.backward_ns)
            call.backward_ns = 0  # a retained graph may run backward again
            with outside_transforms():
                for index in call.units:
                    self._backward_watch.on_unit_passed(index)

        return on_passed

    def _add_span(self, what: str, call: OpenCall, begin_ns: int) -> None:
        if self._timeline.is_on and call.units and begin_ns:
            self._timeline.add(
                COMPUTE, f"{what} {self._names.get(call.module) or self._bindings[call.units[0]].unit.name}", begin_ns
            )

    def _reached_callback(self, call: OpenCall) -> Callable[[], None]:
        graph_version, watch, coordinator = self._backward_watch.graph_version, self._backward_watch, self._coordinator

        @atomic
        def on_reached() -> None:
            watch.before_backward(graph_version)
            self._yield_to_others(call.units)
            with outside_transforms(), watch.tearing():
                for index in call.units:
                    coordinator.begin_backward_use(index)
                    self._pin_in_backward(index)
            call.backward_ns = call.backward_ns or time.perf_counter_ns()

        return on_reached

    def _clone_views(self, call: OpenCall, output: Any) -> Any:
        """Clone outputs that are (views of) parameters: they must outlive the unit's eviction."""
        units = [index for index in call.units if not self._bindings[index].unit.persistent]
        inside = [tensor for tensor in tensors_in(output) if self._is_memory_of(units, tensor)]
        return replace_tensors(output, {id(tensor): tensor.clone() for tensor in inside}) if inside else output

    def _hook_modified_inputs(self, call: OpenCall, on_reached: Callable[[], None]) -> None:
        """Treat inputs that the call has modified in place as its outputs, returned or not."""
        changed = [(t, old) for t, version, old in call.versions if version_of(t) != version and t.grad_fn is not old]
        tensors = [tensor for tensor, _ in changed if tensor.grad_fn is not None]
        if not tensors:
            return
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda gradient: on_reached(), mode="any")
        older = next((old for _, old in changed if old is not None), None)
        if older is not None:
            # No join connects the sentinel to them; the node that made the input is the first one after the call.
            on_passed = self._passed_callback(call)
            older.register_prehook(lambda gradients: on_passed())
