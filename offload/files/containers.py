"""torch.save archives without their payload, which the caller writes, and files packed with such archives.

[Note: container] torch.distributed.checkpoint keeps each box of a tensor as one torch.save archive inside a data file.
torch itself makes the bytes around the payload (`torch.serialization.skip_data`). So asynchronous I/O can write
archives from any memory, and plain torch can read them.

[Note: run] Consecutive boxes are packed into runs, and each run is written at once. Every payload begins on a page, so
that O_DIRECT can read it alone; the bytes around it lie in the pages between payloads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from offload.sizes import PAGE_BYTES, align_up

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Container:
    """The bytes before and after a payload."""

    head: bytes
    tail: bytes


BARE = Container(b"", b"")  # The payload is an archive already.


@lru_cache(maxsize=4096)
def container(dtype: torch.dtype, sizes: tuple[int, ...]) -> Container:
    """The torch.save archive of a contiguous CPU tensor, without its bytes."""
    tensor = torch.empty(sizes, dtype=dtype, device="cpu")  # virtual memory only: it is never touched
    head, tail = archive_framing(tensor, [tensor], lambda loaded: [loaded])
    return Container(head, tail)


def archive_framing(
    value: Any, tensors: Sequence[torch.Tensor], tensors_in: Callable[[Any], Sequence[torch.Tensor]]
) -> list[bytes]:
    """The bytes of a value's torch.save archive before each tensor in it, and after the last one.

    Args:
        value: to be saved; the elements of its tensors are not read.
        tensors: the tensors in it, contiguous and on the CPU, in the order in which torch.save meets them.
        tensors_in: returns the same tensors of a value that was loaded.
    """
    fd = os.memfd_create("container", os.MFD_CLOEXEC)
    path = f"/proc/self/fd/{fd}"
    try:
        with torch.serialization.skip_data():
            torch.save(value, path)
        with FakeTensorMode():
            loaded = tensors_in(torch.load(path, weights_only=True))
        parts, position = [], 0
        for tensor, fake in zip(tensors, loaded, strict=True):
            storage: Any = fake.untyped_storage()  # of a fake tensor: it has the offset of its bytes in the file
            begin = int(storage._checkpoint_offset)
            parts.append(os.pread(fd, begin - position, position))
            position = begin + tensor.nbytes
        return [*parts, os.pread(fd, os.fstat(fd).st_size - position, position)]
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class PackedBox(Generic[T]):
    item: T
    container: Container
    payload: int  # First byte of the payload, counted from the start of the run; page-aligned.
    nbytes: int  # Of the payload.

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
        array = run.numpy()
        for data, begin in ((self.container.head, self.begin), (self.container.tail, self.payload + self.nbytes)):
            array[begin : begin + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return run[self.payload : self.payload + self.nbytes]


@dataclass(frozen=True, slots=True)
class PackedRun(Generic[T]):
    offset: int  # First byte in the file; page-aligned, like its length.
    nbytes: int
    boxes: tuple[PackedBox[T], ...]

    def clear_gaps(self, memory: torch.Tensor) -> None:
        """Zero the gaps between the boxes in the run's memory (uint8), which may hold bytes of an earlier use."""
        position = 0
        for begin, end in (*((box.begin, box.end) for box in self.boxes), (self.nbytes, self.nbytes)):
            memory[position:begin].zero_()
            position = end


def pack(boxes: Iterable[tuple[T, Container, int]], offset: int, nbytes_max: int) -> Iterator[PackedRun[T]]:
    """Pack (item, container, payload bytes) into runs from byte `offset` of a file on, each of at most `nbytes_max`.

    A larger box becomes one run alone.
    """
    places: list[PackedBox[T]] = []
    for item, around, nbytes in boxes:
        place = _place_after(places, item, around, nbytes)
        if places and align_up(place.end, PAGE_BYTES) > nbytes_max:
            run = _run(offset, places)
            offset, places = run.offset + run.nbytes, []
            yield run
            place = _place_after(places, item, around, nbytes)
        places.append(place)
    if places:
        yield _run(offset, places)


def _place_after(places: Sequence[PackedBox[T]], item: T, around: Container, nbytes: int) -> PackedBox[T]:
    position = places[-1].end if places else 0
    return PackedBox(item, around, align_up(position + len(around.head), PAGE_BYTES), nbytes)


def _run(offset: int, places: list[PackedBox[T]]) -> PackedRun[T]:
    return PackedRun(offset, align_up(places[-1].end, PAGE_BYTES), tuple(places))
