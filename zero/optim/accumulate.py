"""Gradients added up where they are kept: in fp32, or, where `grad_accum_dtype` says so, in their own 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.kernels import kernels

CHUNK_NUMEL = 256 * 1024
"""Elements that are fp32 at once on their way to 16 bits; a multiple of the block."""


def add(stored: torch.Tensor, source: torch.Tensor, threads: int) -> None:
    """Add (N,) elements; a 16-bit sum is made in fp32 and rounded once."""
    if stored.dtype == torch.float32:
        kernels.accumulate(stored, source, threads=threads)
        return
    wide = torch.empty(min(stored.numel(), CHUNK_NUMEL), dtype=torch.float32, device=stored.device)
    for kept, part in zip(torch.split(stored, CHUNK_NUMEL), torch.split(source, CHUNK_NUMEL), strict=True):
        total = wide[: kept.numel()]
        kernels.accumulate(total, part, kept, threads=threads)
        kernels.cast(kept, total, threads=threads)


def reduce_into(
    stored: torch.Tensor,
    sources: Sequence[torch.Tensor],
    scale: float,
    into: torch.Tensor,
    threads: int,
    *,
    first: bool,
) -> None:
    """Store `scale` times the sum of `sources`, or add it unless `first`; as `kernels.reduce_ranks`."""
    if first or stored.dtype == torch.float32:
        kernels.reduce_ranks(stored, sources, scale=scale, add=not first, into=into, threads=threads)
        return
    wide = torch.empty(min(stored.numel(), CHUNK_NUMEL), dtype=torch.float32, device=stored.device)
    for lo in range(0, stored.numel(), CHUNK_NUMEL):
        kept = stored[lo : lo + CHUNK_NUMEL]
        total = wide[: kept.numel()]
        kernels.reduce_ranks(total, [part[lo : lo + CHUNK_NUMEL] for part in sources], scale=scale, threads=threads)
        add(kept, total, threads)
    kernels.block_sumsq(stored, into, threads=threads)
