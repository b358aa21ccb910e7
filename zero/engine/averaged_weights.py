"""`engine.averaged_weights()`: inside, the weights are their averages; afterwards they have their old bits again.

[Note: swap] Sub-groups are swapped one by one, through the same staging as an update. An array that is the average
(`ema`) is swapped with the fp32 masters, which takes no memory. An average that is computed from the masters and an
array (schedule-free) overwrites the masters. The masters are put aside meanwhile, 4 bytes per element: in the swap
space if there is one, else in host memory.

[Note: failure] A sub-group whose read fails is unchanged. A sub-group whose write fails has been swapped: its arrays
keep the bytes in memory until a later write succeeds. So `groups` always has exactly the sub-groups whose weights are
averages. Those that could not be restored are restored when another block is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from offload.array.tiered_array import await_all
from offload.errors import BudgetError, StateError
from offload.kernels import masters
from offload.memory.host_memory import aligned_copy, trim_heap
from offload.sizes import format_bytes
from zero.assembly.engine_parts import EngineParts
from zero.assembly.engine_steps import EngineSteps
from zero.assembly.model_changes import ModelChanges
from zero.assembly.run import Run
from zero.optim.averages import EMA, average_share, average_state
from zero.params.layout import SubGroup, Unit
from zero.plan.machine import read_machine
from zero.store.all_ranks import AllRanks
from zero.store.staging import StagedSubGroup
from zero.store.storage import Storage


class _AveragedRun(NamedTuple):
    """A run of elements of a sub-group that becomes an average. All tensors are flat and have the same length."""

    weight: torch.Tensor
    remainder: torch.Tensor | None
    average: torch.Tensor
    """The average itself, or the array that the average is computed with."""
    master: torch.Tensor
    """fp32; a temporary copy of the masters."""
    interpolation: float
    """Factor of the interpolation from the masters (0) to the array (1)."""


class _SavedMasters:
    """The masters of sub-groups, put aside for a while."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._in_memory: dict[SubGroup, torch.Tensor] = {}
        self._offsets: dict[SubGroup, int] = {}  # Offsets in the swap space; they stay reserved for the next time.

    def reserve(self, groups: list[SubGroup]) -> None:
        """Raises BudgetError, StorageError: there is no room for them."""
        missing = [group for group in groups if group not in self._offsets and group not in self._in_memory]
        disk, needed = self.storage.disk, sum(map(_master_bytes, missing))
        if disk is not None:
            offset = disk.swap.extend(needed) if missing else 0
            for group in missing:
                self._offsets[group] = offset
                offset += _master_bytes(group)
            return
        machine = read_machine(self.storage.device)
        if needed > machine.available_bytes:
            raise BudgetError(
                f"averaged_weights: a copy of the fp32 weights needs {format_bytes(needed)} of host memory, and "
                f"{format_bytes(machine.available_bytes)} are free ({machine.available_source}); set "
                "offload_optimizer.nvme_path, or train with ema_decay in place of AdamWScheduleFree"
            )

    async def save(self, group: SubGroup, values: torch.Tensor) -> None:
        disk = self.storage.disk
        if disk is None:
            self._in_memory[group] = values.cpu()
            return
        await disk.write(self._offsets[group], aligned_copy(values.cpu().view(torch.uint8)), "weights put aside")

    async def restore(self, group: SubGroup) -> torch.Tensor:
        disk = self.storage.disk
        if disk is None:
            return self._in_memory[group]
        values = aligned_copy(torch.empty(_master_bytes(group), dtype=torch.uint8, device="cpu"))
        await disk.read(self._offsets[group], values, "weights put aside")
        return values.view(torch.float32)

    def drop_copy(self, group: SubGroup) -> None:
        self._in_memory.pop(group, None)


