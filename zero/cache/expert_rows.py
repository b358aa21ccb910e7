"""Rows of packed experts, fetched alone: only the experts that the router has chosen.

`ExpertRows` is some rows of one unit in memory of their own. Its tensors are views of one storage. The storage gets and
loses its memory as a unit does (offload/memory/flat_storage.py). It has memory during the call that uses the rows, and
again from the moment gradients reach that call until they have passed it. In a recomputation it keeps the memory until
the backward that recomputes is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from offload.memory.flat_storage import FlatStorage, exact_alias
from offload.memory.pool import Block
from offload.sizes import ALIGN_BYTES, align_up
from offload.system.interrupts import atomic, deferring_interrupts
from zero.cache.autograd_markers import join_outputs, make_sentinel
from zero.cache.backward import BackwardWatch
from zero.cache.compiling import outside_transforms
from zero.cache.coordinator import Coordinator
from zero.cache.hooks import in_backward
from zero.cache.micro_batch_scheduler import MicroBatchScheduler
from zero.optim.pending_updates import PendingUpdates
from zero.params.binding import UnitBinding
from zero.params.tiles import user_accumulate_hooks
from zero.store.storage import Storage


class ExpertRows:
    """Some rows of every parameter of one unit.

    Attributes:
        rows: row numbers, ascending.
        runs: (first coordinate, end, first element in the storage) of each run of adjacent rows.
        views: per slot of the unit, its rows [len(rows), ...].
    """

    def __init__(self, binding: UnitBinding, rows: tuple[int, ...]) -> None:
        unit = binding.unit
        self.unit, self.rows = unit, rows
        self.runs: list[tuple[int, int, int]] = []
        cuts: list[tuple[int, torch.Size]] = []
        position = 0
        for slot in unit.slots:
            row_numel = slot.numel // unit.expert_rows
            cuts.append((position, torch.Size((len(rows), *slot.shape[1:]))))
            for at, first, count in _runs(rows):
                begin = unit.origin + slot.offset_numel + first * row_numel
                self.runs.append((begin, begin + count * row_numel, position + at * row_numel))
            position = align_up(position + len(rows) * row_numel, ALIGN_BYTES // unit.dtype.itemsize)
        self.numel = position
        self.storage = FlatStorage(self.numel, unit.dtype, cuts, binding.poison, binding.flat.device)
        self.block: Block | None = None
        self.forward_uses = self.backward_uses = 0
        # A recomputation used it; it stays until a backward use ends, or the backward itself.
        self.is_recomputed = False

    @property
    def views(self) -> list[torch.Tensor]:
        """The rows; readable while they are in use."""
        return self.storage.views

    @property
    def is_in_use(self) -> bool:
        """True while the values must be in memory."""
        return bool(self.forward_uses or self.backward_uses or self.is_recomputed)


class ExpertRowFetcher:
    """Fetches rows of one engine's packed experts.

    `updates` brings rows up to date before they are read; `backward_watch` takes their gradients.
    """

    def __init__(
        self,
        bindings: list[UnitBinding],
        storage: Storage,
        coordinator: Coordinator,
        updates: PendingUpdates,
        backward_watch: BackwardWatch,
        scheduler: MicroBatchScheduler,
    ) -> None:
        self._bindings, self._storage, self._coordinator = bindings, storage, coordinator
        self._updates, self._backward_watch, self._scheduler = updates, backward_watch, scheduler
        backward_watch.expert_rows = self
        self._place_of = {
            id(parameter): (binding.unit.index, position)
            for binding in bindings
            if binding.unit.expert_rows
            for position, parameter in enumerate(binding.parameters)
        }
        # Weak, because a graph keeps its rows alive; a recomputation of the same call finds them here.
        self._fetched: weakref.WeakValueDictionary[tuple[int, tuple[int, ...]], ExpertRows] = (
            weakref.WeakValueDictionary()
        )
        self._in_backward: dict[int, ExpertRows] = {}  # Rows that a backward uses, by id.

    def can_fetch(self, parameter: nn.Parameter) -> bool:
        """True if rows of the parameter can be fetched, and its unit is not bound."""
        place = self._place_of.get(id(parameter))
        return place is not None and not self._bindings[place[0]].is_bound

    def run_with_rows(
        self,
        parameters: dict[str, nn.Parameter],
        rows: tuple[int, ...],
        compute: Callable[[dict[str, torch.Tensor]], Any],
    ) -> Any:
        """Return `compute`'s result for the rows of each parameter; their gradients are added to the parameters'.

        Raises StorageError: rows could not be read; BudgetError: units in use leave no room for them.

        Args:
            parameters: by name; `can_fetch` is true for each.
            rows: row numbers in the first dimension, ascending.
            compute: a function of {name: [len(rows), ...]}.
        """
        units = dict.fromkeys(self._place_of[id(p)][0] for p in parameters.values())
        fetched = {index: self._expert_rows(index, rows) for index in units}
        recompute = in_backward()
        in_use: list[ExpertRows] = []
        try:
            for expert_rows in fetched.values():
                with deferring_interrupts:
                    self._begin_forward(expert_rows, recompute)
                    in_use.append(expert_rows)
            sentinel = None
            if torch.is_grad_enabled():
                sentinel = make_sentinel(self._passed_callback(in_use), self._coordinator.device)
            result = compute({name: self._rows_of(p, fetched) for name, p in parameters.items()})
            if sentinel is not None:
                result = join_outputs(sentinel, result, self._reached_callback(in_use))
            return result
        finally:
            with deferring_interrupts:
                for expert_rows in in_use:
                    expert_rows.forward_uses -= 1
                    self._free_if_unused(expert_rows)

    def end_backward(self) -> None:
        """A backward is over: none of its uses is open, even if it has not passed all of them."""
        while self._in_backward:
            _, expert_rows = self._in_backward.popitem()
            expert_rows.backward_uses, expert_rows.is_recomputed = 0, False
            self._free_if_unused(expert_rows)

    def _expert_rows(self, index: int, rows: tuple[int, ...]) -> ExpertRows:
        expert_rows = self._fetched.get((index, rows))
        if expert_rows is None:
            expert_rows = self._fetched[index, rows] = ExpertRows(self._bindings[index], rows)
        return expert_rows

    def _begin_forward(self, expert_rows: ExpertRows, recompute: bool) -> None:
        if not expert_rows.is_in_use:
            self._fetch(expert_rows)
        expert_rows.forward_uses += 1
        if recompute:
            expert_rows.is_recomputed = True
            self._pin_in_backward(expert_rows)

    def _pin_in_backward(self, expert_rows: ExpertRows) -> None:
        self._in_backward[id(expert_rows)] = expert_rows
        if self._scheduler.is_active:
            self._scheduler.task.pinned_rows.add(id(expert_rows))

    def _rows_of(self, parameter: nn.Parameter, fetched: dict[int, ExpertRows]) -> torch.Tensor:
        """A leaf of the graph with the values of the rows; its gradient is added to the unit's gradient."""
        index, position = self._place_of[id(parameter)]
        expert_rows = fetched[index]
        rows = expert_rows.views[position].detach()
        if not (expert_rows.unit.trainable and parameter.requires_grad and torch.is_grad_enabled()):
            return rows
        rows.requires_grad_()
        watch, unit, numbers = (
            self._backward_watch,
            expert_rows.unit,
            torch.tensor(expert_rows.rows, device=rows.device),
        )

        @atomic
        def receive(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                watch.receive_rows(unit, position, *_apply_user_hooks(parameter, numbers, gradient))

        rows.register_post_accumulate_grad_hook(receive)  # type: ignore[no-untyped-call]
        return rows

    def _reached_callback(self, fetched: list[ExpertRows]) -> Callable[[], None]:
        graph_version = self._backward_watch.graph_version

        @atomic
        def on_reached() -> None:
            self._backward_watch.before_backward(graph_version)
            for expert_rows in fetched:
                if not expert_rows.is_in_use:
                    self._fetch(expert_rows)
                expert_rows.backward_uses += 1
                self._pin_in_backward(expert_rows)

        return on_reached

    def _passed_callback(self, fetched: list[ExpertRows]) -> Callable[[], None]:
        @atomic
        def on_passed() -> None:
            for expert_rows in fetched:
                self._scheduler.task.pinned_rows.discard(id(expert_rows))
                if expert_rows.backward_uses:
                    expert_rows.backward_uses -= 1
                if not expert_rows.backward_uses:
                    expert_rows.is_recomputed = False
                    self._in_backward.pop(id(expert_rows), None)
                    self._free_if_unused(expert_rows)
                    self._backward_watch.on_rows_passed(expert_rows.unit.index)

        return on_passed

    def _fetch(self, expert_rows: ExpertRows) -> None:
        unit, storage = expert_rows.unit, self._storage
        with outside_transforms(), self._backward_watch.tearing() if in_backward() else nullcontext():
            block = self._coordinator.lease_rows(unit, expert_rows.numel)
            job = self._updates.fetch_rows(unit, expert_rows.runs, exact_alias(block.data), block.events)
            try:
                future = storage.io_loop.submit(f"fetching rows of {unit.name}", job)
            except BaseException:
                self._coordinator.free_rows(block, expert_rows.numel)
                raise
            try:
                storage.streams.wait_events(future.result())
            except BaseException:  # an interrupt ends only the wait: the I/O loop still writes rows
                self._coordinator.free_rows_after(unit, block, expert_rows.numel, future)
                raise
            expert_rows.storage.bind(block.data)
        expert_rows.block = block

    def _free_if_unused(self, expert_rows: ExpertRows) -> None:
        """Free the memory of the rows if nothing uses them."""
        block = expert_rows.block
        if expert_rows.is_in_use or block is None:
            return
        expert_rows.block = None
        with outside_transforms():
            expert_rows.storage.unbind(modified=False)
            self._coordinator.free_rows(block, expert_rows.numel)


def _runs(rows: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(position in `rows`, first row, count) of each run of consecutive rows."""
    start = 0
    for position in range(1, len(rows) + 1):
        if position == len(rows) or rows[position] != rows[position - 1] + 1:
            yield start, rows[start], position - start
            start = position


def _apply_user_hooks(
    parameter: nn.Parameter, numbers: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, their gradient) after the user's hooks on the parameter, which get the gradient of all rows."""
    hooks, late_hooks = tuple((parameter._backward_hooks or {}).values()), user_accumulate_hooks(parameter)
    if not (hooks or late_hooks):
        return numbers, gradient
    full = gradient.new_zeros(parameter.shape).index_copy_(0, numbers, gradient)
    for hook in hooks:
        changed = hook(full)
        full = full if changed is None else changed
    for hook_after in late_hooks:
        parameter.grad = full
        hook_after(parameter)
        full, parameter.grad = torch.zeros_like(full) if parameter.grad is None else parameter.grad, None
    return torch.arange(len(full), device=full.device), full
