"""This process's part of a tensor: the local shard of a DTensor, and its memory as one contiguous run."""

from __future__ import annotations

import torch
from torch import Tensor


def local_of(tensor: Tensor) -> Tensor:
    """The detached tensor; for a DTensor, this process's part. It shares the memory."""
    found = tensor.detach()
    to_local = getattr(found, "to_local", None)
    if to_local is None:
        return found
    with torch.no_grad():
        local: Tensor = to_local()
    wait = getattr(local, "wait", None)  # a collective is still writing it
    waited: Tensor = local if wait is None else wait()
    return waited


def run_of(tensor: Tensor) -> Tensor | None:
    """(N,) all elements in memory order; None if the memory has gaps, or if two elements share a place."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def lies_as(tensor: Tensor, like: Tensor) -> bool:
    """True if both tensors have the same memory order, so that equal positions in their runs are the same element."""
    pairs = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    return all(mine == theirs for size, mine, theirs in pairs if size > 1)
