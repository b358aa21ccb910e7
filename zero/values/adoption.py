"""Moves a model's values into the tiered arrays, streaming: sub-group by sub-group.

A parameter's own memory is freed as soon as its last element has been stored. So a model that was built in memory
shrinks while its shards grow; a model built under `Init` never was in memory. Values that another engine has stored
come with their exact masters and states.

[Note: zeros] New tiered arrays hold zeros, in memory and in a swap space: there the file system reads reserved ranges
that were never written as zeros. So only the front of a sub-group's optimizer state that is not zero is written:
nothing, if states are fresh and weights are their own masters; the remainders of the masters; or, with states, all.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import nn
from tqdm import tqdm

from offload.array.copies import CHUNK_BYTES, copy_single_threaded, zero_single_threaded
from offload.array.tiered_array import await_all
from offload.kernels import kernels, masters
from offload.kernels.kernel_backend import FLOATS
from offload.kernels.square_sums import nonfinite_of
from offload.memory.host_memory import trim_heap
from zero.dist import world
from zero.params.layout import AddressSpace, Layout, Slot, SubGroup, Unit
from zero.plan.sub_group_state import SubGroupState
from zero.store.staging import StagedRange, StagedSubGroup, StagingBlocks
from zero.store.storage import Storage
from zero.store.stored_values import Piece

STORES_IN_FLIGHT = 1
"""Sub-groups that are being written to the disk while another is made."""
SHOWN_AFTER_SECONDS = 5.0
"""After this time a progress bar appears."""
RETURN_NUMEL = 16 << 20
"""Returning freed memory walks the whole heap, so it is done once per so many stored elements."""


class ProgressBar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
    """A bar of one process: tqdm's own lock is a named semaphore, which a killed rank would leave behind."""

    _lock = threading.RLock()


ReadSource = Callable[[nn.Parameter, int, int, bool], Iterable[Piece]]
"""(parameter, begin, end, whether with its states) -> its values [begin, end), in pieces."""


