"""Common sizes: pages and alignment; and how bytes are printed."""

from __future__ import annotations

PAGE_BYTES = 4096
"""Granularity of O_DIRECT transfers and of every extent."""
HUGE_PAGE_BYTES = 2 << 20
"""Transparent huge pages: they double the disk's throughput on I/O buffers."""
ALIGN_BYTES = 64
"""Alignment of every parameter inside its flat buffer: one cache line, one AVX-512 register."""
BLOCK_NUMEL = 4096
"""Elements per norm block; every shard is a multiple of it, so every range of a tiered array is page-aligned."""


def align_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def format_bytes(nbytes: int) -> str:
    """`nbytes` with a decimal unit, such as "1.34 GB"."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"
