"""Boxes are read ahead into a few blocks; what somebody looks at stays as it is, and what is damaged is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from offload.errors import ConfigError
from offload.files.box_reader import BLOCKS, STABLE_BOXES, BoxReader, StoredBox
from offload.files.durable import Files
from offload.kernels import kernels
from offload.sizes import PAGE_BYTES

COUNT = 5 * BLOCKS


def file_of_boxes(folder: Path, nbytes: int = 3000) -> tuple[Path, list[StoredBox], list[torch.Tensor]]:
    """A file of boxes, a page each, and what is in them."""
    contents = [torch.randint(256, (nbytes,), dtype=torch.uint8) for _ in range(COUNT)]
    boxes = [StoredBox(0, i * PAGE_BYTES, nbytes, kernels.crc32c(data)) for i, data in enumerate(contents)]
    path = folder / "boxes"
    with open(path, "wb") as file:
        for data in contents:
            file.write(data.numpy().tobytes().ljust(PAGE_BYTES, b"\0"))
    return path, boxes, contents


@contextmanager
def reading(path: Path) -> Iterator[BoxReader]:
    reader = BoxReader([path], PAGE_BYTES, Files())
    try:
        yield reader
    finally:
        reader.close()


def settle(reader: BoxReader) -> None:
    """Everything that can be read ahead now is."""
    done = threading.Event()
    for _ in range(3):
        done.wait(0.02)


def test_more_boxes_than_there_are_blocks_come_as_one_whole(tmp_path: Path) -> None:
    path, boxes, contents = file_of_boxes(tmp_path)
    with reading(path) as reader:
        reader.prefetch([*boxes, *reversed(boxes)])
        settle(reader)
        got = reader.get_parts([(box, 5, 2000) for box in boxes])
        assert torch.equal(got, torch.cat([data[5:2000] for data in contents]))
        assert torch.equal(reader.get_parts([(box, 0, 3000) for box in reversed(boxes)]), torch.cat(contents[::-1]))


def test_what_was_asked_for_stays_while_further_boxes_are_read(tmp_path: Path) -> None:
    path, boxes, contents = file_of_boxes(tmp_path)
    with reading(path) as reader:
        reader.prefetch(boxes)
        settle(reader)
        for first in range(0, COUNT - STABLE_BOXES, STABLE_BOXES):
            held = [reader.get(box) for box in boxes[first : first + STABLE_BOXES]]
            settle(reader)
            for got, data in zip(held, contents[first:], strict=False):
                assert torch.equal(got, data)


def test_parts_of_many_boxes_leave_alone_what_was_asked_for_before(tmp_path: Path) -> None:
    path, boxes, contents = file_of_boxes(tmp_path)
    with reading(path) as reader:
        reader.prefetch(boxes)
        settle(reader)
        held = reader.get(boxes[0])
        reader.get_parts([(box, 0, 3000) for box in boxes[1:]])
        assert torch.equal(held, contents[0])


@pytest.mark.parametrize("foreseen", [True, False])
@pytest.mark.parametrize("parts", [True, False])
def test_a_damaged_box_is_refused_and_the_others_are_read(tmp_path: Path, foreseen: bool, parts: bool) -> None:
    path, boxes, contents = file_of_boxes(tmp_path)
    with open(path, "r+b") as file:
        file.seek(boxes[3].offset + 17)
        file.write(bytes([int(contents[3][17]) ^ 1]))
    with reading(path) as reader:
        reader.prefetch(boxes if foreseen else [])
        with pytest.raises(ConfigError, match=r"boxes: .*checksum"):
            reader.get_parts([(box, 0, 3000) for box in boxes]) if parts else reader.get(boxes[3])
        rest = [box for box in boxes if box is not boxes[3]]
        got = reader.get_parts([(box, 0, 3000) for box in rest])
        assert torch.equal(got, torch.cat([data for i, data in enumerate(contents) if i != 3]))
