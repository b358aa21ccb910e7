"""`deepspeed.utils.groups`: the group of all ranks, or those of an `mpu`; there are none for sequences or tensors.

An `mpu` is the grid of a pipeline, or what the client has passed to `initialize`. Every rank has all experts, or shards
of all: no token is sent to another rank, and all ranks share each expert.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zero.compat.unavailable import EXPERTS, SEQUENCES, missing_function
from zero.dist import world

_get_sequence_parallel_group = missing_function("utils.groups._get_sequence_parallel_group", SEQUENCES)
_get_sequence_parallel_rank = missing_function("utils.groups._get_sequence_parallel_rank", SEQUENCES)
_get_expert_parallel_group = missing_function("utils.groups._get_expert_parallel_group", EXPERTS)
_get_local_all_to_all_group = missing_function("utils.groups._get_local_all_to_all_group", EXPERTS)


mpu: Any = None
"""Of the engine that was made last with one; None: every rank has its own part of the data."""


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Take the groups from `mpu`; `ep_size` changes no result. Raises ConfigError: it has several tensor ranks."""
    world.check_mpu(mpu, "utils.groups.initialize", world.TENSOR_SIZES)
    use_mpu(mpu)


def use_mpu(new_mpu: Any) -> None:
    """Answer with the groups of this `mpu` from now on."""
    global mpu
    mpu = new_mpu


# ---- all ranks without an mpu, for every group of experts ----


def get_data_parallel_group(group_name: str | None = None) -> Any:
    return dist.group.WORLD if mpu is None else mpu.get_data_parallel_group()


def get_data_parallel_rank(group_name: str | None = None) -> int:
    return world.rank() if mpu is None else mpu.get_data_parallel_rank()


def get_data_parallel_world_size(group_name: str | None = None) -> int:
    return world.world_size() if mpu is None else mpu.get_data_parallel_world_size()


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(world.world_size())) if mpu is None else dist.get_process_group_ranks(get_data_parallel_group())


def _clone_world_group() -> Any:
    return dist.group.WORLD


# ---- one rank without an mpu: no sample is shared between ranks, and no expert is placed on one rank only ----


def _get_model_parallel_world_size() -> int:
    return 1 if mpu is None else mpu.get_model_parallel_world_size()


def get_model_parallel_world_size(group_name: str | None = None) -> int:
    return 1


def get_model_parallel_rank(group_name: str | None = None) -> int:
    return 0


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_expert_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_expert_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_expert_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_parallel_world_size = get_model_parallel_world_size
_get_expert_model_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_expert_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = _get_expert_parallel_rank = get_model_parallel_rank
