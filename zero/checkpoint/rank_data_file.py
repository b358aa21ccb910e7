"""One rank's part of a checkpoint: its boxes of tensors, and its data file, which is written run by run.

[Note: order] A sub-group is one extent: its weights and its optimizer state are read once, and their boxes are
contiguous in the file. For each piece of a parameter the master is written first, then the states, so that a load reads
forwards too.

[Note: run] Consecutive boxes are packed into runs, and each run is written at once. Every payload begins on a page, so
that O_DIRECT can read it alone; the bytes around it lie in the pages between payloads.

[Note: replicas] Ranks that hold the same shard divide its extents: each writes every n-th.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from typing_extensions import override

from offload.array.copies import copy_single_threaded, load_array
from offload.array.tiered_array import TieredArray, await_all
from offload.errors import ConfigError, StateError
from offload.files.archives import BARE, Container, bytes_tensor, container
from offload.files.durable import DurableFile, Files
from offload.io.aio import Aio, AioOptions, open_aio
from offload.io.io_loop import IoFuture
from offload.kernels import kernels, masters
from offload.memory.pool import Block, BlockPool
from offload.sizes import PAGE_BYTES, align_up
from offload.system.worker import Worker
from zero.assembly.engine_parts import EngineParts
from zero.checkpoint.dcp_format import (
    MODEL,
    PIECE_NUMEL,
    RUN_BYTES,
    STEP,
    Box,
    DataFile,
    FileBox,
    FileEntry,
    short_boxes,
    state_name,
)
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.rules import Scalar
from zero.params.buffers import persistent_buffers
from zero.params.layout import Slot, SubGroup, Unit
from zero.plan.sub_group_state import SubGroupState
from zero.store.staging import StagedSubGroup

POOL_BLOCKS = 8  # Runs in memory at once.
EXTENTS_IN_FLIGHT = 4  # While some are written the next are read and encoded: with fewer the disk is sometimes idle.
ENCODER_THREADS = 2  # Threads. One thread encodes 5 GB/s; a disk of that speed would have to wait for it.


@dataclass(frozen=True, slots=True)
class BoxToWrite:
    """One box of one tensor, and the place of its values."""

    name: str  # The tensor's name in the checkpoint.
    dtype: torch.dtype
    box: Box
    shape: tuple[int, ...]  # Of the whole tensor.
    unit: Unit | None = None
    coordinate: int = 0  # Of the box's first element.
    state: int | None = None  # Index of the optimizer's state; None: the weight, or its master, or `values`.
    values: TieredArray | torch.Tensor | None = None  # An array over coordinates, or all of the tensor, flat.
    is_blob: bool = False  # The bytes are already an archive.

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    @property
    def container(self) -> Container:
        return BARE if self.is_blob else container(self.dtype, self.box.sizes)


@dataclass(frozen=True, slots=True)
class PackedBox:
    part: BoxToWrite
    container: Container
    payload: int  # First byte of the payload, counted from the start of the run; page-aligned.

    @property
    def nbytes(self) -> int:
        """Of the payload."""
        return self.part.nbytes

    @property
    def begin(self) -> int:
        """First byte of the archive, in the run."""
        return self.payload - len(self.container.head)

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.payload + self.nbytes + len(self.container.tail)

    def payload_in(self, run: torch.Tensor) -> torch.Tensor:
        """The payload's bytes in the run's memory (uint8); writes the archive's other bytes around them."""
        for data, begin in ((self.container.head, self.begin), (self.container.tail, self.payload + self.nbytes)):
            run[begin : begin + len(data)] = bytes_tensor(data)
        return run[self.payload : self.payload + self.nbytes]


@dataclass(frozen=True, slots=True)
class PackedRun:
    offset: int  # First byte in the file; page-aligned, like its length.
    nbytes: int
    boxes: tuple[PackedBox, ...]

    def clear_gaps(self, memory: torch.Tensor) -> None:
        """Zero the gaps between the boxes in the run's memory (uint8), which may hold bytes of an earlier use."""
        position = 0
        for begin, end in (*((box.begin, box.end) for box in self.boxes), (self.nbytes, self.nbytes)):
            memory[position:begin].zero_()
            position = end


