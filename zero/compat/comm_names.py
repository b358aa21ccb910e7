"""`deepspeed.comm`: torch.distributed under DeepSpeed's names, joined by our `init_distributed`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero.ranks.joining import TIMEOUT_MINUTES
from zero.ranks.joining import init_distributed as init_distributed

FROM_TORCH = """
    P2POp ProcessGroup ReduceOp all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all
    all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list destroy_process_group gather get_backend
    get_global_rank get_rank get_world_size group irecv is_available isend monitored_barrier new_group recv reduce
    reduce_scatter reduce_scatter_tensor scatter send
"""
FROM_HERE = """
    allgather_fn default_pg_timeout get_all_ranks_from_group get_local_rank get_world_group has_all_gather_into_tensor
    has_all_reduce_coalesced has_coalescing_manager has_reduce_scatter_tensor inference_all_reduce init_distributed
    is_initialized reduce_scatter_fn
"""
__all__ = [*FROM_TORCH.split(), *FROM_HERE.split()]

globals().update({name: getattr(dist, name) for name in FROM_TORCH.split()})
default_pg_timeout = timedelta(minutes=TIMEOUT_MINUTES)


def is_initialized() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def get_local_rank() -> int:
    """This rank among those of its node, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group)


def inference_all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, **unused: Any
) -> Any:
    return dist.all_reduce(tensor, op, group, async_op)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, **unused: Any
) -> Any:
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **unused: Any,
) -> Any:
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return hasattr(dist, "all_reduce_coalesced")


def has_coalescing_manager() -> bool:
    return hasattr(dist.distributed_c10d, "_coalescing_manager")
