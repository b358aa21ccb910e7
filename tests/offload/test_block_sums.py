"""What is known of a run that is written in parts is what a look at all of it would say."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.kernels import block_checksums, kernels
from offload.kernels.block_checksums import UNKNOWN, BlockChecksums

BLOCK = 64
NBYTES = 4 * BLOCK + 24


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_checksums, "BLOCK_BYTES", BLOCK)


def truth(data: torch.Tensor) -> list[int]:
    return [kernels.crc32c(data[begin : begin + BLOCK]) for begin in range(0, data.numel(), BLOCK)]


parts = st.tuples(st.integers(0, NBYTES - 1), st.integers(1, NBYTES), st.booleans()).map(
    lambda drawn: (drawn[0], min(drawn[0] + drawn[1], NBYTES), drawn[2])
)


@given(writes=st.lists(parts, max_size=30), seed=st.integers(0, 9))
def test_a_known_block_has_the_checksum_of_its_bytes(writes: list[tuple[int, int, bool]], seed: int) -> None:
    """Some writes fail: what they leave is not known."""
    generator = torch.Generator().manual_seed(seed)
    data, sums = torch.zeros(NBYTES, dtype=torch.uint8), BlockChecksums(NBYTES)
    for begin, end, fails in writes:
        data[begin:end] = torch.randint(0, 256, (end - begin,), generator=generator, dtype=torch.uint8)
        if fails:
            sums.invalidate(begin, end)
            touched = [(lo, hi) for lo, hi in sums.unknown_blocks() if lo < end and begin < hi]
            assert touched[0][0] <= begin and end <= touched[-1][1]
        else:
            sums.add_bytes(begin, data[begin:end])
        told = [known for _, _, known in sums.blocks()]
        assert all(known in (UNKNOWN, true) for known, true in zip(told, truth(data), strict=True))
    for begin, end in sums.unknown_blocks():
        sums.add_bytes(begin, data[begin:end])
    assert [known for _, _, known in sums.blocks()] == truth(data)
    assert list(BlockChecksums(NBYTES, sums.text).blocks()) == list(sums.blocks())


def test_parts_that_come_in_any_order_make_a_block_known() -> None:
    data, sums = torch.arange(NBYTES, dtype=torch.uint8), BlockChecksums(NBYTES)
    cuts = [0, 10, 100, 101, 200, NBYTES]
    for begin, end in sorted(pairwise(cuts), reverse=True):
        assert sums.text == ""
        sums.add_bytes(begin, data[begin:end])
    assert sums.unknown_blocks() == [] and len(sums.text) == 8 * 5


def test_a_text_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 5, got 1"):
        BlockChecksums(NBYTES, BlockChecksums(8, "00000000").text)
