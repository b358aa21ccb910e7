"""Moves a model's values into the planes, streaming: sub-group by sub-group.

A parameter's own memory is let go as soon as its last element has been stored, so a model that was
built in memory shrinks while its shards grow, and one built under `Init` never was there. What other
planes hold comes with its exact master and its states.

[Note: zeros] New planes hold zeros, in memory and in a swap space, where the file system reads what was reserved and
never written as zeros. So of a record only the front is written that holds more: nothing, where states are fresh and
weights are their own masters; what weights lack of their masters; or, with states, all of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from offload.kernels import masters
from offload.memory.pinned import return_freed_memory
from offload.planes.copies import CHUNK_BYTES, clear_alone, copy_alone
from offload.planes.planes import settle_all
from zero.params.layout import Layout, Slot, Space, SubGroup, Unit
from zero.plan.record import Record
from zero.ranks import world
from zero.store.staging import Staged, StagedGroup, Staging
from zero.store.storage import Storage

STORES = 1
"""Sub-groups on their way to the disk while another is made."""
SHOWN_AFTER_SECONDS = 5.0
"""A bar shows how far it is from then on."""
RETURN_NUMEL = 16 << 20
"""Handing freed memory back walks the whole heap, so it is done once for so many elements stored."""


class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
    """A bar of one process: tqdm's own lock is a named semaphore, which a killed rank would leave behind."""

    _lock = threading.RLock()


class Piece(NamedTuple):
    """A run of one parameter's values, 1-D tensors of equal length, on the CPU or the device."""

    first: int
    """Element of the parameter."""
    weight: torch.Tensor
    """Of any floating dtype; fp32 values of a 16-bit parameter keep their bits in its master."""
    remainder: torch.Tensor | None = None
    """What the 16-bit weight lacks of its fp32 master (`offload.kernels.masters`); None: derived from `weight`."""
    states: tuple[torch.Tensor, ...] | None = None
    """The optimizer's planes, in the plan's order, fp32; None: zero."""


ReadSource = Callable[[nn.Parameter, int, int, bool], Iterable[Piece]]
"""(parameter, begin, end, with its state) -> its values [begin, end), in pieces."""


