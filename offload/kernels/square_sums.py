"""The sum of squares of gradients: its bits do not depend on how gradients are cut, ordered and spread over ranks.

Kernels write one row for each block of 4096 elements; native/include/zn_square_sum.h explains the digits and why they
add up exactly. This module adds rows, and the sums of other ranks, to one sum.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from offload.sizes import BLOCK_NUMEL

TAGGED, LOW = range(2)
"""Columns of the (blocks, 2) int64 tensor of sums."""
ROW_BYTES = 16
DIGIT_BITS, BIN_MIN, TAG_SHIFT, TAG_NONFINITE = 48, -7, 59, 15
"""As in zn_abi.h."""
_HALF_BITS, _DIGIT_BYTES = 32, 16
_HEAD = struct.Struct("<qq")
PACKED_BYTES = _HEAD.size + 2 * _DIGIT_BYTES


def row_count(numel: int) -> int:
    """Rows of the sums of `numel` elements."""
    return -(-numel // BLOCK_NUMEL)


def rows_of(sums: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Rows of elements [lo, hi); `lo` is a multiple of the block."""
    return sums[lo // BLOCK_NUMEL : row_count(hi)]


def rows_in(data: torch.Tensor) -> torch.Tensor:
    """uint8 memory of ROW_BYTES for each row, as (rows, 2) int64."""
    return data.view(torch.int64).view(-1, 2)


def nonfinite_of(sums: torch.Tensor) -> torch.Tensor:
    """(rows,) int64: how many elements of each block are inf or NaN."""
    tagged = sums[:, TAGGED]
    return torch.where(tagged >> TAG_SHIFT == TAG_NONFINITE, tagged & (1 << TAG_SHIFT) - 1, 0)


@dataclass(frozen=True, slots=True)
class SquareSum:
    """`high * 2^(48 bin) + low * 2^(48 (bin - 1))`; digits of sums are not bounded.

    Attributes:
        nonfinite: number of inf and NaN among the elements; if it is not 0, the sum is not a number.
    """

    high: int = 0
    low: int = 0
    bin: int = BIN_MIN
    nonfinite: int = 0

    @classmethod
    def from_rows(cls, sums: torch.Tensor) -> SquareSum:
        """The sum over the rows of (rows, 2) int64."""
        nonfinite = int(nonfinite_of(sums).sum())
        if nonfinite or not sums.numel():
            return cls(nonfinite=nonfinite)
        tags, highs, lows = sums[:, TAGGED] >> TAG_SHIFT, sums[:, TAGGED] & (1 << TAG_SHIFT) - 1, sums[:, LOW]
        top = int(tags.max())
        low = _exact_sum(lows[tags == top]) + _exact_sum(highs[tags == top - 1])
        return cls(_exact_sum(highs[tags == top]), low, top + BIN_MIN)

    @classmethod
    def merge(cls, parts: Iterable[SquareSum]) -> SquareSum:
        """The sum of sums: the same bits as one sum over all their elements."""
        parts = list(parts)
        top = max((part.bin for part in parts), default=BIN_MIN)
        high = sum(part.high for part in parts if part.bin == top)
        low = sum(part.low for part in parts if part.bin == top)
        low += sum(part.high for part in parts if part.bin == top - 1)
        return cls(high, low, top, sum(part.nonfinite for part in parts))

    def negate(self) -> SquareSum:
        """A sum that subtracts this one from others when merged; the count of non-finite elements is not reduced."""
        return SquareSum(-self.high, -self.low, self.bin)

    def norm(self) -> float:
        """The square root of the sum, which is first rounded to fp64; NaN if there are non-finite elements."""
        if self.nonfinite:
            return math.nan
        units = (self.high << DIGIT_BITS) + self.low
        return math.sqrt(math.ldexp(float(units), DIGIT_BITS * (self.bin - 1)))

    def pack(self) -> bytes:
        """PACKED_BYTES bytes, for other ranks."""
        digits = (digit.to_bytes(_DIGIT_BYTES, "little", signed=True) for digit in (self.high, self.low))
        return _HEAD.pack(self.bin, self.nonfinite) + b"".join(digits)

    @classmethod
    def unpack(cls, data: bytes) -> SquareSum:
        """The inverse of `pack`."""
        digits = data[_HEAD.size :]
        parts = digits[:_DIGIT_BYTES], digits[_DIGIT_BYTES:]
        high, low = (int.from_bytes(part, "little", signed=True) for part in parts)
        return cls(high, low, *_HEAD.unpack_from(data))


def _exact_sum(digits: torch.Tensor) -> int:
    """Adds the two halves of digits separately: int64 would not hold the sum of more than a few digits."""
    return (int((digits >> _HALF_BITS).sum()) << _HALF_BITS) + int((digits & (1 << _HALF_BITS) - 1).sum())
