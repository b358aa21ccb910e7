"""Memory estimates under DeepSpeed's names and in its table, with the numbers of our own planner.

They differ from DeepSpeed's estimates because the plan counts real allocations. There is a column for NVMe, and rows
for offload to it. The numbers include the buffers, so `additional_buffer_factor` defaults to 1. "per CPU" is the host
memory of a node; "per GPU" and "per NVMe" are one rank's device memory and its part of the node's drives.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from offload.accelerator import planned_device
from offload.errors import ConfigError
from zero.assembly.model_plan import plan_model
from zero.config import Config, load_config
from zero.plan.machine import Machine
from zero.plan.plan import DEVICE, HOST, NVME, Plan

TIERS = ("nvme", "cpu", "none")
FP32_BYTES = 4
LAYERS = 8  # If only the size of a model is known: the cover cuts no unit smaller than an eighth without need.
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


@dataclass(frozen=True, slots=True)
class Setup:
    num_gpus_per_node: int = 1
    num_nodes: int = 1
    additional_buffer_factor: float = 1.0

    def __post_init__(self) -> None:
        if min(self.num_gpus_per_node, self.num_nodes) < 1 or self.additional_buffer_factor <= 0:
            raise ConfigError(f"memory estimate: nodes, GPUs and factor must be positive, got {self}")

    @property
    def world_size(self) -> int:
        return self.num_gpus_per_node * self.num_nodes


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """Print the memory that stage 3 takes for a model, for every offload combination. Returns the lines.

    Args:
        model: on any device, the meta device too.
        num_gpus_per_node: ranks of a node.
        num_nodes: nodes.
        additional_buffer_factor: multiplies host memory.
    """
    return _live(3, model, Setup(num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> list[Estimate]:
    """As `..._all_live`, if only two sizes are known: the model counts as a row of layers of the largest size.

    Returns the lines. Raises ConfigError: the largest layer is larger than the model, or a number is not positive.

    Args:
        total_params: elements of all parameters.
        largest_layer_params: elements of the largest layer.
        num_gpus_per_node: ranks of a node.
        num_nodes: nodes.
        additional_buffer_factor: multiplies host memory.
    """
    total, largest = int(total_params), int(largest_layer_params)
    if not 0 < largest <= total:
        raise ConfigError(
            f"memory estimate: expected 0 < largest_layer_params <= total_params, got {largest:,} and {total:,}"
        )
    return _cold(3, total, largest, Setup(num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """Print the memory that stage 2 takes for a model, for every place of the states; arguments as for stage 3.

    Stage 2 keeps all weights on each device and shards gradients and states. Returns the lines.
    """
    return _live(2, model, Setup(num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """As `..._all_live`, if only the size of the model is known.

    Returns the lines. Raises ConfigError: a number is not positive.
    """
    return _cold_layers(2, int(total_params), Setup(num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero1_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """Print the memory that stage 1 takes for a model, for every place of the states; arguments as for stage 3.

    Stage 1 keeps all weights on each device and shards states. The numbers are for several micro-batches per step: each
    device then also has the fp32 sums of all gradients. With one it takes as much as stage 2. Returns the lines.
    """
    return _live(1, model, Setup(num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero1_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """As `..._all_live`, if only the size of the model is known.

    Returns the lines. Raises ConfigError: a number is not positive.
    """
    return _cold_layers(1, int(total_params), Setup(num_gpus_per_node, num_nodes, additional_buffer_factor))


def _live(stage: int, model: nn.Module, setup: Setup, **keys: int) -> list[Estimate]:
    """The lines of a model on any device. `keys`: of `zero_optimization`."""
    largest = max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    total = sum(p.numel() for p in model.parameters())
    plans = {kinds: _plan(model, _config(stage, kinds, **keys), setup) for kinds in _kinds(stage)}
    return _table(stage, total, largest, setup, plans)


def _cold(stage: int, total: int, largest: int, setup: Setup) -> list[Estimate]:
    rest = total % largest
    sizes = [largest] * (total // largest) + [rest] * (rest > 0)
    layers = (nn.Linear(numel, 1, bias=False, device="meta", dtype=torch.bfloat16) for numel in sizes)
    # The sizes of parameters are not known, so none counts as one that never leaves the device.
    return _live(stage, nn.Sequential(*layers), setup, stage3_param_persistence_threshold=0)


def _cold_layers(stage: int, total: int, setup: Setup) -> list[Estimate]:
    if total < 1:
        raise ConfigError(f"memory estimate: expected total_params > 0, got {total:,}")
    return _cold(stage, total, -(-total // LAYERS), setup)


def _kinds(stage: int) -> list[tuple[str, str]]:
    """(tier of the weights, tier of the states) of each plan; below stage 3 the device keeps whole weights."""
    return list(product(TIERS if stage == 3 else ("none",), TIERS))


def _table(stage: int, total: int, largest: int, setup: Setup, plans: dict[tuple[str, str], Plan]) -> list[Estimate]:
    """Print the lines of a stage, and return them."""
    lines = []
    for (param, states), zero_init in product(plans, (True, False) if stage == 3 else (False,)):
        plan = plans[param, states]
        host = plan.tier_bytes(HOST)
        if stage == 3 and not zero_init:
            # Every rank builds the whole model in fp32. It is freed while the planes fill; the arena exists throughout.
            host = max(FP32_BYTES * total, host - plan.host_pool_bytes) + plan.host_pool_bytes
        node = int(host * setup.num_gpus_per_node * setup.additional_buffer_factor)
        lines.append(Estimate(param, states, zero_init, node, plan.tier_bytes(DEVICE), plan.tier_bytes(NVME)))
    sizes = f", {largest // 10**6}M largest layer params" if stage == 3 else ""
    _print_header(setup, f"Model with {total // 10**6}M total params{sizes}.")
    for line in lines:
        options = f"offload_optimizer={line.offload_optimizer:4}"
        if stage == 3:
            options = f"offload_param={line.offload_param:4}, {options}, zero_init={int(line.zero_init)}"
        _print_line(line, options)
    return lines


def _print_header(setup: Setup, software: str) -> None:
    nodes = "nodes" if setup.num_nodes > 1 else "node"
    gpus = "GPUs" if setup.num_gpus_per_node > 1 else "GPU"
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {setup.num_nodes} {nodes}, {setup.num_gpus_per_node} {gpus} per node.")
    print(f"SW: {software}")
    print("  per CPU  |  per GPU | per NVMe |   Options")


def _print_line(line: Estimate, options: str) -> None:
    host, device, nvme = (nbytes / 2**30 for nbytes in (line.host_bytes, line.device_bytes, line.nvme_bytes))
    print(f" {host:7.2f}GB | {device:6.2f}GB | {nvme:6.2f}GB | {options}")


def _config(stage: int, kinds: tuple[str, str], **keys: int) -> Config:
    def block(device: str) -> dict[str, str]:
        return {"device": device, **({"nvme_path": "nvme"} if device == "nvme" else {})}

    blocks = {"offload_param": block(kinds[0]), "offload_optimizer": block(kinds[1])}
    return load_config(
        {
            "gradient_accumulation_steps": 2 if stage == 1 else 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage, **blocks, **keys},
        },
        world_size=1,
    )


def _plan(model: nn.Module, config: Config, setup: Setup) -> Plan:
    """The plan of one rank on a GPU machine without limits."""
    return plan_model(model, config, UNLIMITED_MACHINE, planned_device(), setup.world_size)[1]
