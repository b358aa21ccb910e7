"""Gradients from autograd into the gradient plane.

One contribution is kept as produced; from the second on it is accumulated in fp32. A parameter that contributed nothing
since the last step is remembered as such: the optimizer skips it, as torch does. Block sums of squares are rewritten
whenever a unit's gradient is, so the step never reads it again for the norm.

A step seals what has been collected: updates behind the step read it, and the first gradient of the next step that
needs its place waits until they have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from offload.errors import StateError
from offload.kernels import kernels
from offload.kernels.square_sums import SquareSum, nonfinite_of, rows_in, rows_of
from offload.memory.arena import Block
from offload.mover import Transfer
from offload.planes.copies import read_plane, write_plane
from offload.planes.planes import Plane
from offload.sizes import BLOCK_NUMEL, align_up
from offload.streams import Fence
from zero.optim.contributions import CHUNK_NUMEL, Contribution, ContributionStore, add_up
from zero.params.layout import Layout, Slot, Unit
from zero.plan.pools import gradient_sums_bytes
from zero.store.storage import Storage


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
    dtype: torch.dtype  # What the plane holds for this unit.
    narrow_plane: Plane
    contributions: list[int]  # Per slot, how many contributions the plane holds.
    sums: torch.Tensor  # Of what the plane holds, in host memory.
    summed: bool = False  # Something has been stored since the last step.
    # Slots, in order, whose latest contributions wait in `buffer`, and how many they are: one, unless it `adds`.
    arrived: dict[int, int] = field(default_factory=dict)
    # Flat gradient, unit.numel elements: of unit.dtype, or what the plane holds if it `adds`.
    buffer: torch.Tensor | None = None
    adds: bool = False  # Contributions are added up in `buffer`: the plane held nothing when it was opened.
    # The lease behind `buffer`, with room for its sums on a GPU; None when it is the plane's own memory.
    block: Block | None = None
    stream: Any = None  # On a GPU, the stream that the buffer is being filled on.
    storing: Storing | None = None  # What is being stored; its block is leased until that has succeeded.
    copied: Fence = None  # Behind what the device is copying to the host, sums included.
    sealed: Sealed | None = None

    @property
    def empty(self) -> bool:
        """True when the plane holds nothing for this step."""
        return not self.summed


class Storing(Protocol):
    """A gradient on its way to its plane."""

    block: Block | None
    transfer: Transfer[None] | None  # The attempt under way; None after a failure.

    @property
    def done(self) -> bool:
        """True once all of it is where it belongs."""


class Gradients:
    """All trainable units' gradients.

    `in_place`: a first contribution may be collected where it is stored.

    Attributes:
        deferred: gradients of an earlier backward of this step wait to be reduced.
        together: in this backward several micro-batches pass each unit before it is `passed`.
        update: called with a unit whose sealed gradient is in the way; must not return before it was used.
        reclaim: called with a unit whose gradient needs its memory now; must not return before it is free.
        order: (unit, position of the slot), as their first gradients since the last step have arrived.
    """

    deferred = together = False

    def __init__(self, layout: Layout, storage: Storage, device: torch.device, in_place: bool, threads: int) -> None:
        self._storage, self._device, self._in_place = storage, device, in_place
        self._streams, self._store, self._threads = storage.streams, ContributionStore(storage, threads), threads
        self.update: Callable[[int], None] = lambda index: None  # until a step can be taken no gradient is sealed
        self.reclaim: Callable[[Unit], None] = lambda unit: None
        self.order: dict[tuple[int, int], None] = {}
        self._units: dict[int, UnitGradient] = {}
        self._storing: dict[int, None] = {}  # Units that the mover is storing, in the order in which it was asked.
        self._wide: dict[int, Plane] = {}
        for unit in layout.units:
            plane = storage.gradients[layout.space_of(unit)] if unit.trainable else None
            if plane is not None:
                dtype, sums = storage.gradient_dtype(unit), storage.square_sums(unit)
                self._units[unit.index] = UnitGradient(unit, plane, dtype, plane, [0] * len(unit.slots), sums)

    # ---- arrival ------------------------------------------------------------------------------

    def arrive(
        self, index: int, position: int, gradient: torch.Tensor, rows: torch.Tensor | None = None, parts: float = 1.0
    ) -> bool:
        """Take one parameter's gradient. True when every slot of the unit has arrived, and nothing is to be added.

        Args:
            index: the unit.
            position: the slot inside the unit.
            gradient: in the parameter's shape; may be let go afterwards.
            rows: of the first dimension, that `gradient` is for; the others' gradient is zero. None: it is for all.
            parts: it is divided by them.
        """
        state = self._units[index]
        if position in state.arrived and (not state.adds or rows is not None):
            self.flush(index)  # a second contribution before the unit was complete
        if state.buffer is None:
            self._open(state)
        slot = state.unit.slots[position]
        if state.buffer is None:
            raise StateError(f"gradient of {slot.name}: no buffer")
        state.stream = self._streams.follow(state.stream)
        place = state.buffer[slot.offset_numel : slot.end_numel]
        if position in state.arrived:
            add_up(place, gradient.reshape(-1).to(state.unit.dtype), self._threads)
        elif rows is None:
            place.copy_(gradient.reshape(-1))
        else:
            place.zero_()
            place.view(slot.shape)[rows] = gradient.to(place.dtype)
        if parts != 1:
            place.div_(parts)
        state.arrived[position] = state.arrived.get(position, 0) + 1
        self.order[index, position] = None
        return len(state.arrived) == len(state.unit.slots) and not state.adds

    def flush(self, index: int) -> None:
        """Move what has arrived into the plane; a later contribution opens the unit again."""
        state = self._units.get(index)
        if state is None or state.buffer is None:
            return
        if not state.empty and self._widens(state) and any(state.contributions[p] for p in state.arrived):
            self._widen(state)
        self._streams.follow(state.stream)
        item = self._take(state, state.buffer)
        home = state.plane.memory(state.unit.begin, state.unit.end)
        if home is not None and self._store.can_address(home, item.buffer):
            self._put(state, item, home)
        elif home is not None and item.first and item.block is not None:
            state.copied = self._store.copy_out(item, home, _sums_in(item.block, item.unit))
            item.block.release(state.copied)
        else:
            if not self._streams.shared and item.block is not None:
                self._store.sum_on_device(item, _sums_in(item.block, item.unit))
            item.fence, state.storing = self._streams.fence(), item
            self._storing[index] = None
            self._start(state, item)

    def passed(self, index: int) -> None:
        """Everything that a use of the unit contributes has arrived, or the unit is complete."""
        self.flush(index)

    def _widens(self, state: UnitGradient) -> bool:
        """True when what is held has to become fp32 before something is added."""
        return state.dtype != torch.float32 and self._storage.plan.accumulation == torch.float32

    def _take(self, state: UnitGradient, buffer: torch.Tensor) -> Contribution:
        """What has arrived, as one contribution; the unit can be opened again."""
        arrived = [state.unit.slots[position] for position in state.arrived]
        again = [state.contributions[position] > 0 for position in state.arrived]
        item = Contribution(state.unit, state.plane, state.dtype, buffer, arrived, again, state.empty, state.sums)
        item.block = state.block
        for position, count in state.arrived.items():
            state.contributions[position] += count
        state.buffer = state.block = state.stream = None
        state.arrived, state.adds, state.summed = {}, False, True
        return item

    def _put(self, state: UnitGradient, item: Contribution, home: torch.Tensor) -> None:
        """Store it where the device it is on can write; from a GPU only the sums have to travel."""
        if self._streams.shared:
            self._store.put(item, home, item.sums)
            if item.block is not None:
                item.block.release()
            return
        block = item.block or self._lease(state, gradient_sums_bytes(state.unit))
        sums = _sums_in(block, state.unit)
        self._store.put(item, home, sums)
        state.copied = self._streams.copy_out(item.sums, sums, self._streams.fence())
        block.release(state.copied)

    def flush_all(self) -> None:
        """End of a backward: nothing waits in a buffer any more."""
        for index in self._units:
            self.flush(index)

    def begin_backward(self, *, boundary: bool, together: bool = False) -> None:
        """A backward begins; `boundary`: the next step is to update the parameters with what it gives."""
        self.together = together

    def end_backward(self) -> None:
        self.flush_all()
        self.together = False

    def break_off(self) -> None:
        """A backward of micro-batches together has failed; `clear` follows, or the end."""
        self.together = False

    def complete(self) -> None:
        """A step is about to be fixed: nothing waits in a buffer or is on its way. Raises StorageError."""
        self.flush_all()
        self.settle()

    def settle(self) -> None:
        """Wait until every gradient is where it belongs. Raises StorageError."""
        for state in self._units.values():
            self._settle(state)
        on_their_way = [state.copied for state in self._units.values() if state.copied is not None]
        if on_their_way:
            self._storage.mover.run("copying gradients to the host", self._streams.reached(*on_their_way))
        for state in self._units.values():
            state.copied = None

    def clear(self) -> None:
        """Forget the contributions since the last step: after zero_grad. What a step has sealed stays."""
        for state in self._units.values():
            if state.storing is not None and state.storing.transfer is not None:
                state.storing.transfer.settle()
            for holder in (state.storing, state):
                if holder is not None and holder.block is not None:
                    holder.block.release(self._streams.fence())
            state.storing = state.buffer = state.block = state.stream = None
            state.arrived, state.adds = {}, False
            self._begin_anew(state)
        self._storing.clear()
        self.order.clear()

    def seal(self) -> None:
        """A step takes the gradients as they are; nothing waits in a buffer or is on its way."""
        for state in self._units.values():
            state.sealed = None if state.empty else Sealed(state.plane, state.dtype)
            self._begin_anew(state)
        self.order.clear()

    def _begin_anew(self, state: UnitGradient) -> None:
        state.summed, state.contributions = False, [0] * len(state.unit.slots)
        state.plane, state.dtype = state.narrow_plane, self._storage.gradient_dtype(state.unit)

    # ---- everything, for who moves it elsewhere -------------------------------------------------

    def states(self) -> list[UnitGradient]:
        """What is known of every trained unit; nothing waits in a buffer after `flush_all` and `settle`."""
        return list(self._units.values())

    def waiting(self) -> dict[int, torch.Tensor]:
        """Unit's index -> a whole gradient of this rank that is not reduced yet."""
        return {}

    def rest(self, *, aside: bool) -> dict[int, torch.Tensor]:
        """Keep nothing of `gradient_pool`; if `aside`, nor what `waiting` says: it is returned, for `take_up`."""
        return {}

    def drop_waiting(self, unit: Unit, slot: Slot) -> None:
        """Forget what waits to be reduced of one parameter: its gradient is about to be replaced."""

    def take_up(self, index: int, flat: torch.Tensor) -> None:
        """Let `flat`, a whole gradient of (unit.numel,), wait as `waiting` has said.

        Raises StateError: with one rank nothing waits.
        """
        raise StateError(f"gradient of unit {index}: nothing waits to be reduced with one rank")

    def read_stored(self, state: UnitGradient, begin: int, end: int) -> torch.Tensor:
        """A copy on the host of what the plane holds at coordinates [begin, end) of a unit. Raises StorageError."""
        lo, hi = begin // BLOCK_NUMEL * BLOCK_NUMEL, min(align_up(end, BLOCK_NUMEL), state.unit.end)
        memory = state.plane.memory(lo, hi)
        if memory is None:
            memory = torch.empty(state.plane.nbytes(lo, hi), dtype=torch.uint8, device="cpu")
            job = read_plane(state.plane, lo, hi, memory, self._storage.arena)
            self._storage.mover.run(f"reading the gradient of {state.unit.name}", job)
        return memory.view(state.dtype)[begin - lo : end - lo].to("cpu", copy=True)

    def write_stored(self, state: UnitGradient, begin: int, values: torch.Tensor) -> None:
        """Let the plane hold `values` (of its dtype, whole blocks) from coordinate `begin` on. Raises StorageError."""
        unit, end = state.unit, begin + values.numel()
        kernels.block_sumsq(values, into=rows_of(state.sums, begin - unit.begin, end - unit.begin))
        job = write_plane(state.plane, begin, end, values.view(torch.uint8), self._storage.arena)
        self._storage.mover.run(f"storing the gradient of {unit.name}", job)
        state.summed = True

    def make_wide(self, state: UnitGradient) -> None:
        """Give a unit that holds nothing yet an fp32 home. Raises BudgetError: there is no room for one."""
        if state.dtype != torch.float32:
            state.plane, state.dtype = self._wide_home(state.unit), torch.float32

    def _wide_home(self, unit: Unit) -> Plane:
        """The unit's fp32 home, the same one in every step that needs it."""
        if unit.index not in self._wide:
            self._wide[unit.index] = self._storage.wide_gradient(unit)
        return self._wide[unit.index]

    # ---- what the step wants to know ----------------------------------------------------------

    def contributed(self, index: int) -> list[bool]:
        """Per slot of the unit: has it had a gradient since the last step?"""
        return [count > 0 for count in self._units[index].contributions]

    def taken(self, index: int) -> Sealed:
        """The unit's gradient of the last step, until its update has used it.

        Raises StateError: the step has none of it.
        """
        state = self._units[index]
        if state.sealed is None:
            raise StateError(f"gradient of {state.unit.name}: the last step has none")
        return state.sealed

    def square_sum(self) -> SquareSum:
        """Of this rank's slices."""
        return SquareSum.merged(SquareSum.of(state.sums) for state in self._units.values() if state.summed)

    def nonfinite(self) -> int:
        """How many gradient elements are inf or NaN."""
        return sum(int(nonfinite_of(state.sums).sum()) for state in self._units.values() if state.summed)

    # ---- inside -------------------------------------------------------------------------------

    def _open(self, state: UnitGradient) -> None:
        self._settle(state)
        unit, streams = state.unit, self._streams
        if state.sealed is not None:
            self.update(unit.index)
            streams.wait(streams.behind_updates())  # on a GPU the update may only have been begun
            state.sealed = None
        self.reclaim(unit)
        dtype = self._begin_adding(state) if self.together and state.empty else unit.dtype
        if self._in_place and state.empty and state.dtype == dtype:
            home = state.plane.memory(unit.begin, unit.end)
            if home is not None and home.device == self._device:
                state.buffer = home.view(dtype)
                return
        nbytes = unit.numel * dtype.itemsize
        state.block = self._lease(state, nbytes + (0 if streams.shared else gradient_sums_bytes(unit)))
        state.buffer = state.block.view(dtype, unit.numel)

    def _begin_adding(self, state: UnitGradient) -> torch.dtype:
        """Contributions will be added up before they are stored; returns in what."""
        state.adds = True
        if self._widens(state):
            self.make_wide(state)
        return state.dtype

    def _lease(self, state: UnitGradient, nbytes: int) -> Block:
        """Memory of the device that its current stream may use."""
        pool = self._storage.gradient_pool
        block = pool.try_lease(nbytes)
        asked = [self._units[index] for index in self._storing]  # the first of them is the first to be done
        for other in (*asked, *self._units.values()):
            if block is not None:
                break
            # The pool is small on purpose: units still open give way, and open again if need be.
            if other is not state and other.block is not None:
                self.flush(other.unit.index)
            self._settle(other)
            block = pool.try_lease(nbytes)
        block = block or pool.lease(nbytes, f"gradient of {state.unit.name}")
        self._streams.wait(*block.fences)
        return block

    def _start(self, state: UnitGradient, item: Contribution) -> None:
        job = self._store.store(item)
        item.transfer = self._storage.mover.post(f"storing the gradient of {state.unit.name}", job)

    def _settle(self, state: UnitGradient) -> None:
        """Wait until the mover has stored what it was given of the unit. After a failure the next call tries again.

        Blocks are given back here and not by the mover: one thread owns the pool.
        """
        item = state.storing
        if item is None:
            return
        if item.transfer is None and isinstance(item, Contribution):
            self._start(state, item)
        transfer = item.transfer
        if transfer is None:
            raise StateError(f"gradient of {state.unit.name}: nothing is on its way")
        try:
            transfer.result()
        finally:
            if transfer.settled():
                item.transfer = None
            if transfer.settled() and item.done:
                state.storing = None
                self._storing.pop(state.unit.index, None)
                if item.block is not None:
                    item.block.release()

    def _widen(self, state: UnitGradient) -> None:
        """Move a 16-bit gradient to an fp32 home: a second contribution is about to be added."""
        self._settle(state)
        unit = state.unit
        wide, narrow, dtype = self._wide_home(unit), state.plane, state.dtype

        async def widen() -> None:
            await self._streams.reached(state.copied)  # of its sums too: it has been made
            await self._store.widen(unit, narrow, dtype, wide)

        self._storage.mover.run(f"widening the gradient of {unit.name}", widen())
        self._streams.wait(self._streams.behind_updates())
        state.plane, state.dtype = wide, torch.float32