class Adoption:
    """One model's way into the planes.

    Args:
        parameters: the model's, by their index in the layout.
        read: where values come from.
        done: called with (unit, slot) once all of a slot is stored, to let go of what it came from; None: of nothing.
        fresh: nobody has written to the planes yet.
        only: indices of the parameters that are stored over what the planes hold; everything else stays, states too.
        slices: where other slices are, counted from this rank's (0, always there): what goes there is read too, in that
            order, and dropped. So ranks that read together read the same.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        storage: Storage,
        read: ReadSource,
        done: Callable[[Unit, Slot], None] | None,
        *,
        fresh: bool = False,
        only: Collection[int] | None = None,
        slices: Sequence[int] = (0,),
    ) -> None:
        self._layout, self._parameters, self._storage = layout, parameters, storage
        self._read, self._done, self._only = read, done, only
        self._slices, self._fresh = slices, fresh
        # What is let go may be what makes room for the next one on a drive that is full.
        self._behind = STORES if storage.disk is None or storage.disk.swap.reserved else 0
        self._stored_numel = 0
        """Since freed memory was last handed back."""
        self._stores: deque[asyncio.Task[None]] = deque()
        self._storing: deque[SubGroup] = deque()
        """Sub-groups whose parameters have not been let go: what their values came from stays until they are stored."""

    def run(self) -> None:
        """Store every unit."""
        mover = self._storage.mover
        try:
            self._run()
        except BaseException:
            mover.run("storing initial values", self._forget())
            raise
        mover.run("storing initial values", self._settle())

    async def _forget(self) -> None:
        """Let what is under way end, whatever comes of it."""
        await asyncio.gather(*self._stores, return_exceptions=True)
        self._stores.clear()

    def _run(self) -> None:
        streams = self._storage.streams
        made = streams.fence()

        async def follow() -> None:
            streams.wait(made)  # a model that was made on the device may still be in the making

        self._storage.mover.run("waiting for initial values", follow())
        with Bar(
            total=sum(space.numel for space in self._layout.spaces),
            desc="values moved to their places",
            unit=" elements",
            unit_scale=True,
            delay=SHOWN_AFTER_SECONDS,
            disable=world.rank() > 0,
        ) as bar:
            self._move_all(bar)

    def _move_all(self, bar: Bar) -> None:
        for group in self._storage.plan.sub_groups:
            bar.update(group.end - group.begin)
            if not self._concerns(self._layout.units_in(group)):
                continue
            self._storage.mover.run("storing initial values", self._adopt_group(group))
            self._storing.append(group)
            self._finish_groups(self._behind)
            self._stored_numel += group.end - group.begin
            if self._stored_numel >= RETURN_NUMEL and self._done is not None:
                # The C library would keep what the parameters lay in, and the planes are growing.
                self._stored_numel = 0
                return_freed_memory()
        self._storage.mover.run("storing initial values", self._settle())
        self._finish_groups(0)
        for index, space in enumerate(self._layout.spaces):
            if not space.trainable:
                for unit in filter(lambda unit: self._concerns([unit]), space.units):
                    self._storage.mover.run(f"storing {unit.name}", self._adopt_frozen(index, unit))
                    self._finish(space, unit.begin, unit.end)
                    bar.update(unit.shard_numel)

    def _concerns(self, units: Iterable[Unit]) -> bool:
        only = self._only
        return only is None or any(slot.index in only for unit in units for slot in unit.slots)

    async def _begin(self, parts: list[Staged]) -> None:
        """Nothing, or what the planes hold."""
        if self._only is not None:
            await settle_all([part.read() for part in parts])
            return
        for part in parts:
            if not part.in_place:  # a plane in memory is zero already, and states that nobody writes cost nothing
                clear_alone(part.bytes)

    async def _adopt_group(self, group: SubGroup) -> None:
        staged = StagedGroup(self._storage, self._layout, group)
        await staged.lease("sub-group")
        fresh = self._fresh and staged.state.plane.starts_as_zeros
        # Of the record, that are in memory and to be written; the rest is zeros where it lives.
        front_bytes = 0 if fresh else staged.state.bytes.numel()
        try:
            await self._begin([part for part in staged.parts if not (fresh and part is staged.state)])
            for unit in staged.units:
                front_bytes = self._encode(unit, staged, front_bytes)
        except BaseException:
            staged.release()
            raise
        self._stores.append(asyncio.create_task(self._store(staged, front_bytes)))
        await self._settle(self._behind)

    async def _store(self, staged: StagedGroup, front_bytes: int) -> None:
        try:
            weights = (weight.write() for weight in staged.weights.values())
            await settle_all([staged.state.write_front(front_bytes), *weights])
        finally:
            staged.release()

    async def _settle(self, left: int = 0) -> None:
        """Wait until so many stores are under way at most."""
        while len(self._stores) > left:
            try:
                await self._stores[0]
            finally:
                self._stores.popleft()

    def _encode(self, unit: Unit, staged: StagedGroup, front_bytes: int) -> int:
        """Fill one unit's run of a sub-group: the weight and, where there is more than zeros, the record.

        `front_bytes`: of the record are in memory; returns how many are now.
        """
        weight, record = staged.weights[unit.index], staged.record()
        stored, shift = weight.bytes.view(unit.dtype), weight.begin - staged.group.begin
        lo, hi = weight.begin - unit.origin, weight.end - unit.origin
        states: tuple[torch.Tensor, ...] | None = None
        for slot, piece in self._pieces(unit, lo, hi, state=True):
            at, numel = slot.offset_numel + piece.first - slot.first_numel - lo, piece.weight.numel()
            target = stored[at : at + numel]
            front_bytes = _front_for(piece, staged, record, front_bytes)
            if not front_bytes:
                target.copy_(piece.weight)
                continue
            remainder = None if record.remainder is None else record.remainder[shift + at : shift + at + numel]
            _store_weight(target, remainder, piece)
            if piece.states is not None and record.states.planes:
                for plane, given in zip(record.states.planes, piece.states, strict=True):
                    copy_alone(plane[shift + at : shift + at + numel], given)
            elif piece.states is not None:
                if states is None:  # they are stored together: those of others too, as they are
                    states = record.states.load(shift, shift + hi - lo)
                    _clear_gaps(unit, lo, states)
                for values, given in zip(states, piece.states, strict=True):
                    values[at : at + numel].copy_(given)
        if states is not None:
            record.states.part(shift, shift + hi - lo).store(states)
        return front_bytes

    async def _adopt_frozen(self, index: int, unit: Unit) -> None:
        plane = self._storage.weights[index]
        step = max(CHUNK_BYTES // unit.dtype.itemsize // 4096, 1) * 4096
        for lo in range(0, unit.shard_numel, step):
            hi = min(lo + step, unit.shard_numel)
            memory = plane.memory(unit.begin + lo, unit.begin + hi)
            where = torch.device("cpu") if memory is None else memory.device
            part = Staged(plane, unit.begin + lo, unit.begin + hi, where, self._storage.streams)
            staging = await Staging.lease(self._storage, [part], "frozen weights")
            try:
                await self._begin([part])
                stored = part.bytes.view(unit.dtype)
                first = unit.first_numel + lo
                for slot, piece in self._pieces(unit, first, unit.first_numel + hi, state=False):
                    at = slot.offset_numel + piece.first - slot.first_numel - first
                    stored[at : at + piece.weight.numel()].copy_(piece.weight)
                await part.write()
            finally:
                staging.release()

    def order(self) -> Iterator[tuple[Unit, Slot, int, int]]:
        """(unit, slot, first, last element of the parameter) of everything that `run` will read, in that order."""
        for group in self._storage.plan.sub_groups:
            for unit in self._layout.units_in(group):
                lo, hi = group.part_of(unit)
                for _, slot, begin, end in self._ranges(unit, lo - unit.origin, hi - unit.origin):
                    yield unit, slot, begin, end
        for space in self._layout.spaces:
            for unit in space.units if not space.trainable else ():
                for _, slot, begin, end in self._ranges(unit, unit.first_numel, unit.last_numel):
                    yield unit, slot, begin, end

    def _pieces(self, unit: Unit, lo: int, hi: int, *, state: bool) -> Iterable[tuple[Slot, Piece]]:
        """What lies in elements [lo, hi) of the unit; used one by one, the next may overwrite the last."""
        for away, slot, begin, end in self._ranges(unit, lo, hi):
            for piece in self._read(self._parameters[slot.index], begin, end, state):
                if not away:
                    yield slot, piece

    def _ranges(self, unit: Unit, lo: int, hi: int) -> Iterator[tuple[int, Slot, int, int]]:
        """(slices away, slot, first, last element of the parameter) of what is read for elements [lo, hi)."""
        for away in self._slices:
            shift = away * unit.shard_numel
            for slot in unit.slots:
                first, last = max(lo + shift - slot.offset_numel, 0), min(hi + shift - slot.offset_numel, slot.numel)
                if first < last and (self._only is None or slot.index in self._only):
                    yield away, slot, slot.first_numel + first, slot.first_numel + last

    def _finish_groups(self, left: int) -> None:
        """Release the parameters of sub-groups that are stored: all but the last `left`."""
        while len(self._storing) > left:
            group = self._storing.popleft()
            self._finish(self._layout.spaces[group.space], group.begin, group.end)

    def _finish(self, space: Space, begin: int, end: int) -> None:
        """Release the parameters whose last element lies in [begin, end)."""
        if self._done is None:
            return
        # On a GPU the mover's stream may still read them, and their memory is reused in the order of another stream.
        streams = self._storage.streams
        self._storage.mover.run("storing initial values", streams.reached(streams.behind_updates()))
        for unit in space.overlapping(begin, end):
            for slot in unit.slots:
                # What is in other ranks' slices is done with this rank's first element, or its last.
                last = min(max(unit.origin + max(slot.end_numel, slot.offset_numel + 1), unit.begin + 1), unit.end)
                if begin < last <= end:
                    self._done(unit, slot)


def _front_for(piece: Piece, staged: StagedGroup, record: Record, front_bytes: int) -> int:
    """Make room in the record's front for what a piece makes more than zeros; returns how long it is now."""
    needed_bytes = 0
    if piece.states is not None:
        needed_bytes = staged.state.bytes.numel()
    elif record.remainder is not None:
        exact = piece.remainder is None and piece.weight.dtype == staged.space.dtype
        needed_bytes = 0 if exact and record.remainder.dtype == torch.int16 else record.remainder.nbytes
    if needed_bytes > front_bytes and not staged.state.in_place:
        clear_alone(staged.state.bytes[front_bytes:needed_bytes])
    return max(front_bytes, needed_bytes)


def _store_weight(target: torch.Tensor, remainder: torch.Tensor | None, piece: Piece) -> None:
    """Weights, and what they lack of their masters."""
    if remainder is not None and piece.remainder is None and piece.weight.dtype != target.dtype:
        masters.part(target, remainder, piece.weight.to(target.device, torch.float32))
        return
    target.copy_(piece.weight)
    if remainder is not None and piece.remainder is not None:
        remainder.copy_(piece.remainder)
    elif remainder is not None:
        masters.forget(target, remainder)


def _clear_gaps(unit: Unit, lo: int, states: tuple[torch.Tensor, ...]) -> None:
    """Zero what belongs to no parameter, from element `lo` of the unit on: in a block with scales it would count."""
    for values in states:
        position = 0
        for slot in unit.slots:
            values[position : max(slot.offset_numel - lo, position)].zero_()
            position = max(slot.end_numel - lo, position)
        values[position:].zero_()


def read_parameter(parameter: nn.Parameter, begin: int, end: int) -> torch.Tensor:
    """Values from the parameter's own memory."""
    return parameter.detach().reshape(-1)[begin:end]
