"""The state record of a sub-group: what lies where in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.moments import Moments
from offload.sizes import PAGE_BYTES, align_up


@dataclass(frozen=True, slots=True)
class Record:
    """Views into one sub-group's state record."""

    remainder: torch.Tensor | None
    """int16, split spaces only."""
    moments: Moments


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How a record is laid out: remainder (split spaces), exp_avg, exp_avg_sq and their scales, adjacent."""

    split: bool
    """The fp32 master is the bf16 weight plus a 16-bit remainder."""
    state_dtype: torch.dtype
    """Of the moments: fp32, bf16, or uint8 for 8-bit codes with scales."""

    def nbytes(self, numel: int) -> int:
        """Bytes of a record of `numel` elements, whole pages."""
        return align_up((2 * numel if self.split else 0) + Moments.nbytes(self.state_dtype, numel), PAGE_BYTES)

    def over(self, data: torch.Tensor, begin: int, end: int, step: int = 0) -> Record:
        """The record of coordinates [begin, end) in `data` (uint8); `step` matters to who updates it."""
        numel = end - begin
        first = 2 * numel if self.split else 0
        moments = Moments.over(data[first:], self.state_dtype, numel, begin, step)
        return Record(data[:first].view(torch.int16) if self.split else None, moments)
