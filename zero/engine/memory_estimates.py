"""Memory estimates under DeepSpeed's names and in its table, with the numbers of the plan that `zero plan` shows.

They differ from DeepSpeed's estimates because the plan counts real allocations. There is a column for NVMe, and rows
for offload to it. The numbers include the buffers, so `additional_buffer_factor` defaults to 1. "per CPU" is the host
memory of a node; "per GPU" and "per NVMe" are one rank's device memory and its part of the node's drives.

Each function returns the lines that it prints. Arguments: the model, on any device, or else the elements of all its
parameters and of its largest layer; the ranks of a node; the nodes; a factor of host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from offload.accelerator import planned_device
from offload.errors import ConfigError
from zero.assembly.model_plan import plan_model
from zero.config import load_config
from zero.plan.machine import Machine
from zero.plan.plan import DEVICE, HOST, NVME, Plan

TIERS = ("nvme", "cpu", "none")
GIB = 1 << 30
FP32_BYTES = 4
LAYERS = 8  # If only the size of a model is known: the cover cuts no unit smaller than an eighth without need.
# The sizes of parameters are not known, so none counts as one that never leaves the device.
UNKNOWN_SIZES = {"stage3_param_persistence_threshold": 0}
UNLIMITED_MACHINE = Machine(
    available_bytes=1 << 62, available_source="no limit", memlock_bytes=None, device_bytes=None, rss_bytes=0
)


@dataclass(frozen=True, slots=True)
class Estimate:
    offload_param: str
    offload_optimizer: str
    zero_init: bool
    host_bytes: int  # Of a node.
    device_bytes: int  # Of a rank.
    nvme_bytes: int  # Of a rank.


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """Print the memory that stage 3 takes for a model, for every offload combination. Returns the lines."""
    return _estimate(3, model, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> list[Estimate]:
    """As `..._all_live`, if only two sizes are known: the model counts as a row of layers of the largest size.

    Returns the lines. Raises ConfigError: the largest layer is larger than the model, or a number is not positive.
    """
    model = _row_of_layers(int(total_params), int(largest_layer_params))
    return _estimate(3, model, num_gpus_per_node, num_nodes, additional_buffer_factor, **UNKNOWN_SIZES)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """Print the memory that stage 2 takes for a model, for every place of the states. Returns the lines.

    Stage 2 keeps all weights on each device and shards gradients and states.
    """
    return _estimate(2, model, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """As `..._all_live`, if only the size of the model is known.

    Returns the lines. Raises ConfigError: a number is not positive.
    """
    model = _row_of_layers(int(total_params), -(-int(total_params) // LAYERS))
    return _estimate(2, model, num_gpus_per_node, num_nodes, additional_buffer_factor, **UNKNOWN_SIZES)


def _row_of_layers(total: int, largest: int) -> nn.Module:
    if not 0 < largest <= total:
        raise ConfigError(
            f"memory estimate: expected 0 < largest_layer_params <= total_params, got {largest:,} and {total:,}"
        )
    sizes = [*[largest] * (total // largest), *filter(None, [total % largest])]
    return nn.Sequential(*(nn.Linear(size, 1, bias=False, device="meta", dtype=torch.bfloat16) for size in sizes))


def _estimate(
    stage: int, model: nn.Module, ranks_per_node: int, nodes: int, factor: float, **keys: int
) -> list[Estimate]:
    """Print the lines of a stage, and return them. `keys`: of `zero_optimization`."""
    if min(ranks_per_node, nodes) < 1 or factor <= 0:
        raise ConfigError(
            f"memory estimate: GPUs, nodes and factor must be positive, got {ranks_per_node}, {nodes} and {factor}"
        )
    total = sum(p.numel() for p in model.parameters())
    largest = max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    node, gpu = "nodes" if nodes > 1 else "node", "GPUs" if ranks_per_node > 1 else "GPU"
    layer = f", {largest // 10**6}M largest layer params" if stage == 3 else ""
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {nodes} {node}, {ranks_per_node} {gpu} per node.")
    print(f"SW: Model with {total // 10**6}M total params{layer}.")
    print("  per CPU  |  per GPU | per NVMe |   Options")
    lines = []
    # Below stage 3 the device keeps all weights.
    for param, states in product(TIERS if stage == 3 else ("none",), TIERS):
        blocks = {"offload_param": _block(param), "offload_optimizer": _block(states)}
        plan = _plan(model, {"stage": stage, **blocks, **keys}, ranks_per_node * nodes)
        options = f"offload_optimizer={states:4}"
        for zero_init in (True, False) if stage == 3 else (False,):
            host = plan.tier_bytes(HOST)
            if stage == 3 and not zero_init:
                # Every rank builds the whole model in fp32. It is freed while the arrays fill; the host pool stays.
                host = max(FP32_BYTES * total, host - plan.host_pool_bytes) + plan.host_pool_bytes
            sizes = int(host * ranks_per_node * factor), plan.tier_bytes(DEVICE), plan.tier_bytes(NVME)
            lines.append(Estimate(param, states, zero_init, *sizes))
            host_gib, device_gib, nvme_gib = (nbytes / GIB for nbytes in sizes)
            words = f"offload_param={param:4}, {options}, zero_init={int(zero_init)}" if stage == 3 else options
            print(f" {host_gib:7.2f}GB | {device_gib:6.2f}GB | {nvme_gib:6.2f}GB | {words}")
    return lines


def _block(device: str) -> dict[str, str]:
    return {"device": device, "nvme_path": "nvme"} if device == NVME else {"device": device}


def _plan(model: nn.Module, zero: dict[str, Any], world_size: int) -> Plan:
    """The plan of one rank on a GPU machine without limits."""
    content = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    config = load_config(content, world_size=1)
    return plan_model(model, config, UNLIMITED_MACHINE, planned_device(), world_size)[1]
