"""Rows of packed experts, gathered alone: only the experts that the router has chosen are fetched.

A loan is some rows of one unit in memory of their own. Its tensors are views of one storage. The storage gets and
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

from offload.memory.arena import Block
from offload.memory.flat_storage import FlatStorage, exact_alias
from offload.sizes import ALIGN_BYTES, align_up
from offload.system.interrupts import atomic, deferring_interrupts
from zero.optim.pending_updates import PendingUpdates
from zero.params.binding import UnitBinding
from zero.params.tiles import user_accumulate_hooks
from zero.schedule.backward import BackwardWatch
from zero.schedule.compiling import apart
from zero.schedule.coordinator import Coordinator
from zero.schedule.frame import close_frame, open_frame
from zero.schedule.hooks import in_backward
from zero.schedule.turns import Turns
from zero.store.storage import Storage


class Loan:
    """Some rows of every parameter of one unit.

    Attributes:
        rows: row numbers, ascending.
        parts: (first coordinate, end, first element of the loan) of each run of adjacent rows.
        views: per slot of the unit, its rows [len(rows), ...].
    """

    def __init__(self, bound: UnitBinding, rows: tuple[int, ...]) -> None:
        unit = bound.unit
        self.unit, self.rows = unit, rows
        self.parts: list[tuple[int, int, int]] = []
        cuts: list[tuple[int, torch.Size]] = []
        position = 0
        for slot in unit.slots:
            row_numel = slot.numel // unit.expert_rows
            cuts.append((position, torch.Size((len(rows), *slot.shape[1:]))))
            for at, first, count in _runs(rows):
                begin = unit.origin + slot.offset_numel + first * row_numel
                self.parts.append((begin, begin + count * row_numel, position + at * row_numel))
            position = align_up(position + len(rows) * row_numel, ALIGN_BYTES // unit.dtype.itemsize)
        self.numel = position
        self.storage = FlatStorage(self.numel, unit.dtype, cuts, bound.poison, bound.flat.device)
        self.block: Block | None = None
        self.forward_uses = self.backward_uses = 0
        self.recomputed = False  # A recomputation used it; it stays until a backward use ends, or the whole backward.

    @property
    def views(self) -> list[torch.Tensor]:
        """The rows; readable while the loan is in use."""
        return self.storage.views

    @property
    def used(self) -> bool:
        """True while the values must be in memory."""
        return bool(self.forward_uses or self.backward_uses or self.recomputed)


class RowLender:
    """Lends rows of one engine's packed experts.

    `updates`: bring rows up to date before they are read; `events`: take gradients.
    """

    def __init__(
        self,
        bound: list[UnitBinding],
        storage: Storage,
        coordinator: Coordinator,
        updates: PendingUpdates,
        events: BackwardWatch,
        turns: Turns,
    ) -> None:
        self._bound, self._storage, self._coordinator = bound, storage, coordinator
        self._updates, self._events, self._turns = updates, events, turns
        self._place_of = {
            id(parameter): (unit.unit.index, position)
            for unit in bound
            if unit.unit.expert_rows
            for position, parameter in enumerate(unit.parameters)
        }
        # Weak, because a graph keeps its loans alive; a recomputation of the same call finds them here.
        self._loans: weakref.WeakValueDictionary[tuple[int, tuple[int, ...]], Loan] = weakref.WeakValueDictionary()
        self._in_backward: dict[int, Loan] = {}  # Loans that a backward uses, by id.

    def lends(self, parameter: nn.Parameter) -> bool:
        """True if rows of the parameter can be fetched, and its whole unit is not bound."""
        place = self._place_of.get(id(parameter))
        return place is not None and not self._bound[place[0]].is_bound

    def call(
        self,
        parameters: dict[str, nn.Parameter],
        rows: tuple[int, ...],
        compute: Callable[[dict[str, torch.Tensor]], Any],
    ) -> Any:
        """Return `compute`'s result for the rows of each parameter; their gradients are added to the parameters'.

        Raises StorageError: rows could not be read; BudgetError: units in use leave no room for them.

        Args:
            parameters: by name; `lends` is true for each.
            rows: row numbers in the first dimension, ascending.
            compute: a function of {name: [len(rows), ...]}.
        """
        units = dict.fromkeys(self._place_of[id(p)][0] for p in parameters.values())
        loans = {index: self._loan(index, rows) for index in units}
        recompute = in_backward()
        begun: list[Loan] = []
        try:
            for loan in loans.values():
                with deferring_interrupts:
                    self._begin_forward(loan, recompute)
                    begun.append(loan)
            sentinel = None
            if torch.is_grad_enabled():
                sentinel = open_frame(self._passed(begun), self._coordinator.device)
            result = compute({name: self._rows_of(p, loans) for name, p in parameters.items()})
            if sentinel is not None:
                result = close_frame(sentinel, result, self._reached(begun))
            return result
        finally:
            with deferring_interrupts:
                for loan in begun:
                    loan.forward_uses -= 1
                    self._settle(loan)

    def end_backward(self) -> None:
        """A backward is over: none of its uses is open, even if it has not passed all of them."""
        while self._in_backward:
            _, loan = self._in_backward.popitem()
            loan.backward_uses, loan.recomputed = 0, False
            self._settle(loan)

    def _loan(self, index: int, rows: tuple[int, ...]) -> Loan:
        loan = self._loans.get((index, rows))
        if loan is None:
            loan = self._loans[index, rows] = Loan(self._bound[index], rows)
        return loan

    def _begin_forward(self, loan: Loan, recompute: bool) -> None:
        if not loan.used:
            self._fetch(loan)
        loan.forward_uses += 1
        if recompute:
            loan.recomputed = True
            self._keep(loan)

    def _keep(self, loan: Loan) -> None:
        self._in_backward[id(loan)] = loan
        if self._turns.on:
            self._turns.lane.keeps.add(id(loan))

    def _rows_of(self, parameter: nn.Parameter, loans: dict[int, Loan]) -> torch.Tensor:
        """A leaf of the graph with the values of the rows; its gradient is added to the unit's gradient."""
        index, position = self._place_of[id(parameter)]
        loan = loans[index]
        rows = loan.views[position].detach()
        if not (loan.unit.trainable and parameter.requires_grad and torch.is_grad_enabled()):
            return rows
        rows.requires_grad_()
        events, unit, numbers = self._events, loan.unit, torch.tensor(loan.rows, device=rows.device)

        @atomic
        def receive(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                events.receive_rows(unit, position, *_hooked(parameter, numbers, gradient))

        rows.register_post_accumulate_grad_hook(receive)  # type: ignore[no-untyped-call]
        return rows

    def _reached(self, loans: list[Loan]) -> Callable[[], None]:
        generation = self._events.generation

        @atomic
        def reached() -> None:
            self._events.before_backward(generation)
            for loan in loans:
                if not loan.used:
                    self._fetch(loan)
                loan.backward_uses += 1
                self._keep(loan)

        return reached

    def _passed(self, loans: list[Loan]) -> Callable[[], None]:
        @atomic
        def passed() -> None:
            for loan in loans:
                self._turns.lane.keeps.discard(id(loan))
                if loan.backward_uses:
                    loan.backward_uses -= 1
                if not loan.backward_uses:
                    loan.recomputed = False
                    self._in_backward.pop(id(loan), None)
                    self._settle(loan)
                    self._events.rows_passed(loan.unit.index)

        return passed

    def _fetch(self, loan: Loan) -> None:
        unit, storage = loan.unit, self._storage
        with apart(), self._events.tearing() if in_backward() else nullcontext():
            block = self._coordinator.lease_rows(unit, loan.numel)
            job = self._updates.fetch_rows(unit, loan.parts, exact_alias(block.data), block.events)
            try:
                transfer = storage.mover.submit(f"fetching rows of {unit.name}", job)
            except BaseException:
                self._coordinator.return_rows(block, loan.numel)
                raise
            try:
                storage.streams.wait_events(transfer.result())
            except BaseException:  # an interrupt ends only the wait: the transfer still writes rows
                self._coordinator.return_rows_later(unit, block, loan.numel, transfer)
                raise
            loan.storage.bind(block.data)
        loan.block = block

    def _settle(self, loan: Loan) -> None:
        """Release the values if nothing uses them."""
        block = loan.block
        if loan.used or block is None:
            return
        loan.block = None
        with apart():
            loan.storage.unbind(modified=False)
            self._coordinator.return_rows(block, loan.numel)


def _runs(rows: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(position in `rows`, first row, count) of each run of consecutive rows."""
    start = 0
    for position in range(1, len(rows) + 1):
        if position == len(rows) or rows[position] != rows[position - 1] + 1:
            yield start, rows[start], position - start
            start = position


def _hooked(
    parameter: nn.Parameter, numbers: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, their gradient) after the user's hooks on the parameter, which get the whole gradient."""
    hooks, behind = tuple((parameter._backward_hooks or {}).values()), user_accumulate_hooks(parameter)
    if not (hooks or behind):
        return numbers, gradient
    whole = gradient.new_zeros(parameter.shape).index_copy_(0, numbers, gradient)
    for hook in hooks:
        changed = hook(whole)
        whole = whole if changed is None else changed
    for late in behind:
        parameter.grad = whole
        late(parameter)
        whole, parameter.grad = torch.zeros_like(whole) if parameter.grad is None else parameter.grad, None
    return torch.arange(len(whole), device=whole.device), whole