def _sums_in(block: Block, unit: Unit) -> torch.Tensor:
    """Where a block of the device has room for the sums of the unit's gradient: at its end."""
    return rows_in(block.data[block.data.numel() - gradient_sums_bytes(unit) :])


# Where the gradient of a parameter, or of a tile of it, lies, and how many contributions it holds.
Place = tuple[UnitGradient, Slot, int]


def move_gradients(given: Gradients, taking: Gradients, new_index_of: dict[int, int]) -> None:
    """Move what has been accumulated since the last step; both sides are at rest, and `taking` is empty.

    Raises StorageError: nothing of the given side has changed. `new_index_of`: parameter index in the given layout ->
    index in the taking one; the others have no place there.
    """
    sources: dict[int, list[Place]] = {}
    for state in given.states():
        for slot, count in zip(state.unit.slots, state.contributions, strict=True):
            if count and slot.index in new_index_of:
                sources.setdefault(new_index_of[slot.index], []).append((state, slot, count))
    for state in taking.states():
        held = [[p for p in sources.get(s.index, []) if _common(p[1], s) or not s.numel] for s in state.unit.slots]
        if any(held):
            _fill(given, taking, state, held)


def _fill(given: Gradients, taking: Gradients, state: UnitGradient, held: list[list[Place]]) -> None:
    if any(place[0].dtype == torch.float32 for places in held for place in places):
        taking.make_wide(state)
    unit = state.unit
    for lo in range(0, unit.numel, CHUNK_NUMEL):
        hi = min(lo + CHUNK_NUMEL, unit.numel)
        chunk = torch.zeros(hi - lo, dtype=state.dtype)
        for slot, places in zip(unit.slots, held, strict=True):
            origin = slot.offset_numel - slot.first_numel  # where the parameter's first element would be
            for source, part, _ in places:
                common = _common(part, slot)
                first, last = max(lo - origin, common.start), min(hi - origin, common.stop)
                if first < last:
                    begin = source.unit.begin + part.offset_numel - part.first_numel
                    values = given.read_stored(source, begin + first, begin + last)
                    chunk[first + origin - lo : last + origin - lo].copy_(values)
        taking.write_stored(state, unit.begin + lo, chunk)
    state.contributions = [max((place[2] for place in places), default=0) for places in held]


def _common(one: Slot, other: Slot) -> range:
    """Elements of a parameter that both slots have."""
    begin = max(one.first_numel, other.first_numel)
    return range(begin, min(one.first_numel + one.numel, other.first_numel + other.numel))
