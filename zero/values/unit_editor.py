"""The one editor of an engine's parameters: whole units outside forward and backward, and optimizer states."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import torch

from offload.array.copies import write_array
from offload.errors import BudgetError, StateError
from offload.kernels import masters
from offload.sizes import format_bytes
from zero.cache.coordinator import Coordinator
from zero.params.binding import UnitBinding, recapture_all
from zero.params.layout import Layout, Unit
from zero.plan.machine import read_machine
from zero.plan.sub_group_state import SubGroupState
from zero.store.collectives import Collectives
from zero.store.staging import StagedSubGroup
from zero.store.storage import Storage
from zero.values.reader import ValueReader, recapture

StateVisitor = Callable[[SubGroupState, int, slice], bool]
"""(state of a sub-group, first of the visited elements in it, which of them these are) -> was the state changed?"""

StateWriter = Callable[[SubGroupState, int, torch.Tensor], None]
"""(state of a sub-group, first element in it, values to write)."""
EDIT = "an edit of values"
"""The name that `check_open` gets before an edit."""


class Edit(NamedTuple):
    unit: Unit
    before: torch.Tensor  # uint8, the unit's bytes before the edit.
    after: torch.Tensor

    @property
    def is_changed(self) -> bool:
        return not torch.equal(self.before, self.after)


class EditCalls(Protocol):
    """What the engine does when units are edited."""

    def check_open(self, what: str) -> None:
        """Raise StateError if the engine is closed. `what`: the call, for the message."""

    def on_edit_begin(self) -> None:
        """Weights may be edited: on return no checkpoint is being written."""

    def on_weights_change(self, index: int) -> None:
        """A unit is about to change by other means than a step."""


class UnitEditor:
    """Opens units of one engine for editing, in private copies, and rewrites optimizer states.

    `collectives`: of the ranks; all of them begin and end edits of the same units.
    """

    def __init__(
        self,
        layout: Layout,
        bindings: list[UnitBinding],
        storage: Storage,
        coordinator: Coordinator,
        events: EditCalls,
        collectives: Collectives,
        reader: ValueReader,
    ) -> None:
        self._layout = layout
        self._bindings = bindings
        self._storage = storage
        self._coordinator = coordinator
        self._events = events
        self._collectives = collectives
        self._reader = reader
        self.placement, self.is_stage = collectives.placement, collectives.is_pipeline_stage
        self._edit_counts: Counter[int] = Counter()
        self._before: dict[int, torch.Tensor] = {}
        self._modifier_ranks: dict[int, set[int | None]] = {}
        """Unit -> those of the gathers inside the one that is open."""
        self._pending_edits: list[Edit] = []

    @property
    def is_editing(self) -> bool:
        return any(self._edit_counts.values())

    @torch.inference_mode(False)
    def begin_edit(self, indices: Iterable[int]) -> None:
        """Bind each unit to a private copy, unless it is bound already: all of them, or none.

        Raises BudgetError: the machine has not enough memory. Raises StorageError: a unit could not be read; then none
        is opened.
        """
        indices = list(indices)
        self._check_room(indices)
        opened: list[int] = []
        try:
            for index in indices:
                if not self._edit_counts[index]:
                    self._begin_unit(index)
                self._edit_counts[index] += 1
                opened.append(index)
        except BaseException:
            self.end_edit(opened)
            raise

    def _check_room(self, indices: list[int]) -> None:
        """All units are open at once, each with a second copy to detect edits. Raises BudgetError."""
        units = [self._layout.units[index] for index in indices if not self._edit_counts[index]]
        needed = 2 * sum(unit.nbytes for unit in units if not self._bindings[unit.index].is_bound)
        free_bytes = read_machine(self._storage.device).device_bytes
        if free_bytes is not None and needed > free_bytes:
            names = ", ".join(unit.name for unit in units[:3]) + (", ..." if len(units) > 3 else "")
            raise BudgetError(
                f"GatheredParameters: {len(units)} units ({names}) need {format_bytes(needed)} on "
                f"{self._storage.device} for the values and a copy that shows what was edited, and "
                f"{format_bytes(free_bytes)} are free there; gather fewer parameters at a time, or read them one by "
                "one with engine.named_full_parameters()"
            )

    def _begin_unit(self, index: int) -> None:
        binding = self._bindings[index]
        self._coordinator.evict_if_unused(index)
        if binding.is_bound:
            # In use by an enclosing forward, or persistent: edits happen in place.
            binding.mark_present(for_edit=True)
            self._events.on_edit_begin()
            self._coordinator.use_on_current_stream(index)
            recapture(binding)
            self._before[index] = binding.flat.detach().clone().view(torch.uint8)
            self._coordinator.begin_edit(index)
            return
        before = self._reader.read_unit(self._layout.units[index]).to(binding.flat.device)
        copy = torch.empty_like(before)
        copy.copy_(before)
        self._before[index] = before
        binding.bind_private_copy(copy)
        self._coordinator.begin_edit(index)

    @torch.inference_mode(False)
    def end_edit(self, indices: Iterable[int], modifier_rank: int | None = None) -> None:
        """Store the edits since `begin_edit` and release the units that it bound. All ranks call this together.

        Every unit is released even after an error; an edit that cannot be written stays in memory. Raises StateError: a
        parameter got another shape (it keeps its values, other edits are kept), or ranks have made different edits
        (none is kept). Raises StorageError: the first failure. `modifier_rank`: the rank whose edits count, also those
        of gathers inside or around that name none; None, or two that differ: all ranks must have made the same edits.
        """
        self._edit_counts.subtract(indices := list(indices))
        for index in indices:
            self._modifier_ranks.setdefault(index, set()).add(modifier_rank)
        ended = [index for index in indices if not self._edit_counts[index]]
        edits: dict[int | None, list[Edit]] = {}  # By the rank whose edits count.
        refused = recapture_all([self._bindings[index] for index in ended])
        for index in ended:
            binding = self._bindings[index]
            before = self._before.pop(index)
            after = binding.flat.detach().view(torch.uint8)
            named_ranks = self._modifier_ranks.pop(index) - {None}
            modifier = next(iter(named_ranks)) if len(named_ranks) == 1 else None
            edits.setdefault(modifier, []).append(Edit(self._layout.units[index], before.cpu(), after.cpu().clone()))
            if self._coordinator.is_edited(index):
                self._coordinator.end_edit(index)
                binding.unbind_private_copy()
            else:
                binding.mark_present()
        try:
            refused += self._store_agreed(edits or {modifier_rank: []})  # a rank that has opened none takes part too
        finally:
            with ExitStack() as ends:  # each, even if another raises
                for index in reversed(ended):  # last: the released units must have the values that count
                    ends.callback(self._coordinator.end_edit, index)
        if refused:
            raise StateError(f"GatheredParameters: {'; '.join(refused)}")

    def _store_agreed(self, edits: Mapping[int | None, list[Edit]]) -> list[str]:
        """Store the edits that count. Returns messages about units of which no edit counts.

        `edits`: by the rank whose edits count. All are agreed on before the first is stored, which may fail.
        """
        refused: list[str] = []
        changes: list[Edit] = []
        for modifier, unit_edits in edits.items():
            try:
                agreed = agree_on_edits(self._collectives, unit_edits, modifier)
                if agreed:
                    self._events.check_open(EDIT)
                changes += agreed
            except StateError as error:
                refused.append(str(error))
        self._revert(
            [edit for unit_edits in edits.values() for edit in unit_edits], {change.unit.index for change in changes}
        )
        for change in changes:
            self._events.on_weights_change(change.unit.index)
            binding = self._bindings[change.unit.index]
            if binding.is_bound:
                binding.flat.detach().view(torch.uint8).copy_(change.after)
        self._pending_edits += changes
        try:
            self.store_edits()
        finally:
            if changes:
                unstored = {edit.unit.index for edit in self._pending_edits}
                self._coordinator.on_rewrite([change.unit.index for change in changes], unstored)
        return refused

    def _revert(self, edits: list[Edit], stored: set[int]) -> None:
        """Restore the values of edits that do not count, where they were made in place."""
        for edit in edits:
            binding = self._bindings[edit.unit.index]
            if edit.unit.index not in stored and binding.is_bound and edit.is_changed:
                binding.flat.detach().view(torch.uint8).copy_(edit.before)

    def store_edits(self) -> None:
        """Store the edits that are not stored yet. Those that fail stay in memory, and the next call tries again.

        Raises StorageError: the first failure. The tiered arrays must not be read before a call succeeds.
        """
        error: BaseException | None = None
        for change in list(self._pending_edits):
            job = self._store_edit(*change)
            failure = self._storage.io_loop.submit(f"storing edits of {change[0].name}", job).wait()
            if failure is None:
                self._pending_edits = [other for other in self._pending_edits if other is not change]
            error = error or failure
        if error is not None:
            raise error

    async def _store_edit(self, unit: Unit, before: torch.Tensor, after: torch.Tensor) -> None:
        """Write the new weights. Where a weight has changed, its old master is invalid and becomes the weight."""
        space = self._layout.space_of(unit)
        array, streams = self._storage.weights[space], self._storage.streams
        await streams.synchronize(streams.record_copy_event())  # an earlier forward may still copy from this array
        shard = unit.shard_of(after)
        await write_array(array, unit.begin, unit.end, shard, self._storage.host_pool)
        await self._reset_masters(unit, unit.shard_of(before), shard)
        self._collectives.on_weights_stored(unit.index)

    async def _reset_masters(self, unit: Unit, before: torch.Tensor, after: torch.Tensor) -> None:
        space = self._layout.space_of(unit)
        if self._layout.spaces[space].remainder is None:
            return
        edited = before.view(torch.int16) != after.view(torch.int16)
        first, last = _true_range(edited)
        edited, shard = edited[first:last], after.view(unit.dtype)[first:last]

        def visit(state: SubGroupState, lo: int, part: slice) -> bool:
            mask, weights = edited[part], shard[part]
            if state.remainder is None or not bool(mask.any()):
                return False
            masters.reset_remainder_where(mask, weights, state.remainder[lo : lo + mask.numel()])
            return True

        await self._visit_states(unit, visit, unit.begin + first, unit.begin + last)

    def on_change_begin(self, indices: Iterable[int]) -> None:
        """States or gradients of these units are about to be replaced: let listeners end their reads first."""
        self._events.on_edit_begin()
        for index in indices:
            self._events.on_weights_change(index)

    def rewrite_states(self, unit: Unit, begin: int, values: torch.Tensor, write: StateWriter) -> None:
        """Let `write` change the optimizer states of elements of the unit from `begin` on, all in this rank's shard.

        Raises StorageError: a state could not be read or written.

        Args:
            unit: a trained unit.
            begin: first element in the flat buffer.
            values: 1-D, host; `write` gets the part that belongs to each sub-group.
            write: changes the state of one sub-group.
        """

        def visit(state: SubGroupState, lo: int, part: slice) -> bool:
            write(state, lo, values[part])
            return True

        first = unit.origin + begin
        job = self._visit_states(unit, visit, first, first + values.numel())
        self._storage.io_loop.run(f"changing the state of {unit.name}", job)

    async def _visit_states(self, unit: Unit, visit: StateVisitor, begin: int, end: int) -> None:
        """Call `visit` for each sub-group's part of coordinates [begin, end) of the unit, in their order."""
        index = self._layout.space_of(unit)
        if self._storage.state_arrays[index] is None:
            return
        for group in self._storage.plan.groups_over(index, begin, end):
            lo, hi = max(begin, group.begin), min(end, group.end)
            part = StagedSubGroup.part_of_state(self._storage, self._layout, group, lo, hi, to_write=True)
            staged = part or StagedSubGroup(self._storage, self._layout, group, units=())
            async with staged.open("optimizer state"):
                if visit(staged.state_view(), lo - staged.begin, slice(lo - begin, hi - begin)):
                    await staged.state.write()


