"""Gradients from autograd into the gradient plane.

One contribution is kept as produced; from the second on it is accumulated in fp32. A parameter that
contributed nothing since the last step is remembered as such: the optimizer skips it, as torch does.
Block sums of squares are rewritten whenever a unit's gradient is, so the step never reads it again
for the norm.

A step seals what has been collected: updates behind the step read it, and the first gradient of the
next step that needs its place waits until they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from offload import kernels
from offload.arena import Block
from offload.copies import Fence
from offload.errors import StateError, StorageError
from offload.mover import Transfer
from offload.pinned import aligned_copy
from offload.planes import Plane
from zero.params.layout import Layout, Slot, Unit
from zero.storage import Storage

CHUNK_NUMEL = 256 * 1024


@dataclass(slots=True)
class Flush:
    """One contribution on its way to the disk, chunk by chunk. It goes on where a failure stopped it."""

    buffer: torch.Tensor
    block: Block
    arrived: list[Slot]
    again: list[bool]
    """Per slot in `arrived`: is it added to an earlier contribution?"""
    first: bool
    """The plane holds nothing for this step yet."""
    fence: Fence
    position: int = 0
    """Elements that have been dealt with."""
    sums: list[np.ndarray] = field(default_factory=list)
    nonfinite: int = 0
    transfer: Transfer[None] | None = None
    """The attempt under way; None after a failure."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """Where the gradient of the last step lies, and in what dtype."""

    plane: Plane
    dtype: torch.dtype


@dataclass(slots=True)
class UnitGradient:
    """What is known of one unit's gradient since the last step."""

    unit: Unit
    plane: Plane
    dtype: torch.dtype
    """What the plane holds for this unit."""
    narrow_plane: Plane
    contributions: list[int]
    """Per slot, how many contributions the plane holds."""
    arrived: list[int] = field(default_factory=list)
    """Slots whose latest contribution waits in `buffer`."""
    buffer: torch.Tensor | None = None
    """Flat gradient, unit.numel elements of unit.dtype."""
    block: Block | None = None
    """The lease behind `buffer`; None when it is the plane's own memory."""
    flush: Flush | None = None
    """What is being stored; its block is leased until that has succeeded."""
    sums: np.ndarray | None = None
    """fp64 sum of squares per block of 4096."""
    nonfinite: int = 0
    sealed: Sealed | None = None

    @property
    def empty(self) -> bool:
        """True when the plane holds nothing for this step."""
        return not any(self.contributions)


