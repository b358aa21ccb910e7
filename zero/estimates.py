"""Memory estimates under DeepSpeed's names and in its table, with the numbers of our own planner.

Differences from DeepSpeed's, all because the plan counts what there is: a column for NVMe and rows for
offload to it; the buffers are in the numbers, so `additional_buffer_factor` is 1 unless given; "per CPU" is a node's
host memory, "per GPU" and "per NVMe" one rank's device memory and its part of the node's drives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from offload.errors import ConfigError
from zero.config import Config, load_config
from zero.machine import Machine
from zero.params.layout import Layout, UnitContent, build_layout
from zero.params.units import collect_leaves
from zero.placement import Placement, place
from zero.plan import DEVICE, HOST, NVME, Plan
from zero.planner import Planner
from zero.planning import lay_out, make_plan

TIERS = ("nvme", "cpu", "none")
FP32_BYTES = 4
LAYERS = 8
"""Of a model of which only the size is known: the cover cuts no unit smaller than an eighth without need."""
ENDLESS = Machine(
    available_bytes=1 << 62, available_source="no limit", memlock_bytes=None, device_bytes=1 << 62, rss_bytes=0
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """One line of the table."""

    offload_param: str
    offload_optimizer: str
    zero_init: bool
    host_bytes: int
    """Of a node."""
    device_bytes: int
    """Of a rank."""
    nvme_bytes: int
    """Of a rank."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The hardware."""

    num_gpus_per_node: int = 1
    num_nodes: int = 1
    additional_buffer_factor: float = 1.0

    def __post_init__(self) -> None:
        if min(self.num_gpus_per_node, self.num_nodes) < 1 or self.additional_buffer_factor <= 0:
            raise ConfigError(f"memory estimate: nodes, GPUs and factor must be positive, got {self}")

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.num_gpus_per_node * self.num_nodes


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """Print what stage 3 takes for a model, for every offload combination.

    Args:
        model: on any device, the meta device too.
        num_gpus_per_node: ranks of a node.
        num_nodes: nodes.
        additional_buffer_factor: multiplies host memory.

    Returns:
        The lines.
    """
    setup = Setup(num_gpus_per_node, num_nodes, additional_buffer_factor)
    largest = max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    plans = {}
    for param, states in _pairs():
        config = _config(param, states)
        trainable = {id(p) for p in model.parameters() if p.requires_grad}
        placement = place(config, 0, setup.world_size)
        covered, layout = lay_out(model, collect_leaves(model), trainable, config, placement)
        plan = make_plan(covered, layout, config, ENDLESS, torch.device("cuda"), True, placement)
        plans[param, states] = plan
    total = sum(p.numel() for p in model.parameters())
    return _table3(total, largest, setup, plans)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> list[Estimate]:
    """As `..._all_live` for a model of which only two numbers are known: it is taken to consist of such layers.

    Args:
        total_params: elements of all parameters.
        largest_layer_params: elements of the largest layer.
        num_gpus_per_node: ranks of a node.
        num_nodes: nodes.
        additional_buffer_factor: multiplies host memory.

    Returns:
        The lines.

    Raises:
        ConfigError: the largest layer is larger than the model, or a number is not positive.
    """
    total, largest = int(total_params), int(largest_layer_params)
    if not 0 < largest <= total:
        raise ConfigError(
            f"memory estimate: expected 0 < largest_layer_params <= total_params, got {largest:,} and {total:,}"
        )
    setup = Setup(num_gpus_per_node, num_nodes, additional_buffer_factor)
    layout = _layers(total, largest, setup.world_size)
    plans = {(param, states): _plan(layout, param, states) for param, states in _pairs()}
    return _table3(total, largest, setup, plans)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """Print what stage 2 takes for a model, for every place of the states; arguments as for stage 3.

    Returns:
        The lines.
    """
    total = sum(p.numel() for p in model.parameters())
    return estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[Estimate]:
    """As `..._all_live` for a model of which only the size is known.

    Stage 2 keeps all weights on each device and shards gradients and states.

    Returns:
        The lines.

    Raises:
        ConfigError: a number is not positive.
    """
    total = int(total_params)
    if total < 1:
        raise ConfigError(f"memory estimate: expected total_params > 0, got {total:,}")
    setup = Setup(num_gpus_per_node, num_nodes, additional_buffer_factor)
    layout = _layers(total, -(-total // LAYERS), setup.world_size)
    lines = []
    for states in TIERS:
        plan = _plan(layout, "none", states)
        # The planner's weights are this rank's slice, gathered unit by unit; here they are whole, and nothing is.
        whole = sum(unit.nbytes for unit in layout.units)
        slices = sum(row.nbytes for row in plan.rows if row.tier == DEVICE and row.plane == "weights")
        device = plan.tier_bytes(DEVICE) - slices - plan.unit_pool_bytes + whole
        host = int(plan.tier_bytes(HOST) * num_gpus_per_node * additional_buffer_factor)
        lines.append(Estimate("none", states, False, host, device, plan.tier_bytes(NVME)))
    _print_header(setup, f"Model with {total // 10**6}M total params.")
    for line in lines:
        _print_line(line, f"offload_optimizer={line.offload_optimizer:4}")
    return lines


def _table3(total: int, largest: int, setup: Setup, plans: dict[tuple[str, str], Plan]) -> list[Estimate]:
    lines = []
    for (param, states), zero_init in product(plans, (True, False)):
        plan = plans[param, states]
        host = plan.tier_bytes(HOST)
        if not zero_init:
            # Built whole on every rank, in fp32; it goes as the planes fill, the arena is there from the start.
            host = max(FP32_BYTES * total, host - plan.arena_bytes) + plan.arena_bytes
        node = int(host * setup.num_gpus_per_node * setup.additional_buffer_factor)
        lines.append(Estimate(param, states, zero_init, node, plan.tier_bytes(DEVICE), plan.tier_bytes(NVME)))
    sizes = f"{total // 10**6}M total params, {largest // 10**6}M largest layer params."
    _print_header(setup, f"Model with {sizes}")
    for line in lines:
        options = f"offload_param={line.offload_param:4}, offload_optimizer={line.offload_optimizer:4}"
        _print_line(line, f"{options}, zero_init={int(line.zero_init)}")
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


def _pairs() -> list[tuple[str, str]]:
    return list(product(TIERS, TIERS))


def _config(param: str, states: str) -> Config:
    def block(device: str) -> dict[str, str]:
        return {"device": device, **({"nvme_path": "nvme"} if device == "nvme" else {})}

    return load_config(
        {
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": block(param), "offload_optimizer": block(states)},
        }
    )


def _layers(total: int, largest: int, world_size: int) -> Layout:
    sizes: Sequence[int] = [largest] * (total // largest) + ([total % largest] if total % largest else [])
    contents = [
        UnitContent(f"layer {i}", ((i, (f"layer {i}",), torch.Size((numel,))),), torch.bfloat16, True, False)
        for i, numel in enumerate(sizes)
    ]
    return build_layout(contents, Placement(world_size=world_size, shard_size=world_size))


def _plan(layout: Layout, param: str, states: str) -> Plan:
    return Planner(layout, _config(param, states), ENDLESS, torch.device("cuda"), True, 0).make()
