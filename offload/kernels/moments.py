"""Adam's two moments and the ways to store them: fp32, bf16, or 8-bit codes with one scale per block.

native/include/zn_abi.h has the codes, and the reason why narrow moments are rounded at random.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MOMENTS_BLOCK_NUMEL = 256
"""Elements that share a scale when moments are stored in 8 bits."""


@dataclass(frozen=True)
class Moments:
    """The first and second moment of N elements.

    Narrow moments are widened, updated in fp32 and rounded up or down at random, with the probability that keeps
    the mean. Rounded to nearest, exp_avg_sq would never change, because with beta2 = 0.999 one step changes it by
    less than half a unit in the last place. The random bits are a hash of (coordinate, step): results can be
    repeated, and depend neither on threads nor on how an address space is cut into calls. native/include/zn_abi.h
    describes the 8-bit codes.

    Attributes:
        exp_avg: (N,) fp32, bf16, or uint8 codes (N a multiple of 256); all zero bytes are moments of 0.
        exp_avg_sq: (N,) of the same dtype.
        exp_avg_scale: (N / 256,) fp32 with uint8 codes, else None.
        exp_avg_sq_scale: (N / 256,) fp32 with uint8 codes, else None.
        origin: coordinate of element 0 in its address space; a multiple of 256 with uint8 codes.
        step: number of optimizer steps so far; it changes the random bits of the rounding.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None
    origin: int = 0
    step: int = 0

    @staticmethod
    def nbytes(dtype: torch.dtype, numel: int) -> int:
        """Bytes of both moments of `numel` elements stored as `dtype`, with their scales."""
        scales = 2 * 4 * (numel // MOMENTS_BLOCK_NUMEL) if dtype == torch.uint8 else 0
        return 2 * numel * dtype.itemsize + scales

    @classmethod
    def from_buffer(cls, data: Tensor, dtype: torch.dtype, numel: int, origin: int, step: int) -> Moments:
        """Views into `data` (uint8, at least `nbytes` long): exp_avg, exp_avg_sq, and the scales if there are any."""
        width, blocks = numel * dtype.itemsize, numel // MOMENTS_BLOCK_NUMEL
        exp_avg, exp_avg_sq = data[:width].view(dtype), data[width : 2 * width].view(dtype)
        if dtype != torch.uint8:
            return cls(exp_avg, exp_avg_sq, origin=origin, step=step)
        scales = data[2 * width : 2 * width + 8 * blocks].view(torch.float32)
        return cls(exp_avg, exp_avg_sq, scales[:blocks], scales[blocks:], origin, step)

    def view_range(self, begin: int, end: int) -> Moments:
        """The moments of elements [begin, end), which must be whole blocks if there are scales."""
        blocks = slice(begin // MOMENTS_BLOCK_NUMEL, end // MOMENTS_BLOCK_NUMEL)
        return replace(
            self,
            exp_avg=self.exp_avg[begin:end],
            exp_avg_sq=self.exp_avg_sq[begin:end],
            exp_avg_scale=None if self.exp_avg_scale is None else self.exp_avg_scale[blocks],
            exp_avg_sq_scale=None if self.exp_avg_sq_scale is None else self.exp_avg_sq_scale[blocks],
            origin=self.origin + begin,
        )

    @property
    def is_quantised(self) -> bool:
        """True for uint8 codes with scales."""
        return self.exp_avg_scale is not None
