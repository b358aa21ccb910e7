"""What one rank contributes to a checkpoint: a data file, and a list of what is in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from offload.disk.aio import Aio, AioOptions, open_aio
from offload.errors import ConfigError
from offload.files.durable import DurableFile, Files
from offload.mover import Transfer
from zero.assembly.assembly import Assembly
from zero.checkpoint.extents import Extent, Extents
from zero.checkpoint.manifest import FileEntry
from zero.checkpoint.metadata import WrittenBox
from zero.checkpoint.source import MODEL, STEP, state_name
from zero.checkpoint.writing import ExtentWriter
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.rules import Scalar
from zero.params.buffers import persistent_buffers
from zero.params.placement import Placement


def data_file(rank: int) -> str:
    """Its name, as torch.distributed.checkpoint has it."""
    return f"__{rank}_0.distcp"


def list_file(rank: int) -> str:
    """What tells the first rank what is in a rank's file; gone once the checkpoint is whole."""
    return f".written-{rank}.json"


def failure_file(rank: int) -> str:
    """What tells the first rank that a rank's part will not come."""
    return f".failed-{rank}"


def plan_extents(
    parts: Assembly, placement: Placement, wanted: Callable[[int], bool], optimizer: ZeroOptimizer | None
) -> Extents:
    """What this rank writes of the model: its part of the planes, and of the first rank buffers and step counts.

    Args:
        parts: of the engine.
        placement: of this rank.
        wanted: which parameters, by their index.
        optimizer: has the numbers that belong to states; None: all are 0.
    """
    extents = Extents(parts.layout, parts.plan.sub_groups, parts.leaves, placement, wanted, parts.plan.states)
    if placement.rank == 0:
        for name, buffer in persistent_buffers(parts.model).items():
            extents.add(MODEL + name, buffer.detach().to("cpu", copy=True))
        trained = {slot.index for unit in parts.layout.units if unit.trainable for slot in unit.slots}
        for leaf in parts.leaves:
            if leaf.index in trained and wanted(leaf.index):
                numbers = {STEP: Scalar(0)} if optimizer is None else optimizer.saved_numbers(id(leaf.parameter))
                for what, number in numbers.items():
                    extents.add(state_name(leaf.names[0], what), number.tensor())
    return extents


class RankPart:
    """One rank's data file on its way to the disk.

    Args:
        parts: of the engine.
        extents: what is written; ended.
        folder: of the checkpoint in the making.
        rank: of the caller.
        files: the disk.

    Raises:
        StorageError: the disk has no room; nothing is left.
    """

    def __init__(self, parts: Assembly, extents: Extents, folder: Path, rank: int, files: Files) -> None:
        self.extents, self._folder, self._rank, self._files = extents.extents, folder, rank, files
        self._mover = parts.storage.mover
        self._writing: Transfer[None] | None = None
        with ExitStack() as undo:
            self.file: DurableFile = files.create(folder / data_file(rank), extents.nbytes)
            undo.callback(self.file.close)
            self._aio: Aio = open_aio(AioOptions())
            undo.callback(self._aio.close)
            self.writer = ExtentWriter(parts.layout, parts.storage, self._store, self._aio.register_memory)
            undo.pop_all()

    async def _store(self, offset: int, data: torch.Tensor) -> None:
        await self._aio.write(self.file.fd, offset, data, str(self.file.path), "checkpoint")
        self._files.written(self.file, offset, data)

    def write(self) -> None:
        """Write everything, to last. Raises StorageError."""
        self._writing = self._mover.post("writing a checkpoint", self.writer.write_all(self.extents))
        self._writing.result()
        self.finish()

    def finish(self) -> None:
        """Everything is written: make it last, and say what it is. Blocks; any thread. Raises StorageError."""
        self.file.sync()
        boxes = list(written_boxes(self.extents, self.writer.checksums))
        self._files.write_bytes(self._folder / list_file(self._rank), json.dumps([self.file.nbytes, boxes]))

    def close(self) -> None:
        """Give back the file and the memory. If an interrupt has ended `write`, what is under way ends first."""
        self.writer.stopped = True
        if self._writing is not None:
            self._writing.settle()

        async def end() -> None:
            self.close_on_loop()

        self._mover.run("closing a checkpoint", end())

    def close_on_loop(self) -> None:
        """`close`, on the mover's loop. Idempotent."""
        self._aio.close()
        self.writer.close()
        self.file.close()


def written_boxes(extents: Sequence[Extent], checksums: Mapping[int, tuple[int, int]]) -> list[WrittenBox]:
    """What is in a data file, in order."""
    found = []
    for extent in extents:
        for run in extent.runs:
            for place in run.places:
                part, payload = place.item, run.offset + place.payload
                dtype = None if part.is_blob else str(part.dtype).removeprefix("torch.")
                begin, nbytes = run.offset + place.begin, place.end - place.begin
                where = (part.shape, part.box.offsets, part.box.sizes, begin, nbytes, payload)
                found.append(WrittenBox(part.name, dtype, *where, place.nbytes, checksums[payload][1]))
    return found


def read_list(files: Files, path: Path) -> tuple[FileEntry, list[WrittenBox]]:
    """What a rank has said with `RankPart.finish`.

    Raises:
        ConfigError: it is not there: the folder is not the same one on all nodes.
    """
    if not files.exists(path):
        raise ConfigError(
            f"{path} is missing, though its rank has written it: save_dir must be on a file system that all nodes share"
        )
    nbytes, told = json.loads(files.read_bytes(path))
    boxes = [_box(*box) for box in told]
    entry = FileEntry(bytes=nbytes, boxes=tuple((box.payload, box.payload_bytes, box.crc) for box in boxes))
    return entry, boxes


def _box(
    name: str, dtype: str | None, shape: list[int], offsets: list[int], sizes: list[int], *rest: int
) -> WrittenBox:
    return WrittenBox(name, dtype, tuple(shape), tuple(offsets), tuple(sizes), *rest)