def pack(parts: Iterable[BoxToWrite], offset: int) -> Iterator[PackedRun]:
    """Pack boxes into runs from byte `offset` of a file on, each of at most `RUN_BYTES`; a larger box is one run."""
    boxes: list[PackedBox] = []
    for part in parts:
        box = _box_after(boxes, part)
        if boxes and align_up(box.end, PAGE_BYTES) > RUN_BYTES:
            run = _run(offset, boxes)
            offset, boxes = run.offset + run.nbytes, []
            yield run
            box = _box_after(boxes, part)
        boxes.append(box)
    if boxes:
        yield _run(offset, boxes)


def _box_after(boxes: Sequence[PackedBox], part: BoxToWrite) -> PackedBox:
    around, position = part.container, boxes[-1].end if boxes else 0
    return PackedBox(part, around, align_up(position + len(around.head), PAGE_BYTES))


def _run(offset: int, boxes: Sequence[PackedBox]) -> PackedRun:
    return PackedRun(offset, align_up(boxes[-1].end, PAGE_BYTES), tuple(boxes))


@dataclass(frozen=True, slots=True)
class Extent:
    """Runs that are contiguous in the file, and are made from one read of the arrays."""

    group: SubGroup | None  # None: the values are read box by box.
    runs: tuple[PackedRun, ...]

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)


class Extents:
    """All extents that this rank writes.

    `groups`: sub-groups of the plan. `indices`: of the parameters that are written.
    """

    def __init__(self, parts: EngineParts, groups: Sequence[SubGroup], indices: Collection[int]) -> None:
        self._layout, self._leaves, self._indices = parts.layout, parts.leaves, indices
        self._states, placement = parts.plan.states_of, parts.collectives.placement
        with torch._C.DisableTorchFunctionSubclass():
            self._shapes = [tuple(leaf.parameter.shape) for leaf in parts.leaves]
        replica = placement.replica_ranks.index(placement.rank)
        self.nbytes = 0  # Size of the file so far, in whole pages.
        self._added_boxes: list[BoxToWrite] = []
        everything = list(self._all_boxes(groups))
        own = [self._place(group, boxes) for group, boxes in everything[replica :: len(placement.replica_ranks)]]
        self.extents = [extent for extent in own if extent.runs]

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add a separate tensor in host memory, which must not change until it is written."""
        flat, shape = values.contiguous().reshape(-1), tuple(values.shape)
        boxes = short_boxes(shape, 0, flat.numel(), PIECE_NUMEL)
        self._added_boxes += [BoxToWrite(name, flat.dtype, box, shape, None, box.begin, values=flat) for box in boxes]

    def add_array(self, name: str, dtype: torch.dtype, array: TieredArray, unit: Unit) -> None:
        """Add an array's values of a unit, as a tensor of (shard_numel,)."""
        shape = (unit.shard_numel,)
        boxes = short_boxes(shape, 0, unit.shard_numel, PIECE_NUMEL)
        self._added_boxes += [
            BoxToWrite(name, dtype, box, shape, unit, unit.begin + box.begin, values=array) for box in boxes
        ]

    def add_blob(self, name: str, archive: torch.Tensor) -> None:
        box = Box((0,), (archive.numel(),), 0)
        self._added_boxes += [BoxToWrite(name, archive.dtype, box, (), values=archive, is_blob=True)]

    def finish(self) -> None:
        """Place the added tensors; nothing may be added afterwards."""
        extent = self._place(None, self._added_boxes)
        self._added_boxes = []
        if extent.runs:
            self.extents.append(extent)

    def _place(self, group: SubGroup | None, parts: Sequence[BoxToWrite]) -> Extent:
        runs = tuple(pack(parts, self.nbytes))
        if runs:
            self.nbytes = runs[-1].offset + runs[-1].nbytes
        return Extent(group, runs)

    def _all_boxes(self, groups: Sequence[SubGroup]) -> Iterator[tuple[SubGroup | None, list[BoxToWrite]]]:
        for group in groups:
            slots = ((unit, slot) for unit in self._layout.units_in(group) for slot in unit.slots)
            yield group, [part for place in slots for part in self._slot_boxes(*place, group.begin, group.end)]
        for unit in self._layout.units:
            if not unit.trainable:
                yield None, [part for slot in unit.slots for part in self._slot_boxes(unit, slot, unit.begin, unit.end)]

    def _slot_boxes(self, unit: Unit, slot: Slot, begin: int, end: int) -> Iterator[BoxToWrite]:
        if slot.index not in self._indices:
            return
        lo, hi = unit.shard_range(slot)
        lo, hi = max(lo, begin), min(hi, end)
        origin = unit.origin + slot.offset_numel - slot.first_numel  # where the parameter's first element would be
        if not slot.numel:  # an empty box at the unit's begin, so that one sub-group of the first rank writes it
            lo = hi = origin = unit.begin
        if lo >= hi and (slot.numel or not begin <= unit.begin < end or unit.first_numel):
            return
        name, shape = self._leaves[slot.index].names[0], self._shapes[slot.index]
        tensors: list[tuple[str, torch.dtype, int | None]] = [(MODEL + name, unit.dtype, None)]
        if unit.trainable:
            states = [(state_name(name, kind), torch.float32, at) for at, kind in enumerate(self._states(unit))]
            tensors = [(MODEL + name, torch.float32, None), *states]
        for box in short_boxes(shape, lo - origin, hi - origin, PIECE_NUMEL):
            for tensor, dtype, state in tensors:
                yield BoxToWrite(tensor, dtype, box, shape, unit, origin + box.begin, state)


