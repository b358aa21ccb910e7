"""The number of ranks, and the rank of this process."""

from __future__ import annotations

import os
from typing import Any

from offload.errors import ConfigError
from zero.dist import backend

TENSOR_SIZES = ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
SAME_SAMPLE_SIZES = (
    TENSOR_SIZES,
    ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"),
    ("get_sequence_parallel_world_size",),
    ("get_context_parallel_world_size",),
)
"""Megatron's names, older ones last, of the numbers of ranks that work on the same samples."""
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's name for the ranks of a node, and DeepSpeed's launcher's.


def is_distributed() -> bool:
    """True once torch.distributed has its default group."""
    return backend.is_initialized()


def world_size() -> int:
    """Number of ranks; 1 before torch.distributed is initialised."""
    return len(backend.ranks_of(None)) if is_distributed() else 1


def rank() -> int:
    """This rank, 0 <= rank < world_size; 0 before torch.distributed is initialised."""
    return backend.own_rank() if is_distributed() else 0


def local_rank() -> int:
    """This rank's number among the ranks of its node, from the launcher; 0 without a launcher."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else 0


def ranks_per_node() -> int | None:
    """Number of ranks of this node, from the launcher; None if its variable is not set, or an impossible number."""
    if not is_distributed():
        return 1
    for name in LOCAL_SIZES:
        text = os.environ.get(name, "")
        if text.isdecimal() and 0 < int(text) <= world_size():
            return int(text)
    return None


def check_mpu(mpu: Any, what: str, *kinds: tuple[str, ...]) -> None:
    """Raise ConfigError if Megatron's object `mpu` has more than one rank of one of these kinds; None has none."""
    for names in kinds:
        name = next((name for name in names if hasattr(mpu, name)), None)
        if name is not None and (size := getattr(mpu, name)()) != 1:
            raise ConfigError(
                f"{what}: mpu: expected 1 from {name}(), got {size}; set that kind of parallelism to 1: here "
                "ranks share weights and states, and each has samples of its own"
            )


def check_data_parallel(mpu: Any) -> None:
    """Raise ConfigError if not all ranks average gradients in `mpu`, once torch.distributed has its default group."""
    size = getattr(mpu, "get_data_parallel_world_size", world_size)()
    if size != world_size():
        raise ConfigError(
            f"initialize: mpu: expected {world_size()} from get_data_parallel_world_size(), the number of ranks, got "
            f"{size}: an engine averages gradients of all ranks; start each group of ranks as a job of its own"
        )