class Gradients:
    """All trainable units' gradients.

    Args:
        in_place: a first contribution may be collected where it is stored.

    Attributes:
        update: called with a unit whose sealed gradient is in the way; must not return before it was used.
    """

    def __init__(self, layout: Layout, storage: Storage, device: torch.device, in_place: bool, threads: int) -> None:
        self._storage, self._device, self._in_place, self._threads = storage, device, in_place, threads
        self.update: Callable[[int], None] = _nothing_to_do
        self._units: dict[int, UnitGradient] = {}
        self._wide: dict[int, Plane] = {}
        for unit in layout.units:
            plane = storage.gradients[layout.space_of(unit)] if unit.trainable else None
            if plane is not None:
                dtype = storage.gradient_dtype(unit)
                self._units[unit.index] = UnitGradient(unit, plane, dtype, plane, [0] * len(unit.slots))

    # ---- arrival ------------------------------------------------------------------------------

    def arrive(self, index: int, position: int, gradient: torch.Tensor) -> bool:
        """Take one parameter's gradient. True when every slot of the unit has arrived.

        Args:
            index: the unit.
            position: the slot inside the unit.
            gradient: in the parameter's shape; may be let go afterwards.
        """
        state = self._units[index]
        if position in state.arrived:
            self.flush(index)  # a second contribution before the unit was complete
        if state.buffer is None:
            self._open(state)
        slot = state.unit.slots[position]
        if state.buffer is None:
            raise StateError(f"gradient of {slot.name}: no buffer")
        state.buffer[slot.offset_numel : slot.end_numel].copy_(gradient.reshape(-1))
        state.arrived.append(position)
        return len(state.arrived) == len(state.unit.slots)

    def flush(self, index: int) -> None:
        """Move what has arrived into the plane; a later contribution opens the unit again."""
        state = self._units.get(index)
        if state is None or state.buffer is None:
            return
        if not state.empty and state.dtype != torch.float32 and any(state.contributions[p] for p in state.arrived):
            self._widen(state)
        arrived = [state.unit.slots[position] for position in state.arrived]
        again = [state.contributions[position] > 0 for position in state.arrived]
        buffer, block, first = state.buffer, state.block, state.empty
        home = state.plane.memory(state.unit.begin, state.unit.end)
        state.buffer = state.block = None
        for position in state.arrived:
            state.contributions[position] += 1
        state.arrived = []
        if block is not None and home is None:
            state.flush = Flush(buffer, block, arrived, again, first, self._storage.lane.fence())
            self._start_flush(state, state.flush)
            return
        if home is None:
            raise StateError(f"gradient of {state.unit.name}: no home in memory")
        stored = home.view(state.dtype)
        if block is not None:
            source = buffer.to(stored.device)
            for slot, is_again in zip(arrived, again, strict=True):
                self._add(stored, source, slot, 0, state.unit.numel, again=is_again)
            block.release()
        if first:
            _zero_gaps(stored, state.unit, arrived, 0)
        sums, nonfinite = kernels.block_sumsq(stored, threads=self._threads)
        state.sums, state.nonfinite = sums.cpu().numpy(), int(nonfinite.sum())

    def flush_all(self) -> None:
        """End of a backward: nothing waits in a buffer any more."""
        for index in self._units:
            self.flush(index)

    def settle(self) -> None:
        """Wait until every gradient is where it belongs. Raises StorageError."""
        for state in self._units.values():
            self._settle(state)

    def clear(self) -> None:
        """Forget the contributions since the last step: after zero_grad. What a step has sealed stays."""
        for state in self._units.values():
            if state.flush is not None:
                if state.flush.transfer is not None:
                    state.flush.transfer.settle()
                state.flush.block.release()
            if state.block is not None:
                state.block.release()
            state.flush = state.buffer = state.block = None
            state.arrived = []
            self._begin_anew(state)

    def seal(self) -> None:
        """A step takes the gradients as they are; nothing waits in a buffer or is on its way."""
        for state in self._units.values():
            state.sealed = None if state.empty else Sealed(state.plane, state.dtype)
            self._begin_anew(state)

    def _begin_anew(self, state: UnitGradient) -> None:
        state.sums, state.nonfinite, state.contributions = None, 0, [0] * len(state.unit.slots)
        state.plane, state.dtype = state.narrow_plane, self._storage.gradient_dtype(state.unit)

    # ---- what the step wants to know ----------------------------------------------------------

    def contributed(self, index: int) -> list[bool]:
        """Per slot of the unit: has it had a gradient since the last step?"""
        return [count > 0 for count in self._units[index].contributions]

    def contributed_at_rest(self, index: int) -> list[int]:
        """Parameters (indices) of the unit with a gradient; none while any of it is not in its place in memory yet."""
        state = self._units.get(index)
        if state is None or state.buffer is not None or state.flush is not None:
            return []
        return [slot.index for slot, count in zip(state.unit.slots, state.contributions, strict=True) if count]

    def taken(self, index: int) -> Sealed:
        """The unit's gradient that an update works with: the last step's, else what has been collected since."""
        state = self._units[index]
        return state.sealed or Sealed(state.plane, state.dtype)

    def norm(self) -> float:
        """2-norm of all gradients: fp64 block sums, summed exactly, so independent of order and tier."""
        sums = [state.sums for state in self._units.values() if state.sums is not None]
        return math.sqrt(math.fsum(value for part in sums for value in part.tolist()))

    def nonfinite(self) -> int:
        """How many gradient elements are inf or NaN."""
        return sum(state.nonfinite for state in self._units.values())

    # ---- inside -------------------------------------------------------------------------------

    def _open(self, state: UnitGradient) -> None:
        self._settle(state)
        unit = state.unit
        if state.sealed is not None:
            self.update(unit.index)
            state.sealed = None
        if self._in_place and state.empty and state.dtype == unit.dtype:
            home = state.plane.memory(unit.begin, unit.end)
            if home is not None and home.device == self._device:
                state.buffer = home.view(unit.dtype)
                return
        pool = self._storage.gradient_pool
        block = pool.try_lease(unit.nbytes)
        for other in self._units.values():
            if block is not None:
                break
            # The pool is small on purpose: units still open give way, and open again if need be.
            if other is not state and other.block is not None:
                self.flush(other.unit.index)
            self._settle(other)
            block = pool.try_lease(unit.nbytes)
        state.block = block or pool.lease(unit.nbytes, f"gradient of {unit.name}")
        state.buffer = state.block.data.view(unit.dtype)

    def _start_flush(self, state: UnitGradient, flush: Flush) -> None:
        job = self._flush_to_disk(state, flush)
        flush.transfer = self._storage.mover.post(f"storing the gradient of {state.unit.name}", job)

    def _settle(self, state: UnitGradient) -> None:
        """Wait until nothing of the unit is on its way. After a failure the next call tries again.

        Blocks are given back here and not by the mover: one thread owns the pool.
        """
        flush = state.flush
        if flush is None:
            return
        if flush.transfer is None:
            self._start_flush(state, flush)
        transfer = flush.transfer
        if transfer is None:
            raise StateError(f"gradient of {state.unit.name}: nothing is on its way")
        try:
            transfer.result()
        finally:
            if transfer.settled():
                flush.transfer = None
            if transfer.settled() and flush.position == state.unit.numel:
                state.sums, state.nonfinite = np.concatenate(flush.sums), flush.nonfinite
                state.flush = None
                flush.block.release()

    def _widen(self, state: UnitGradient) -> None:
        """Move a 16-bit gradient to an fp32 home: a second contribution is about to be added."""
        self._settle(state)
        unit = state.unit
        if unit.index not in self._wide:
            self._wide[unit.index] = self._storage.wide_gradient(unit)
        wide = self._wide[unit.index]
        self._storage.mover.run(f"widening the gradient of {unit.name}", self._copy_wide(state, wide))
        state.plane, state.dtype = wide, torch.float32

    async def _copy_wide(self, state: UnitGradient, wide: Plane) -> None:
        width = state.dtype.itemsize
        for lo in range(state.unit.begin, state.unit.end, CHUNK_NUMEL):
            hi = min(lo + CHUNK_NUMEL, state.unit.end)
            source, target = state.plane.memory(lo, hi), wide.memory(lo, hi)
            if source is not None and target is not None:
                kernels.cast(target.view(torch.float32), source.view(state.dtype), threads=self._threads)
                continue
            block = await self._storage.arena.lease_when_free((hi - lo) * (4 + width), "gradient chunk")
            try:
                narrow = block.data[(hi - lo) * 4 :]
                await state.plane.read(lo, hi, narrow)
                kernels.cast(block.view(torch.float32, hi - lo), narrow.view(state.dtype), threads=self._threads)
                await wide.write(lo, hi, block.data[: (hi - lo) * 4])
            finally:
                block.release()

    async def _flush_to_disk(self, state: UnitGradient, flush: Flush) -> None:
        """Store or add the contribution, from `flush.position` on.

        A chunk whose old values cannot be read is untouched, and the flush goes on there next time. A
        chunk that cannot be written is complete in memory: the plane keeps a copy until it can be.
        """
        unit, width, arena = state.unit, state.dtype.itemsize, self._storage.arena
        error: BaseException | None = None
        while flush.position < unit.numel:
            lo, hi = flush.position, min(flush.position + CHUNK_NUMEL, unit.numel)
            chunk = await arena.lease_when_free((hi - lo) * (width + flush.buffer.element_size()), "gradient chunk")
            try:
                raw = chunk.data[: (hi - lo) * width]
                if not flush.first:
                    await state.plane.read(unit.begin + lo, unit.begin + hi, raw)
                source = flush.buffer[lo:hi]
                if source.device != raw.device:
                    copied = chunk.data[(hi - lo) * width :].view(source.dtype)
                    await self._storage.lane.copy(copied, source, flush.fence)
                    source = copied
                self._store_chunk(state, flush, raw.view(state.dtype), source, lo)
                flush.position = hi
                try:
                    await state.plane.write(unit.begin + lo, unit.begin + hi, raw)
                except StorageError as failure:
                    state.plane.strand(unit.begin + lo, unit.begin + hi, aligned_copy(raw), _nothing)
                    error = error or failure
            finally:
                chunk.release()
        if error is not None:
            raise error

    def _store_chunk(
        self, state: UnitGradient, flush: Flush, stored: torch.Tensor, source: torch.Tensor, lo: int
    ) -> None:
        for slot, again in zip(flush.arrived, flush.again, strict=True):
            self._add(stored, source, slot, lo, lo + stored.numel(), again=again)
        if flush.first:
            _zero_gaps(stored, state.unit, flush.arrived, lo)
        sums, nonfinite = kernels.block_sumsq(stored, threads=self._threads)
        flush.sums.append(sums.numpy())
        flush.nonfinite += int(nonfinite.sum())

    def _add(self, stored: torch.Tensor, source: torch.Tensor, slot: Slot, lo: int, hi: int, *, again: bool) -> None:
        """Put or add the slot's part of [lo, hi); `stored` and `source` begin at element lo of the unit."""
        begin = max(slot.offset_numel, lo) - lo
        end = min(slot.end_numel, hi) - lo
        if begin >= end:
            return
        if again:
            kernels.accumulate(stored[begin:end], source[begin:end], threads=self._threads)
        elif stored.dtype == source.dtype:
            stored[begin:end].copy_(source[begin:end])
        else:
            kernels.cast(stored[begin:end], source[begin:end], threads=self._threads)


def _zero_gaps(stored: torch.Tensor, unit: Unit, arrived: list[Slot], lo: int) -> None:
    """Zero what no slot in `arrived` covers; `stored` begins at element `lo` of the unit."""
    hi = lo + stored.numel()
    position = lo
    for slot in sorted(arrived, key=lambda s: s.offset_numel):
        if slot.offset_numel > position:
            stored[position - lo : min(slot.offset_numel, hi) - lo].zero_()
        position = max(position, slot.end_numel)
        if position >= hi:
            return
    stored[position - lo :].zero_()


def _nothing_to_do(index: int) -> None:
    """Until a step can be taken no gradient is sealed."""


def _nothing() -> None:
    """A stranded copy of its own needs nobody to be told."""