class ExtentWriter:
    """Encodes extents, in any order, on the storage's I/O loop. It stores nothing: only the checksums are kept.

    `register`: see `BlockPool`.

    Attributes:
        checksums: payload's offset in the file -> (bytes, CRC-32C), for everything encoded so far.
    """

    def __init__(
        self, parts: EngineParts, register: Callable[[torch.Tensor], Callable[[], None]] | None = None
    ) -> None:
        self._layout, self._storage = parts.layout, parts.storage
        self._pool = BlockPool(
            "checkpoint", POOL_BLOCKS * RUN_BYTES, "nothing: it is fixed", torch.device("cpu"), register=register
        )
        self._encoders = Worker("zero-checkpoint-encoder", ENCODER_THREADS)
        self.checksums: dict[int, tuple[int, int]] = {}
        # True: `write_all` begins no further extent, since one has failed or the owner ends it.
        self.is_stopped = False

    async def write_all(
        self,
        extents: Iterable[Extent],
        write: Callable[[Extent], Awaitable[None]] | None = None,
        concurrency: int = EXTENTS_IN_FLIGHT,
    ) -> None:
        """Write extents with the arrays' present values, each by `write`, or `self.write`. Raises StorageError."""
        waiting, write = iter(extents), write or self.write

        async def write_waiting() -> None:
            for extent in waiting:
                if self.is_stopped:
                    return
                try:
                    await write(extent)
                except BaseException:
                    self.is_stopped = True
                    raise

        await await_all([asyncio.ensure_future(write_waiting()) for _ in range(concurrency)])

    async def write(self, extent: Extent) -> None:
        """Write one extent with the arrays' present values. Raises StorageError."""
        await await_all(await self.encode(extent))

    async def encode(self, extent: Extent) -> list[asyncio.Task[None]]:
        """Encode one extent with the arrays' present values; they may change once this returns.

        Returns the running tasks that store it; each may raise StorageError. Raises StorageError: a read failed.
        """
        if extent.group is None:
            return await self._encode_runs(extent, None)
        staged = StagedSubGroup(self._storage, self._layout, extent.group)
        await staged.stage("optimizer state")
        try:
            return await self._encode_runs(extent, staged)
        finally:
            staged.free()

    async def store(self, offset: int, data: torch.Tensor) -> None:
        """Store a run's bytes; they may be reused when this returns. Raises StorageError."""

    def close(self) -> None:
        """Free the memory."""
        self._encoders.close()
        self._pool.close()

    async def _encode_runs(self, extent: Extent, staged: StagedSubGroup | None) -> list[asyncio.Task[None]]:
        stores: list[asyncio.Task[None]] = []
        try:
            for run in extent.runs:
                block = await self._acquire_block(run.nbytes)
                try:
                    await self._fill_run(run, block.data, staged)
                except BaseException:
                    block.free()
                    raise
                stores.append(asyncio.create_task(self._store(run, block)))
                await asyncio.sleep(0)  # the task starts now, while the next run is made
        except BaseException:
            await asyncio.gather(*stores, return_exceptions=True)
            raise
        return stores

    async def _acquire_block(self, nbytes: int) -> Block:
        if nbytes <= RUN_BYTES:
            return await self._pool.allocate_async(nbytes, "checkpoint")
        # One box, for example of a user's state, that is larger than the limit of all others.
        return BlockPool("checkpoint", nbytes, "nothing: it is as large as the state", torch.device("cpu")).allocate(
            nbytes, ""
        )

    async def _fill_run(self, run: PackedRun, memory: torch.Tensor, staged: StagedSubGroup | None) -> None:
        """Fill `memory` with a run; pure computation is done on an encoder thread."""
        fillings = [await self._prepare_fill(place.part, place.payload_in(memory), staged) for place in run.boxes]

        def encode() -> None:
            for place, fill in zip(run.boxes, fillings, strict=True):
                fill()
                payload = memory[place.payload : place.payload + place.nbytes]
                self.checksums[run.offset + place.payload] = (place.nbytes, kernels.crc32c(payload))
            run.clear_gaps(memory)

        if self._storage.streams.has_unified_memory:
            await self._encoders.run(encode)
        else:  # the device's work is ordered by the current stream of this thread, so no other thread may issue it
            encode()

    async def _store(self, run: PackedRun, block: Block) -> None:
        try:
            await self.store(run.offset, block.data)
        finally:
            block.free()

    async def _prepare_fill(
        self, part: BoxToWrite, target: torch.Tensor, staged: StagedSubGroup | None
    ) -> Callable[[], None]:
        """A function that fills `target` (uint8, on the host) with one box, whose values are then already in memory."""
        lo, hi = part.coordinate, part.coordinate + part.box.numel
        if lo == hi:
            return lambda: None
        if isinstance(part.values, torch.Tensor):
            return partial(copy_single_threaded, target, part.values[lo:hi].view(torch.uint8))
        if part.unit is None:
            raise StateError(f"{part.name}: it is not known where its values are")
        if staged is None:
            array = part.values or self._storage.weights[self._layout.space_of(part.unit)]
            return partial(copy_single_threaded, target, await load_array(array, lo, hi, self._storage.host_pool))
        begin, values = staged.group.begin, target.view(part.dtype)
        if part.state is not None:
            return partial(_fill_state, staged.state_view(), part.state, lo - begin, hi - begin, values)
        weight = staged.weights[part.unit.index]
        elements = weight.bytes.view(part.unit.dtype)[lo - weight.begin : hi - weight.begin]
        return partial(_fill_master, elements, staged.state_view().remainder, lo - begin, values)


