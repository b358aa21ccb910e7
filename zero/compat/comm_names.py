"""`deepspeed.comm`: torch.distributed under DeepSpeed's names, with our `init_distributed`.

Collectives also take DeepSpeed's names of arguments. They are not timed: torch.profiler does that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from offload.accelerator import compute_device
from zero.compat.logs import warning_once
from zero.dist.initialization import PORT, TIMEOUT_MINUTES, find_place, torchrun_variables
from zero.dist.initialization import init_distributed as init_distributed

FROM_TORCH = """
    P2POp ProcessGroup ReduceOp batch_isend_irecv destroy_process_group get_backend get_global_rank get_rank
    get_world_size group is_available new_group
"""
COLLECTIVES = """
    all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast
    broadcast_object_list gather irecv isend monitored_barrier recv reduce reduce_scatter reduce_scatter_tensor scatter
    send
"""
FROM_HERE = """
    all_gather_coalesced all_reduce_coalesced allgather_fn configure default_pg_timeout get_all_ranks_from_group
    get_local_rank get_world_group has_all_gather_into_tensor has_all_reduce_coalesced has_coalescing_manager
    has_reduce_scatter_tensor in_aml in_aws_sm in_dlts inference_all_reduce init_distributed initialize_mesh_device
    is_initialized log_summary mpi_discovery patch_aml_env_for_torch_nccl_backend
    patch_aws_sm_env_for_torch_nccl_backend reduce_scatter_fn
"""
__all__ = [*FROM_TORCH.split(), *COLLECTIVES.split(), *FROM_HERE.split()]

# DeepSpeed's name of an argument -> torch's.
RENAMED = {
    "all_gather_into_tensor": {"tensor": "input_tensor"},
    "reduce_scatter_tensor": {"output_tensor": "output", "tensor": "input"},
    "all_to_all_single": {"tensor": "input"},
}
IGNORED = ("prof", "log_name", "debug")  # Of DeepSpeed's log of collectives.


def with_deepspeed_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """The collective, which also takes DeepSpeed's names of its arguments."""
    torch_names = RENAMED.get(function.__name__, {})

    @functools.wraps(function)
    def call_collective(*args: Any, **kwargs: Any) -> Any:
        named = {torch_names.get(name, name): value for name, value in kwargs.items() if name not in IGNORED}
        return function(*args, **named)

    return call_collective


globals().update({name: getattr(dist, name) for name in FROM_TORCH.split()})
globals().update({name: with_deepspeed_arguments(getattr(dist, name)) for name in COLLECTIVES.split()})
allgather_fn = with_deepspeed_arguments(dist.all_gather_into_tensor)
reduce_scatter_fn = with_deepspeed_arguments(dist.reduce_scatter_tensor)
default_pg_timeout = timedelta(minutes=TIMEOUT_MINUTES)


def is_initialized() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def get_local_rank() -> int:
    """This rank's number among the ranks of its node, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    return dist.group.WORLD


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """A torch `DeviceMesh` over the ranks, on the device of this process."""
    return init_device_mesh(compute_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group)


@with_deepspeed_arguments
def inference_all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, **unused: Any
) -> Any:
    return dist.all_reduce(tensor, op, group, async_op)


class Works:
    """Handles of several collectives as one."""

    def __init__(self, works: Iterable[Any]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


@with_deepspeed_arguments
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, **unused: Any
) -> Works | None:
    """Sum each tensor over the ranks, in place."""
    works = [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors]
    return Works(works) if async_op else None


@with_deepspeed_arguments
def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> Works | None:
    """Gather each input from all ranks into the output with the same index."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = [dist.all_gather_into_tensor(output, tensor, group, async_op) for output, tensor in pairs]
    return Works(works) if async_op else None


def log_summary(*arguments: Any, **settings: Any) -> None:
    """Log what to use instead: a script that ends with a summary is to end well."""
    warning_once(
        "deepspeed.comm does not time collectives: engine.log_summary() counts those of the engine by purpose, and "
        "torch.profiler times all of them"
    )


configure = log_summary


def in_aml() -> bool:
    """True if Azure ML has started this process."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """True if SageMaker has started this process."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    return "DLTS_JOB_ID" in os.environ


def mpi_discovery(distributed_port: int = PORT, verbose: bool = True) -> None:
    """Set torchrun's variables from MPI's. Raises ConfigError: these are incomplete."""
    place = find_place(os.environ, distributed_port)
    if not place.alone:
        os.environ.update(torchrun_variables(place))


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """`mpi_discovery`, which knows Azure's variables."""
    mpi_discovery(master_port, verbose)


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """`mpi_discovery`, which knows SageMaker's variables."""
    mpi_discovery(verbose=verbose)


def has_all_gather_into_tensor() -> bool:
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor


def has_all_reduce_coalesced() -> bool:
    return hasattr(dist, "all_reduce_coalesced")


def has_coalescing_manager() -> bool:
    return hasattr(dist.distributed_c10d, "_coalescing_manager")
