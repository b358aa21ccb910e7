"""The disk questions move what they say they move."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.swap import Swapper
from offload.io.aio import AioOptions

RECORD_BYTES = 64 << 10


@pytest.fixture
def swapper(tmp_path: Path):  # type: ignore[no-untyped-def]
    with Swapper(tmp_path, 8 * RECORD_BYTES, RECORD_BYTES, AioOptions(chunk_bytes=16 << 10)) as swapper:
        yield swapper


def moved(swapper: Swapper) -> tuple[int, int]:
    return swapper.traffic.read_bytes, swapper.traffic.write_bytes


def test_each_kind_moves_its_bytes_once(swapper: Swapper) -> None:
    swapper.read(8 * RECORD_BYTES)
    assert moved(swapper) == (8 * RECORD_BYTES, 0)
    swapper.write(6 * RECORD_BYTES)
    assert moved(swapper) == (8 * RECORD_BYTES, 6 * RECORD_BYTES)
    swapper.mixed(8 * RECORD_BYTES)
    assert moved(swapper) == (12 * RECORD_BYTES, 10 * RECORD_BYTES)


def test_a_last_record_may_be_shorter(swapper: Swapper) -> None:
    swapper.read(2 * RECORD_BYTES + 4096)
    assert moved(swapper) == (2 * RECORD_BYTES + 4096, 0)


def test_the_file_is_written_with_bytes_that_do_not_compress_and_rivals_can_open_it(swapper: Swapper) -> None:
    content = Path(swapper.path).read_bytes()
    assert len(content) == 8 * RECORD_BYTES
    counts = [content.count(value) for value in range(256)]
    assert min(counts) > 0.8 * len(content) / 256, "every byte value is as frequent as any other"


def test_a_file_of_broken_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="whole records"):
        Swapper(tmp_path, RECORD_BYTES + 4096, RECORD_BYTES, AioOptions())