class Adoption:
    """Adopts a model: moves its values into the tiered arrays, which hold them from then on.

    Args:
        parameters: the model's, by their index in the layout.
        read: the source of the values.
        on_slot_stored: called with (unit, slot) when all of a slot is stored, to free its source; None: sources stay.
        fresh: the tiered arrays have not been written yet.
        only: indices of the parameters whose values replace stored ones; all others stay, with their states.
        shard_offsets: offsets of shards from this rank's shard (0, always there). Values for all these shards are read,
            in that order, and other ranks' are dropped. So ranks that read together read the same.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        storage: Storage,
        read: ReadSource,
        on_slot_stored: Callable[[Unit, Slot], None] | None,
        *,
        fresh: bool = False,
        only: Collection[int] | None = None,
        shard_offsets: Sequence[int] = (0,),
    ) -> None:
        self._layout, self._parameters, self._storage = layout, parameters, storage
        self._read, self._on_slot_stored, self._only = read, on_slot_stored, only
        self._shard_offsets, self._fresh = shard_offsets, fresh
        # On a full drive the source of one sub-group may have to be freed before there is room for the next.
        self._stores_max = STORES_IN_FLIGHT if storage.disk is None or storage.disk.swap.is_reserved else 0
        self.nonfinite: set[int] = set()
        """Indices of the parameters that came without states and have inf or NaN, of those that this rank stores."""
        self._stored_numel = 0
        """Elements stored since freed memory was last returned."""
        self._stores: deque[asyncio.Task[None]] = deque()
        self._unfinished_groups: deque[SubGroup] = deque()
        """Sub-groups whose parameters are not released yet: the sources of their values stay until they are stored."""

    def run(self) -> None:
        """Store every unit."""
        io_loop = self._storage.io_loop
        try:
            self._adopt_all()
        except BaseException:
            io_loop.run("storing initial values", self._drop_stores())
            raise
        io_loop.run("storing initial values", self._wait_for_stores())

    async def _drop_stores(self) -> None:
        """Wait for the running stores and ignore their errors."""
        await asyncio.gather(*self._stores, return_exceptions=True)
        self._stores.clear()

    def _adopt_all(self) -> None:
        streams = self._storage.streams
        event = streams.record_event()

        async def wait_for_values() -> None:
            streams.wait_events(event)  # the device may still be computing the values of a model that was made there

        self._storage.io_loop.run("waiting for initial values", wait_for_values())
        with ProgressBar(
            total=sum(space.numel for space in self._layout.spaces),
            desc="storing initial values",
            unit=" elements",
            unit_scale=True,
            delay=SHOWN_AFTER_SECONDS,
            disable=world.rank() > 0,
        ) as bar:
            self._move_all(bar)

    def _move_all(self, bar: ProgressBar) -> None:
        for group in self._storage.plan.sub_groups:
            bar.update(group.end - group.begin)
            if not self._changes_any(self._layout.units_in(group)):
                continue
            self._storage.io_loop.run("storing initial values", self._adopt_group(group))
            self._unfinished_groups.append(group)
            self._finish_groups(self._stores_max)
            self._stored_numel += group.end - group.begin
            if self._stored_numel >= RETURN_NUMEL and self._on_slot_stored is not None:
                # The C library would keep the parameters' freed memory, while the tiered arrays grow.
                self._stored_numel = 0
                trim_heap()
        self._storage.io_loop.run("storing initial values", self._wait_for_stores())
        self._finish_groups(0)
        for index, space in enumerate(self._layout.spaces):
            if not space.trainable:
                for unit in filter(lambda unit: self._changes_any([unit]), space.units):
                    self._storage.io_loop.run(f"storing {unit.name}", self._adopt_frozen(index, unit))
                    self._finish_slots(space, unit.begin, unit.end)
                    bar.update(unit.shard_numel)

    def _changes_any(self, units: Iterable[Unit]) -> bool:
        only = self._only
        return only is None or any(slot.index in only for unit in units for slot in unit.slots)

    async def _fill_parts(self, parts: list[StagedRange]) -> None:
        """Fill the parts with zeros, or with stored values if only some parameters are replaced."""
        if self._only is not None:
            await await_all([part.read() for part in parts])
            return
        for part in parts:
            if not part.in_place:  # memory is zero already, and pages of states never written cost nothing
                zero_single_threaded(part.bytes)

    async def _adopt_group(self, group: SubGroup) -> None:
        staged = StagedSubGroup(self._storage, self._layout, group)
        await staged.lease("sub-group")
        fresh = self._fresh and staged.state.array.starts_as_zeros
        # Bytes of the state's front that are in memory and will be written; all others are zero in their home.
        front_bytes = 0 if fresh else staged.state.bytes.numel()
        try:
            await self._fill_parts([part for part in staged.parts if not (fresh and part is staged.state)])
            for unit in staged.units:
                front_bytes = self._encode(unit, staged, front_bytes)
        except BaseException:
            staged.free()
            raise
        self._stores.append(asyncio.create_task(self._write_group(staged, front_bytes)))
        await self._wait_for_stores(self._stores_max)

    async def _write_group(self, staged: StagedSubGroup, front_bytes: int) -> None:
        try:
            weights = (weight.write() for weight in staged.weights.values())
            await await_all([staged.state.write_front(front_bytes), *weights])
        finally:
            staged.free()

    async def _wait_for_stores(self, stores_max: int = 0) -> None:
        """Wait until at most `stores_max` stores are running."""
        while len(self._stores) > stores_max:
            try:
                await self._stores[0]
            finally:
                self._stores.popleft()

    def _encode(self, unit: Unit, staged: StagedSubGroup, front_bytes: int) -> int:
        """Fill one unit's run of a sub-group: the weight and, if it is not all zeros, the optimizer state.

        `front_bytes`: length of the state's front in memory; returns the new length.
        """
        weight, state = staged.weights[unit.index], staged.state_view()
        weights, shift = weight.bytes.view(unit.dtype), weight.begin - staged.group.begin
        lo, hi = weight.begin - unit.origin, weight.end - unit.origin
        states: tuple[torch.Tensor, ...] | None = None
        for slot, piece in self._pieces(unit, lo, hi, state=True):
            at, numel = slot.offset_numel + piece.first - slot.first_numel - lo, piece.weight.numel()
            target = weights[at : at + numel]
            front_bytes = _extend_front(piece, staged, state, front_bytes)
            if not front_bytes:
                self._note_nonfinite(slot, _copy(target, piece.weight))
                continue
            remainder = None if state.remainder is None else state.remainder[shift + at : shift + at + numel]
            finite = _store_weight(target, remainder, piece)
            self._note_nonfinite(slot, finite or piece.states is not None)
            if piece.states is not None and state.states.tensors:
                for tensor, values in zip(state.states.tensors, piece.states, strict=True):
                    copy_single_threaded(tensor[shift + at : shift + at + numel], values)
            elif piece.states is not None:
                if states is None:  # states of the whole run are stored together, so load the others unchanged
                    states = state.states.load(shift, shift + hi - lo)
                    _clear_gaps(unit, lo, states)
                for tensor, values in zip(states, piece.states, strict=True):
                    tensor[at : at + numel].copy_(values)
        if states is not None:
            state.states.part(shift, shift + hi - lo).store(states)
        return front_bytes

    def _note_nonfinite(self, slot: Slot, finite: bool) -> None:
        if not finite:
            self.nonfinite.add(slot.index)

    async def _adopt_frozen(self, index: int, unit: Unit) -> None:
        array = self._storage.weights[index]
        step = max(CHUNK_BYTES // unit.dtype.itemsize // 4096, 1) * 4096
        for lo in range(0, unit.shard_numel, step):
            hi = min(lo + step, unit.shard_numel)
            memory = array.memory(unit.begin + lo, unit.begin + hi)
            device = torch.device("cpu") if memory is None else memory.device
            part = StagedRange(array, unit.begin + lo, unit.begin + hi, device, self._storage.streams)
            staging = await StagingBlocks.lease(self._storage, [part], "frozen weights")
            try:
                await self._fill_parts([part])
                weights = part.bytes.view(unit.dtype)
                first = unit.first_numel + lo
                for slot, piece in self._pieces(unit, first, unit.first_numel + hi, state=False):
                    at = slot.offset_numel + piece.first - slot.first_numel - first
                    self._note_nonfinite(slot, _copy(weights[at : at + piece.weight.numel()], piece.weight))
                await part.write()
            finally:
                staging.free()

    def planned_reads(self) -> Iterator[tuple[Unit, Slot, int, int]]:
        """(unit, slot, first, last element of the parameter) of all reads of `run`, in order."""
        for group in self._storage.plan.sub_groups:
            for unit in self._layout.units_in(group):
                lo, hi = group.range_in(unit)
                for _, slot, begin, end in self._ranges(unit, lo - unit.origin, hi - unit.origin):
                    yield unit, slot, begin, end
        for space in self._layout.spaces:
            for unit in space.units if not space.trainable else ():
                for _, slot, begin, end in self._ranges(unit, unit.first_numel, unit.last_numel):
                    yield unit, slot, begin, end

    def _pieces(self, unit: Unit, lo: int, hi: int, *, state: bool) -> Iterable[tuple[Slot, Piece]]:
        """The pieces in elements [lo, hi) of the unit. Use them one by one: the next may overwrite the previous one."""
        for shard_offset, slot, begin, end in self._ranges(unit, lo, hi):
            for piece in self._read(self._parameters[slot.index], begin, end, state):
                if not shard_offset:
                    yield slot, piece

    def _ranges(self, unit: Unit, lo: int, hi: int) -> Iterator[tuple[int, Slot, int, int]]:
        """(offset of the shard, slot, first, last element of the parameter) of all reads for elements [lo, hi)."""
        for shard_offset in self._shard_offsets:
            shift = shard_offset * unit.shard_numel
            for slot in unit.slots:
                first, last = max(lo + shift - slot.offset_numel, 0), min(hi + shift - slot.offset_numel, slot.numel)
                if first < last and (self._only is None or slot.index in self._only):
                    yield shard_offset, slot, slot.first_numel + first, slot.first_numel + last

    def _finish_groups(self, unfinished_max: int) -> None:
        """Finish the slots of sub-groups that are stored: all but the last `unfinished_max`."""
        while len(self._unfinished_groups) > unfinished_max:
            group = self._unfinished_groups.popleft()
            self._finish_slots(self._layout.spaces[group.space], group.begin, group.end)

    def _finish_slots(self, space: AddressSpace, begin: int, end: int) -> None:
        """Call `on_slot_stored` for the slots whose last element lies in [begin, end)."""
        if self._on_slot_stored is None:
            return
        # On a GPU the I/O loop's stream may still read them, but their memory is reused in the order of another stream.
        streams = self._storage.streams
        self._storage.io_loop.run("storing initial values", streams.synchronize(streams.record_update_event()))
        for unit in space.units_between(begin, end):
            for slot in unit.slots:
                # A slot that is only in other ranks' shards ends with this rank's first element, or its last.
                last = min(max(unit.origin + max(slot.end_numel, slot.offset_numel + 1), unit.begin + 1), unit.end)
                if begin < last <= end:
                    self._on_slot_stored(unit, slot)


def _extend_front(piece: Piece, staged: StagedSubGroup, state: SubGroupState, front_bytes: int) -> int:
    """Extend the state's front in memory for the nonzero parts of a piece; returns its new length."""
    needed_bytes = 0
    if piece.states is not None:
        needed_bytes = staged.state.bytes.numel()
    elif state.remainder is not None:
        exact = piece.remainder is None and piece.weight.dtype == staged.space.dtype
        needed_bytes = 0 if exact and state.remainder.dtype == torch.int16 else state.remainder.nbytes
    if needed_bytes > front_bytes and not staged.state.in_place:
        zero_single_threaded(staged.state.bytes[front_bytes:needed_bytes])
    return max(front_bytes, needed_bytes)


