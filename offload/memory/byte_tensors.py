"""Bytes as tensors, for functions that send tensors."""

from __future__ import annotations

import torch


def tensor_of(message: bytes) -> torch.Tensor:
    """A copy as (len(message),) uint8."""
    if not message:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A copy of a uint8 tensor in host memory."""
    return bytes(tensor.numpy().tobytes())
