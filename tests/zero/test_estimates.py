"""estimate_zero*: DeepSpeed's table, the planner's numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from models import build, make_config

import zero
from offload.errors import ConfigError
from zero.config import load_config
from zero.estimates import ENDLESS
from zero.plan import DEVICE, HOST, NVME
from zero.planning import plan_model

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
        plan = plan_model(model, load_config(config), ENDLESS, torch.device("cuda"))[1]
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


def test_stage_2_keeps_all_weights_on_every_device_and_shards_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    total = 1 << 26
    one = zero.estimate_zero2_model_states_mem_needs_all_cold(total)
    eight = zero.estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node=8)
    none = {e.offload_optimizer: e for e in eight}["none"]
    assert none.device_bytes >= 2 * total + 12 * total // 8
    assert {e.offload_optimizer: e for e in one}["nvme"].nvme_bytes == 10 * total
    out = capsys.readouterr().out.splitlines()
    assert out[2] == "SW: Model with 67M total params."
    assert [line.split("|")[-1].strip() for line in out[4:7]] == [
        f"offload_optimizer={tier:4}".strip() for tier in TIERS
    ]
    live = zero.estimate_zero2_model_states_mem_needs_all_live(torch.nn.Linear(1 << 13, 1 << 13, bias=False))
    assert live == one


@pytest.mark.parametrize(
    "call",
    [
        lambda: zero.estimate_zero3_model_states_mem_needs_all_cold(10, 20),
        lambda: zero.estimate_zero3_model_states_mem_needs_all_cold(10, 5, num_nodes=0),
        lambda: zero.estimate_zero2_model_states_mem_needs_all_cold(0),
    ],
)
def test_impossible_numbers_are_refused(call: Any) -> None:
    with pytest.raises(ConfigError, match="memory estimate"):
        call()