def _store_weight(target: torch.Tensor, remainder: torch.Tensor | None, piece: Piece) -> bool:
    """Store weights, and the remainders of their masters; True if all weights are finite."""
    if remainder is not None and piece.remainder is None and piece.weight.dtype != target.dtype:
        masters.split(target, remainder, piece.weight.to(target.device, torch.float32))
        return _is_finite(kernels.block_sumsq(target))
    finite = _copy(target, piece.weight)
    if remainder is not None and piece.remainder is not None:
        remainder.copy_(piece.remainder)
    elif remainder is not None:
        masters.reset_remainder(target, remainder)
    return finite


def _copy(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy values, and convert them; True if all are finite: the kernel that casts sees this in the same pass.

    Equal dtypes are copied by torch, since the kernel would give all codes that are NaN as floats the same bits.
    """
    if {target.dtype, source.dtype} <= {*FLOATS} and target.dtype != source.dtype and target.device == source.device:
        return _is_finite(kernels.cast_sumsq(target, source.detach()))
    target.copy_(source)
    return target.dtype not in FLOATS or _is_finite(kernels.block_sumsq(target))


def _is_finite(sums: torch.Tensor) -> bool:
    return not bool(nonfinite_of(sums).any())


def _clear_gaps(unit: Unit, lo: int, states: tuple[torch.Tensor, ...]) -> None:
    """Zero elements of no parameter, from element `lo` of the unit on: they would count in a block with scales."""
    for values in states:
        position = 0
        for slot in unit.slots:
            values[position : max(slot.offset_numel - lo, position)].zero_()
            position = max(slot.end_numel - lo, position)
        values[position:].zero_()


def read_parameter(parameter: nn.Parameter, begin: int, end: int) -> torch.Tensor:
    """Values from the parameter's own memory."""
    return parameter.detach().reshape(-1)[begin:end]
