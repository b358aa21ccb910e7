"""Kernels over flat tensors, native where built, and the forms in which states and sums are kept."""

from __future__ import annotations

from offload.kernels.kernels import crc32c

__all__ = ["crc32c"]
