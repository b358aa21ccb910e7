"""estimate_zero*: DeepSpeed's table, the planner's numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from models import build, make_config

import zero
from offload.errors import ConfigError
from zero.assembly.model_plan import plan_model
from zero.config import load_config
from zero.engine.memory_estimates import UNLIMITED_MACHINE
from zero.plan.plan import DEVICE, HOST, NVME

TIERS = ("nvme", "cpu", "none")


def test_every_offload_combination_has_the_bytes_that_the_engine_would_plan_on_a_gpu(nvme_path: Any) -> None:
    model = build("middle")
    lines = zero.estimate_zero3_model_states_mem_needs_all_live(model)
    assert [(e.offload_param, e.offload_optimizer) for e in lines[::2]] == list(product(TIERS, TIERS))
    for line in lines[::2]:
        config = make_config((line.offload_param, line.offload_optimizer), nvme_path)
        config["zero_optimization"] = {
            key: value for key, value in config["zero_optimization"].items() if not key.startswith("stage3_")
        }
        plan = plan_model(model, load_config(config), UNLIMITED_MACHINE, torch.device("cuda"))[1]
        planned = [plan.tier_bytes(tier) for tier in (HOST, DEVICE, NVME)]
        assert [line.host_bytes, line.device_bytes, line.nvme_bytes] == planned


def test_the_table_has_deepspeeds_shape(capsys: pytest.CaptureFixture[str]) -> None:
    zero.estimate_zero3_model_states_mem_needs_all_cold(total_params=3e9, largest_layer_params=65e6, num_nodes=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 2 nodes, 1 GPU per node.",
        "SW: Model with 3000M total params, 65M largest layer params.",
        "  per CPU  |  per GPU | per NVMe |   Options",
    ]
    assert len(lines) == 4 + 18
    assert lines[-2].endswith("| offload_param=none, offload_optimizer=none, zero_init=1")
    assert lines[6].count("GB |") == 3 and "offload_param=nvme, offload_optimizer=cpu , zero_init=1" in lines[6]


def test_states_take_what_the_record_takes_wherever_they_are() -> None:
    """bf16 weights 2, remainder 2, moments 8, gradient 2 bytes a parameter; no padding at this size."""
    numel = 1 << 20
    lines = {
        (e.offload_param, e.offload_optimizer): e
        for e in zero.estimate_zero3_model_states_mem_needs_all_cold(64 * numel, numel)
        if e.zero_init
    }
    everything = 64 * numel
    assert lines["nvme", "nvme"].nvme_bytes == 12 * everything
    assert lines["cpu", "nvme"].nvme_bytes == 10 * everything
    assert lines["cpu", "cpu"].nvme_bytes == 0 and lines["cpu", "cpu"].host_bytes >= 14 * everything
    assert lines["none", "none"].device_bytes >= 14 * everything


def test_ranks_share_the_states_and_a_node_holds_its_ranks() -> None:
    def lines(**setup: int) -> list[Any]:
        return zero.estimate_zero3_model_states_mem_needs_all_cold(1 << 26, 1 << 20, **setup)

    one, eight = lines()[0], lines(num_gpus_per_node=8)[0]
    assert eight.nvme_bytes * 8 == one.nvme_bytes
    assert lines(num_nodes=8)[0].host_bytes * 8 == eight.host_bytes


def test_without_zero_init_the_whole_model_is_in_memory_first() -> None:
    with_init, without = zero.estimate_zero3_model_states_mem_needs_all_cold(1 << 28, 1 << 20)[:2]
    assert without.host_bytes >= 4 << 28 > with_init.host_bytes


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_stage_with_whole_weights_has_the_bytes_that_the_engine_would_plan(nvme_path: Any, world_size: int) -> None:
    model = build("middle")
    for line in zero.estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=world_size):
        config = make_config(("none", line.offload_optimizer), nvme_path)
        config["zero_optimization"] = {
            "stage": 2, "offload_optimizer": config["zero_optimization"]["offload_optimizer"]
        }  # fmt: skip
        loaded = load_config(config, world_size=world_size)
        plan = plan_model(model, loaded, UNLIMITED_MACHINE, torch.device("cuda"), world_size)[1]
        planned = [plan.tier_bytes(HOST) * world_size, plan.tier_bytes(DEVICE), plan.tier_bytes(NVME)]
        assert [line.host_bytes, line.device_bytes, line.nvme_bytes] == planned


def test_whole_weights_are_on_every_device_and_the_rest_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    total, estimate = 1 << 26, zero.estimate_zero2_model_states_mem_needs_all_cold
    one = {e.offload_optimizer: e for e in estimate(total)}
    eight = {e.offload_optimizer: e for e in estimate(total, num_gpus_per_node=8)}
    assert eight["none"].device_bytes >= 2 * total + 10 * total // 8
    assert one["none"].device_bytes - eight["none"].device_bytes >= 10 * total * 7 // 8 - 2 * total
    assert one["nvme"].nvme_bytes == 8 * eight["nvme"].nvme_bytes == 10 * total
    assert one["cpu"].host_bytes >= 10 * total
    out = capsys.readouterr().out.splitlines()
    assert out[2] == "SW: Model with 67M total params."
    assert [line.split("|")[-1].strip() for line in out[4:7]] == [
        f"offload_optimizer={tier:4}".strip() for tier in TIERS
    ]


def test_a_higher_stage_takes_no_more_of_a_device() -> None:
    total, ranks = 1 << 26, {"num_gpus_per_node": 8}
    zero2 = zero.estimate_zero2_model_states_mem_needs_all_cold(total, **ranks)[-1].device_bytes
    zero3 = zero.estimate_zero3_model_states_mem_needs_all_cold(total, total // 8, **ranks)[-1].device_bytes
    assert zero2 > zero3


@pytest.mark.parametrize(
    "call",
    [
        lambda: zero.estimate_zero3_model_states_mem_needs_all_cold(10, 20),
        lambda: zero.estimate_zero3_model_states_mem_needs_all_cold(10, 5, num_nodes=0),
        lambda: zero.estimate_zero2_model_states_mem_needs_all_cold(0),
        lambda: zero.estimate_zero2_model_states_mem_needs_all_cold(0.5),
    ],
)
def test_impossible_numbers_are_refused(call: Any) -> None:
    with pytest.raises(ConfigError, match="memory estimate"):
        call()
