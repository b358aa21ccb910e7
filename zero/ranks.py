"""How many ranks there are and which one this is: the one place that asks torch.distributed."""

from __future__ import annotations

import os

import torch.distributed as dist

LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
"""torchrun's name for the ranks of a node, and DeepSpeed's launcher's."""


def is_distributed() -> bool:
    """True once torch.distributed has its default group."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Number of ranks; 1 before torch.distributed is initialised."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """This rank, 0 <= rank < world_size; 0 before torch.distributed is initialised."""
    return dist.get_rank() if is_distributed() else 0


def ranks_per_node() -> int | None:
    """Ranks of this node, as the launcher says; None if it does not, or says what cannot be."""
    if not is_distributed():
        return 1
    for name in LOCAL_SIZES:
        said = os.environ.get(name, "")
        if said.isdecimal() and 0 < int(said) <= world_size():
            return int(said)
    return None