def agree_on_edits(collectives: Collectives, edits: list[Edit], modifier_rank: int | None) -> list[Edit]:
    """The edits to be stored: the same edits on every rank. All ranks call this with the same units.

    Raises StateError: ranks have made different edits; names the unit and the ranks.

    Args:
        edits: this rank's edits, in the same order on all ranks, including those that changed nothing.
        modifier_rank: the rank whose edits count; None: all ranks must have made the same edits.
    """
    placement = collectives.placement
    if placement.is_single_rank:
        return [edit for edit in edits if edit.is_changed]
    if modifier_rank is not None and not 0 <= modifier_rank < placement.world_size:
        raise StateError(
            f"GatheredParameters: expected a modifier_rank from 0 to {placement.world_size - 1}, got {modifier_rank}"
        )
    digests = [_digest(edit.after) if edit.is_changed else "" for edit in edits]
    answers = [json.loads(answer) for answer in collectives.all_gather_bytes("edits", json.dumps(digests).encode())]
    if modifier_rank is not None:
        broadcast_edits = [edit for edit, digest in zip(edits, answers[modifier_rank], strict=True) if digest]
        for edit in broadcast_edits:
            collectives.broadcast([edit.after], modifier_rank)
        return broadcast_edits
    for position, edit in enumerate(edits):
        kinds = {answer[position] for answer in answers}
        if len(kinds) > 1:
            ranks = ", ".join(f"rank {r}: {_describe_edit(answer[position])}" for r, answer in enumerate(answers))
            raise StateError(
                f"GatheredParameters: the ranks have edited {edit.unit.name} differently ({ranks}), so no edit was "
                "kept; pass modifier_rank to keep the edits of one rank, or make the same edits on all"
            )
    return [edit for edit in edits if edit.is_changed]


def _true_range(mask: torch.Tensor) -> tuple[int, int]:
    """[first, last) of the elements that are True; an empty range if none is."""
    if not bool(mask.any()):
        return 0, 0
    bits = mask.view(torch.uint8)  # argmax finds the first of equal values
    return int(bits.argmax()), mask.numel() - int(bits.flip(0).argmax())


def _digest(values: torch.Tensor) -> str:
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()


def _describe_edit(digest: str) -> str:
    return f"edited ({digest[:8]})" if digest else "not edited"