class AveragedWeights:
    def __init__(self, run: Run, steps: EngineSteps, changes: ModelChanges) -> None:
        self._run = run
        self._steps = steps
        self._changes = changes
        self._guard = steps.averages_guard
        self._saved_masters: _SavedMasters | None = None
        self._interpolation_of: Mapping[int, float] = {}  # Parameter index -> `_AveragedRun.interpolation`.

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """See `ZeroEngine.averaged_weights`."""
        shown = self._guard
        self._steps.make_ready("averaged_weights")
        self._run.parts.check_outside_calls("averaged_weights")
        if not any(map(average_state, self._run.rules.each)):
            raise StateError(
                'averaged_weights: no weights are averaged; set "ema_decay" in the config, or optimizer.type to '
                '"AdamWScheduleFree"'
            )
        if not shown.open_blocks:
            self._enter()
        shown.open_blocks += 1
        try:
            with self._run.calling_model():
                yield
        finally:
            shown.open_blocks -= 1
            if not (shown.open_blocks or self._run.closed):
                self._leave()

    def _enter(self) -> None:
        if not self._guard.averaged_groups:
            self._changes.replan()
            self._interpolation_of = self._averaged_parameters()
        try:
            self._swap_all(averaged=True)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        self._steps.make_ready("averaged_weights")
        self._swap_all(averaged=False)

    def _averaged_parameters(self) -> dict[int, float]:
        """Index of each parameter that has an average by now -> its `_AveragedRun.interpolation`."""
        updater, parts, found = self._run.updater, self._run.parts, dict[int, float]()
        for group in updater.param_groups if updater is not None else []:
            rule = self._run.rules.rule_of(group)
            for parameter in group["params"]:
                progress = updater.progress.get(id(parameter)) if updater is not None else None
                if progress is not None and average_state(rule) in progress.present and id(parameter) in parts.index_of:
                    found[parts.index_of[id(parameter)]] = average_share(rule, group)
        return found

    def _swap_all(self, *, averaged: bool) -> None:
        """Swap every sub-group that does not show averages (`averaged`) or trained weights yet; on all ranks."""
        self._guard.is_swapping = True
        try:
            together = AllRanks(self._run.collectives)
            parts = together.run_on_all(
                "averaged weights", self._steps.prepare_rewrite
            )  # no rank uses this rank's shards any more
            try:
                together.run_on_all("averaged weights", lambda: self._swap(parts, averaged=averaged))
            finally:
                parts.coordinator.on_rewrite()
        finally:
            self._guard.is_swapping = False
            trim_heap()  # else the C library keeps the memory that held the masters of a sub-group
        self._steps.make_ready("averaged_weights")

    def _swap(self, parts: EngineParts, *, averaged: bool) -> None:
        done, storage = self._guard.averaged_groups, parts.storage
        units = {group: self._units_in(parts, group) for group in storage.plan.sub_groups}
        todo = [group for group in units if units[group] and (group in done) != averaged]
        if self._saved_masters is None or self._saved_masters.storage is not storage:
            self._saved_masters = _SavedMasters(storage)
        if averaged:
            self._saved_masters.reserve([group for group in todo if self._average_state_of(units[group][0]) != EMA])
        for group in todo:
            job = self._swap_group(parts, self._saved_masters, group, units[group], averaged=averaged)
            moving = storage.io_loop.submit("averaged weights", job)
            try:
                moving.result()
            except BaseException:  # an interrupt ends the wait and not the job, after which alone `done` is right
                moving.wait()
                raise

    def _units_in(self, parts: EngineParts, group: SubGroup) -> list[Unit]:
        """Units in the sub-group that have parameters with an average."""
        units = parts.layout.units_in(group)
        return [unit for unit in units if any(slot.index in self._interpolation_of for slot in unit.slots)]

    def _average_state_of(self, unit: Unit) -> str:
        return average_state(self._run.rules.each[unit.rule]) or EMA

    async def _swap_group(
        self, parts: EngineParts, saved_masters: _SavedMasters, group: SubGroup, units: list[Unit], *, averaged: bool
    ) -> None:
        storage, done = parts.storage, self._guard.averaged_groups
        is_ema = self._average_state_of(units[0]) == EMA
        staged = StagedSubGroup(storage, parts.layout, group, units)
        async with staged.open("averaged weights"):
            # Padding and parameters without an average stay unchanged; their elements of `kept` are not used.
            masters = torch.zeros(group.end - group.begin, device=staged.state.bytes.device, dtype=torch.float32)
            if not averaged and not is_ema:
                masters.copy_(await saved_masters.restore(group))
            runs = list(self._runs(parts, staged, masters))
            if averaged or is_ema:
                await staged.compute(lambda: _read_masters(runs))
            if averaged and not is_ema:
                await saved_masters.save(group, masters)
            change = _swap_with_masters if is_ema else _write_averages if averaged else _write_masters
            await staged.compute(lambda: change(runs))
            (done.add if averaged else done.discard)(group)
            await await_all([part.write_or_strand() for part in staged.parts])
            if not averaged:
                saved_masters.drop_copy(group)

    def _runs(self, parts: EngineParts, staged: StagedSubGroup, master_values: torch.Tensor) -> Iterator[_AveragedRun]:
        """The averaged runs of the sub-group, one per parameter."""
        state_view, begin = staged.state_view(), staged.group.begin
        for unit in staged.units:
            states = parts.plan.states_of(unit)
            average = state_view.states.tensors[states.index(self._average_state_of(unit))]
            weight = staged.weights[unit.index]
            flat = weight.bytes.view(unit.dtype)
            for slot in unit.slots:
                first, last = unit.shard_range(slot)
                lo, hi = max(first, weight.begin), min(last, weight.end)
                if slot.index in self._interpolation_of and lo < hi:
                    at = slice(lo - begin, hi - begin)
                    remainder = None if state_view.remainder is None else state_view.remainder[at]
                    here = flat[lo - weight.begin : hi - weight.begin]
                    yield _AveragedRun(
                        here, remainder, average[at], master_values[at], self._interpolation_of[slot.index]
                    )


def _read_masters(runs: list[_AveragedRun]) -> None:
    for run in runs:
        masters.join(run.master, run.weight, run.remainder)


def _write_masters(runs: list[_AveragedRun]) -> None:
    for run in runs:
        masters.split(run.weight, run.remainder, run.master)


def _write_averages(runs: list[_AveragedRun]) -> None:
    for run in runs:
        masters.split(run.weight, run.remainder, torch.lerp(run.master, run.average, run.interpolation))


def _swap_with_masters(runs: list[_AveragedRun]) -> None:
    for run in runs:
        masters.split(run.weight, run.remainder, run.average)
        run.average.copy_(run.master)


def _master_bytes(group: SubGroup) -> int:
    return 4 * (group.end - group.begin)
