"""Makes an engine's collectives from torch.distributed's ranks."""

from __future__ import annotations

import logging
from functools import partial

import torch

from offload import accelerator
from offload.errors import ConfigError
from offload.streams import open_streams
from offload.system.descriptors import same_node
from zero.config import Config
from zero.config.precision_block import DTYPES
from zero.dist.comm import Comm
from zero.params.layout import Placement, make_placement, why_no_secondary_shards
from zero.plan.machine import uses_weights_in_place
from zero.store.collectives import Collectives, ReduceOptions, TorchCollectives
from zero.store.host_gathers import HostGatherCollectives
from zero.store.pipeline_collectives import PipelineCollectives
from zero.store.shared_memory import SharedMemoryCollectives

logger = logging.getLogger("zero")


def open_collectives(config: Config, device: torch.device, stages: PipelineCollectives | None = None) -> Collectives:
    """Make the collectives of an engine. Collective.

    Raises ConfigError: a group of the configuration cannot be made of the ranks. `config`: validated for the number of
    ranks. `stages`: the pipeline of which this engine is one stage; None: all ranks have the full model.
    """
    fixed_order = config.sums_16_bit_in_fp32
    if stages is None:
        comm = Comm(device, open_streams(device), fixed_order=fixed_order)
    else:
        comm = stages.stage_comm(open_streams(device), fixed_order=fixed_order)
    shares_memory = _can_share_memory(comm, config, device, stages)
    placement = make_placement(config, comm.rank, comm.world_size, shares_memory=shares_memory)
    reason = why_no_secondary_shards(config, comm.world_size, shares_memory=shares_memory)
    if reason:
        logger.info("zero_optimization.zero_hpz_partition_size has no effect here: %s", reason)
    if comm.rank == 0:
        for key in ineffective_keys(config, comm.world_size, shares_memory=shares_memory):
            logger.warning(
                "%s has no effect here: the ranks share host memory, where gradients are not sent but added up in "
                "fp32; to have them sent set zero_optimization.shared_host_memory to false",
                key,
            )
    if placement.is_single_rank:
        comm.close()
        return Collectives(placement, stages)
    options = ReduceOptions(
        dtype=DTYPES.get(config.communication_data_type or ""),
        prescale=config.prescale_gradients,
        predivide_factor=config.gradient_predivide_factor,
        averages=config.gradient_allreduce_op == "mean",
        overlaps=config.zero_optimization.overlap_comm,
    )
    if shares_memory:
        return SharedMemoryCollectives(comm, placement, options, stages)
    if uses_host_gathers(comm, config, device, placement):
        return HostGatherCollectives(comm, placement, options)
    return TorchCollectives(comm, placement, options, stages)


def ineffective_keys(config: Config, world_size: int, *, shares_memory: bool) -> list[str]:
    """Keys about how gradients are sent. They do nothing where none are sent; fp32 sums are made there anyway."""
    is_set = {
        "communication_data_type": config.communication_data_type not in (None, "fp32"),
        "prescale_gradients": config.prescale_gradients,
        "gradient_predivide_factor": config.gradient_predivide_factor != 1.0,
    }
    return [key for key, value in is_set.items() if value] if world_size > 1 and shares_memory else []


def _can_share_memory(comm: Comm, config: Config, device: torch.device, stages: PipelineCollectives | None) -> bool:
    """True if the ranks keep one copy of each shard in shared memory, and use it there; the same on all ranks."""
    setting = config.zero_optimization.shared_host_memory
    if comm.world_size == 1 or setting is False:
        return False
    if accelerator.is_accelerator(device):
        return False
    # One copy has one owner: the groups of `mics_shard_size` would each update it.
    one_group = config.zero_optimization.mics_shard_size in (-1, comm.world_size)
    possible = (
        device.type == "cpu"
        and uses_weights_in_place()
        and same_node(partial(comm.all_gather_bytes, "one node"))
        and one_group
    )
    if stages is not None:  # stages open their groups together, so all need the same ones
        possible = all(answer == b"\1" for answer in stages.all_gather_bytes("shared memory", bytes([possible])))
    if setting is True and not possible:
        raise ConfigError(
            "zero_optimization.shared_host_memory: needs ranks that compute on the CPU of one node, without "
            'ZERO_NO_ALIAS or mics_shard_size; got ranks that do not share memory; set it to "auto" or false'
        )
    return possible


def uses_host_gathers(comm: Comm, config: Config, device: torch.device, placement: Placement) -> bool:
    """True if GPUs copy shards from the host memory of all ranks; the same on all ranks."""
    zero = config.zero_optimization
    setting = zero.shared_host_memory
    if setting is False or not accelerator.is_accelerator(device):
        return False
    is_supported = placement.weights_sharded and zero.offload_param.device == "cpu" and placement.secondary_size == 1
    if setting is True and not is_supported:
        raise ConfigError(
            "zero_optimization.shared_host_memory: on GPUs it needs stage 3 with offload_param on the cpu and no "
            f"zero_hpz_partition_size; got stage {zero.stage}, offload_param.device {zero.offload_param.device!r} and "
            f'zero_hpz_partition_size {placement.secondary_size}; set it to "auto" or false'
        )
    if not is_supported:
        return False
    one_node = same_node(partial(comm.all_gather_bytes, "one node"))
    if setting is True and not one_node:
        raise ConfigError(
            "zero_optimization.shared_host_memory: needs ranks on one node; got ranks that do not share memory; set it "
            'to "auto" or false'
        )
    reads_peers = b"1" in comm.all_gather_bytes("GPUs that read each other", b"%d" % accelerator.can_read_peers())
    is_chosen = setting is True or (one_node and not reads_peers)
    if comm.rank == 0 and one_node:
        logger.info(
            "shared_host_memory: GPUs of this node %s; weights are gathered %s",
            "read each other's memory" if reads_peers else "cannot read each other's memory",
            "from the host memory of all ranks" if is_chosen else "by collectives",
        )
    return is_chosen
