"""How much memory of a GPU is set aside for what passes through it; on a CPU-only machine nothing has to pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload.sizes import BLOCK_NUMEL, PAGE_BYTES, align_up
from zero.params.layout import Layout, SubGroup, Unit

WIDE_CHUNK_NUMEL, WIDE_CHUNKS = 1 << 20, 3
"""Elements of a gradient that are widened at once on a GPU, and how many such chunks are on their way."""


def gradient_sums_bytes(unit: Unit) -> int:
    """Bytes of the block sums and non-finite counts of one unit's gradient."""
    return 16 * -(-unit.numel // BLOCK_NUMEL)


def stand_in_bytes(units: Iterable[Unit], *, on_gpu: bool) -> int:
    """What released parameters look at; the pages of a CPU's share one small block."""
    return max((unit.nbytes for unit in units), default=0) if on_gpu else 0


def gradient_pool_bytes(trained: Iterable[Unit], *, on_gpu: bool, wide: bool) -> int:
    """Room for two flat gradients of the largest unit; on a GPU with their sums, and with chunks widened there."""
    units = list(trained)
    flat = 2 * max((unit.numel * unit.dtype.itemsize for unit in units), default=0)
    if not on_gpu or not flat:
        return flat
    sums = max(align_up(gradient_sums_bytes(unit), PAGE_BYTES) for unit in units)
    return flat + 2 * sums + (WIDE_CHUNKS * WIDE_CHUNK_NUMEL * 4 if wide else 0)


def update_pool_bytes(layout: Layout, groups: Sequence[SubGroup], staged_bytes_per_element: int, in_flight: int) -> int:
    """Room for what updates on a GPU work on and does not live there.

    Args:
        layout: of the model.
        groups: sub-groups updated on the GPU.
        staged_bytes_per_element: widths of the planes that pass through, added up.
        in_flight: sub-groups at a time.
    """
    if not staged_bytes_per_element:
        return 0
    # Each unit's part of a plane begins on a page of its own.
    pages = max((len(list(layout.spaces[g.space].overlapping(g.begin, g.end))) for g in groups), default=0)
    numel = max((group.end - group.begin for group in groups), default=0)
    return in_flight * (numel * staged_bytes_per_element + 3 * (pages + 1) * PAGE_BYTES)
