"""What this process has of a tensor: of a DTensor its local shard, and of that the memory, in one run."""

from __future__ import annotations

import torch
from torch import Tensor


def local_of(tensor: Tensor) -> Tensor:
    """The tensor, without its history; of a DTensor the part that this process has. It shares the memory."""
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
    """(N,) all elements in the order in which they lie in memory; None if there are gaps, or two share a place."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def lies_as(tensor: Tensor, like: Tensor) -> bool:
    """True if an element of `tensor` is at the place in its run that the same one of `like` has in its own."""
    pairs = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    return all(mine == theirs for size, mine, theirs in pairs if size > 1)