def _fill_master(weight: torch.Tensor, remainder: torch.Tensor | None, first: int, target: torch.Tensor) -> None:
    """Join `weight` and the remainder from element `first` on to fp32 values in `target`."""
    part = None if remainder is None else remainder[first : first + weight.numel()]
    if part is None or part.dtype == torch.float32:
        copy_single_threaded(target, weight if part is None else part)
        return
    joined = target if weight.device.type == "cpu" else torch.empty_like(target, device=weight.device)
    masters.join(joined, weight, part)
    if joined is not target:
        target.copy_(joined)


def _fill_state(group_state: SubGroupState, index: int, begin: int, end: int, target: torch.Tensor) -> None:
    """Fill `target` with elements [begin, end) of one of the sub-group's states, in fp32."""
    tensors = group_state.states.tensors
    if tensors:
        copy_single_threaded(target, tensors[index][begin:end])
    else:
        target.copy_(group_state.states.load(begin, end)[index])


def data_file_name(rank: int) -> str:
    """The name of a rank's data file, as torch.distributed.checkpoint names it."""
    return f"__{rank}_0.distcp"


def list_file_name(rank: int) -> str:
    """The file that lists the content of a rank's data file for the first rank; removed in a complete checkpoint."""
    return f".written-{rank}.json"


def failure_file_name(rank: int) -> str:
    """The file that reports to the first rank that a rank's part has failed."""
    return f".failed-{rank}"


def plan_extents(parts: EngineParts, indices: Collection[int], optimizer: ZeroOptimizer | None) -> Extents:
    """The extents that this rank writes: its part of the arrays; on the first rank also buffers and step counts.

    `indices`: of the parameters that are written.
    `optimizer`: has the numbers of the states; None: all are 0. If it keeps small states, no update may be pending.
    """
    extents, placement = Extents(parts, parts.plan.sub_groups, indices), parts.collectives.placement
    if placement.rank == 0:
        for name, buffer in persistent_buffers(parts.model).items():
            if parts.collectives.world.is_saved_here(name):
                extents.add(MODEL + name, buffer.detach().to("cpu", copy=True))
        trained = parts.trained_indices
        for leaf in parts.leaves:
            if leaf.index in trained and leaf.index in indices:
                numbers = {STEP: Scalar(0)} if optimizer is None else optimizer.saved_numbers(id(leaf.parameter))
                for kind, number in numbers.items():
                    extents.add(state_name(leaf.names[0], kind), number.to_tensor())
    if optimizer is not None and placement.rank == placement.replica_ranks[0]:
        names = {id(leaf.parameter): leaf.names[0] for leaf in parts.leaves if leaf.index in indices}
        for name, states_of_parameter in parts.small_states(names).items():
            for kind, value in states_of_parameter.items():
                extents.add(state_name(name, kind), value)
    return extents


