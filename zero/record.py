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
    """What the weights lack of their fp32 masters, see `offload.masters`; None: nothing."""
    moments: Moments


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How a record is laid out: remainder (if there is one), exp_avg, exp_avg_sq and their scales, adjacent."""

    remainder: torch.dtype | None
    """Of what the weights lack of their fp32 masters; None: they are the masters."""
    state_dtype: torch.dtype
    """Of the moments: fp32, bf16, or uint8 for 8-bit codes with scales."""

    def nbytes(self, numel: int) -> int:
        """Bytes of a record of `numel` elements, whole pages."""
        return align_up(self._remainder_bytes(numel) + Moments.nbytes(self.state_dtype, numel), PAGE_BYTES)

    def over(self, data: torch.Tensor, begin: int, end: int, step: int = 0) -> Record:
        """The record of coordinates [begin, end) in `data` (uint8); `step` matters to who updates it."""
        numel = end - begin
        first = self._remainder_bytes(numel)
        moments = Moments.over(data[first:], self.state_dtype, numel, begin, step)
        return Record(None if self.remainder is None else data[:first].view(self.remainder), moments)

    def _remainder_bytes(self, numel: int) -> int:
        return 0 if self.remainder is None else self.remainder.itemsize * numel
