"""`deepspeed.utils.groups`: there is one group, of all ranks; there are none for sequences or tensors.

Every rank has all experts, or shards of all: no token is sent to another rank, and all ranks share each expert.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zero.compat.unavailable import EXPERTS, SEQUENCES, TENSORS, missing_function
from zero.ranks import world

_get_sequence_parallel_group = missing_function("utils.groups._get_sequence_parallel_group", SEQUENCES)
_get_sequence_parallel_rank = missing_function("utils.groups._get_sequence_parallel_rank", SEQUENCES)
_get_expert_parallel_group = missing_function("utils.groups._get_expert_parallel_group", EXPERTS)
_get_local_all_to_all_group = missing_function("utils.groups._get_local_all_to_all_group", EXPERTS)


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Does nothing: `ep_size` changes no result. Raises NotImplementedError: `mpu` is given."""
    if mpu is not None:
        missing_function("utils.groups.initialize", TENSORS)()


# ---- all ranks, for every group of experts ----


def get_data_parallel_group(group_name: str | None = None) -> Any:
    return dist.group.WORLD


def get_data_parallel_rank(group_name: str | None = None) -> int:
    return world.rank()


def get_data_parallel_world_size(group_name: str | None = None) -> int:
    return world.world_size()


# ---- one rank: no sample is shared between ranks, and no expert is placed on one rank only ----


def get_model_parallel_world_size(group_name: str | None = None) -> int:
    return 1


def get_model_parallel_rank(group_name: str | None = None) -> int:
    return 0


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(world.world_size()))


_clone_world_group = get_data_parallel_group
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_expert_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_expert_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_expert_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_world_size = _get_sequence_parallel_world_size = get_model_parallel_world_size
_get_expert_model_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_expert_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = _get_expert_parallel_rank = get_model_parallel_rank