class RankDataFile(ExtentWriter):
    """One rank's data file while it is written. Raises StorageError: the disk has no room; nothing is left.

    `extents`: the extents to write, after `Extents.finish`. `folder`: of the unfinished checkpoint.
    """

    def __init__(self, parts: EngineParts, extents: Extents, folder: Path, rank: int, files: Files) -> None:
        self.extents = extents.extents
        self._folder = folder
        self._rank = rank
        self._files = files
        self._write_future: IoFuture[None] | None = None
        with ExitStack() as undo:
            self.file: DurableFile = files.create(folder / data_file_name(rank), extents.nbytes)
            undo.callback(self.file.close)
            self._aio: Aio = open_aio(AioOptions())
            undo.callback(self._aio.close)
            super().__init__(parts, self._aio.register_memory)
            undo.pop_all()

    @override
    async def store(self, offset: int, data: torch.Tensor) -> None:
        await self._aio.write(self.file.fd, offset, data, str(self.file.path), "checkpoint")
        self._storage.io_loop.note_progress()
        self._files.on_write(self.file, offset, data)

    def write_everything(self) -> None:
        """Write all extents and sync the file. Raises StorageError."""
        job = self.write_all(self.extents)
        self._write_future = self._storage.io_loop.submit("writing a checkpoint", job, self.in_flight)
        self._write_future.result()
        self.finish()

    def in_flight(self) -> list[str]:
        return self._aio.in_flight()

    def finish(self) -> None:
        """After all writes: sync the file and write its list. Blocks; any thread. Raises StorageError."""
        self.file.sync()
        # Before the list is written: with the list the first rank continues.
        self.stamp = self._files.stamp(self._folder / data_file_name(self._rank))
        boxes = list(file_boxes(self.extents, self.checksums))
        self._files.write_bytes(self._folder / list_file_name(self._rank), json.dumps([self.file.nbytes, boxes]))

    def wait_and_close(self) -> None:
        """`close` on the I/O loop. If an interrupt has ended `write_everything`, wait for writes in flight first."""
        self.is_stopped = True
        if self._write_future is not None:
            self._write_future.wait()

        async def close() -> None:
            self.close()

        self._storage.io_loop.run("closing a checkpoint", close())

    @override
    def close(self) -> None:
        """Close the file and free the memory; on the I/O loop. Idempotent."""
        self._aio.close()
        super().close()
        self.file.close()


def file_boxes(extents: Sequence[Extent], checksums: Mapping[int, tuple[int, int]]) -> list[FileBox]:
    boxes = []
    for extent in extents:
        for run in extent.runs:
            for place in run.boxes:
                part, payload = place.part, run.offset + place.payload
                dtype = None if part.is_blob else str(part.dtype).removeprefix("torch.")
                begin, nbytes = run.offset + place.begin, place.end - place.begin
                place_in_file = (part.shape, part.box.offsets, part.box.sizes, begin, nbytes, payload)
                boxes.append(FileBox(part.name, dtype, *place_in_file, place.nbytes, checksums[payload][1]))
    return boxes


def read_list(files: Files, path: Path) -> DataFile:
    """The list that a rank has written with `RankDataFile.finish`.

    Raises ConfigError: it is missing, since the folder is not shared by all nodes.
    """
    if not files.exists(path):
        raise ConfigError(
            f"{path} is missing, although its rank has written it: save_dir must be on a file system that all nodes "
            "share"
        )
    nbytes, rows = json.loads(files.read_bytes(path))
    boxes = [
        FileBox(name, dtype, tuple(shape), tuple(offsets), tuple(sizes), *others)
        for name, dtype, shape, offsets, sizes, *others in rows
    ]
    entry = FileEntry(bytes=nbytes, boxes=tuple((box.payload, box.payload_bytes, box.crc) for box in boxes))
    return entry, boxes
