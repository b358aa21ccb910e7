"""Checks of tensors before their addresses are passed to C, which cannot check dtype, length or device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.kernels.moments import MOMENTS_BLOCK_NUMEL, Moments
from offload.kernels.segment import Segment
from offload.kernels.square_sums import row_count

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES_OF_MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)


def check(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], numel: int, device: torch.device) -> None:
    """Refuse a tensor that is not flat and contiguous, or has another length, dtype or device. Raises TypeError."""
    if tensor.dtype not in dtypes or tensor.device != device or tensor.numel() != numel:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(
            f"{name}: expected {numel} elements of {expected} on {device}, "
            f"got {tensor.numel()} of {tensor.dtype} on {tensor.device}"
        )
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise TypeError(
            f"{name}: must be flat and contiguous, got shape {tuple(tensor.shape)}, strides {tensor.stride()}; "
            "pass tensor.contiguous().view(-1)"
        )


def check_master(weight: Tensor, master: Tensor | None, rounded: bool) -> None:
    """Refuse a master that does not fit the weights' dtype; `rounded`: bf16 may have none. Raises TypeError."""
    allowed = {torch.float32: (), torch.bfloat16: (torch.int16, torch.float32), torch.float16: (torch.float32,)}
    dtypes = allowed[weight.dtype]
    if master is None:
        if dtypes and not (rounded and weight.dtype == torch.bfloat16):
            raise TypeError(f"master: {weight.dtype} weights need one of {' or '.join(map(str, dtypes))}, got None")
        return
    if not dtypes:
        raise TypeError(f"master: must be None, because {weight.dtype} weights are the master; got {master.dtype}")
    check("master", master, dtypes, weight.numel(), weight.device)


def check_update(
    weight: Tensor, master: Tensor | None, grad: Tensor, segments: Sequence[Segment], *, rounded: bool = False
) -> None:
    """Refuse operands of an update that do not fit each other. Raises TypeError, or ValueError for segments.

    `rounded`: bf16 weights may be their own masters.
    """
    numel = weight.numel()
    check("weight", weight, FLOATS, numel, weight.device)
    check_master(weight, master, rounded)
    check("grad", grad, FLOATS, numel, weight.device)
    position = 0
    for segment in segments:
        if not 0 <= segment.begin <= segment.end <= numel:
            raise ValueError(f"segment [{segment.begin}, {segment.end}) is outside tensors of {numel} elements")
        if segment.begin < position:
            raise ValueError(
                f"segment [{segment.begin}, {segment.end}) begins before {position}, where the previous segment ends"
            )
        position = segment.end


def check_moments(moments: Moments, numel: int, device: torch.device) -> None:
    """Refuse moments that are not stored in one of the three ways. Raises TypeError."""
    check("exp_avg", moments.exp_avg, _DTYPES_OF_MOMENTS, numel, device)
    check("exp_avg_sq", moments.exp_avg_sq, (moments.exp_avg.dtype,), numel, device)
    codes = moments.exp_avg.dtype == torch.uint8
    for name, scale in (("exp_avg_scale", moments.exp_avg_scale), ("exp_avg_sq_scale", moments.exp_avg_sq_scale)):
        if codes != (scale is not None):
            raise TypeError(f"{name}: only allowed with uint8 moments, got moments of {moments.exp_avg.dtype}")
        if scale is not None:
            check(name, scale, (torch.float32,), numel // MOMENTS_BLOCK_NUMEL, device)
    if codes and (numel % MOMENTS_BLOCK_NUMEL or moments.origin % MOMENTS_BLOCK_NUMEL):
        raise TypeError(
            f"moments: expected uint8 codes in whole blocks of {MOMENTS_BLOCK_NUMEL} elements, got {numel} elements "
            f"from coordinate {moments.origin:,} on"
        )


def check_sums(into: Tensor | None, src: Tensor) -> Tensor:
    """The tensor for the block sums of `src`: `into`, or a new one. Raises TypeError."""
    shape = (row_count(src.numel()), 2)
    if into is None:
        return torch.empty(shape, dtype=torch.int64, device=src.device)
    if into.shape != shape or not into.is_contiguous():
        raise TypeError(f"into: expected a contiguous tensor of shape {shape}, got {tuple(into.shape)}")
    check("into", into.view(-1), (torch.int64,), into.numel(), src.device)
    return into


def check_ranks(stored: Tensor, sources: Sequence[Tensor], add: bool) -> None:
    """Refuse operands of `reduce_ranks` that do not fit each other. Raises TypeError or ValueError."""
    if not sources:
        raise ValueError("sources: expected at least one tensor, got none")
    numel, device, dtype = stored.numel(), stored.device, sources[0].dtype
    check("sources[0]", sources[0], FLOATS, numel, device)
    for index, source in enumerate(sources):
        check(f"sources[{index}]", source, (dtype,), numel, device)
        first, second = sorted((source, stored), key=torch.Tensor.data_ptr)
        overlaps = second.data_ptr() < first.data_ptr() + first.nbytes
        if overlaps and (source.data_ptr() != stored.data_ptr() or source.dtype != stored.dtype):
            raise ValueError(f"sources[{index}]: overlaps stored but is not the same memory; reduce into other memory")
    check("stored", stored, (torch.float32,) if add else (torch.float32, dtype), numel, device)
