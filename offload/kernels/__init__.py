"""Kernels over flat tensors, native where built, and the formats of states and sums."""

from __future__ import annotations

from offload.kernels.kernels import crc32c

__all__ = ["crc32c"]
