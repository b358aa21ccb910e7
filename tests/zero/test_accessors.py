"""The engine's answers about its configuration, under DeepSpeed's names."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from zero.compat.engine_getters import ConfigGetters
from zero.config import load_config


class Engine(ConfigGetters):
    def __init__(self, config: Any, world_size: int = 1) -> None:
        self._config = load_config(config, world_size=world_size)


def answer(engine: Engine, name: str) -> Any:
    found = getattr(engine, name)
    return found() if callable(found) else found


DEFAULTS: dict[str, Any] = {
    "zero_optimization": False,
    "zero_optimization_stage": 0,
    "zero_optimization_partition_gradients": False,
    "zero_optimization_partition_weights": False,
    "zero_offload_param": None,
    "zero_offload_optimizer": None,
    "zero_use_cpu_optimizer": False,
    "zero_cpu_offload": False,
    "zero_nvme_offload_optimizer": False,
    "zero_partial_offload": 1.0,
    "zero_sub_group_size": None,
    "zero_max_live_parameters": None,
    "zero_max_reuse_distance": None,
    "zero_prefetch_bucket_size": None,
    "zero_param_persistence_threshold": 100_000,
    "zero_module_granularity_threshold": 0,
    "zero_gather_16bit_weights_on_model_save": False,
    "zero_ignore_unused_parameters": True,
    "zero_reduce_scatter": True,
    "zero_reduce_bucket_size": 500_000_000,
    "zero_multi_rank_bucket_allreduce": True,
    "zero_allgather_bucket_size": 500_000_000,
    "zero_allgather_partitions": True,
    "zero_overlap_comm": True,
    "zero_contiguous_gradients": True,
    "zero_round_robin_gradients": False,
    "zero_hpz_partition_size": 1,
    "world_size": 1,
    "dp_world_size": 1,
    "mp_world_size": 1,
    "global_rank": 0,
    "communication_data_type": torch.float32,
    "get_data_types": (torch.float32, torch.float32),
    "postscale_gradients": True,
    "gradient_predivide_factor": 1.0,
    "dynamic_loss_scale": False,
    "dataloader_drop_last": False,
    "steps_per_print": None,
    "optimizer_name": None,
}


def test_every_answer_has_a_default() -> None:
    engine = Engine({})
    assert {name: answer(engine, name) for name in DEFAULTS} == DEFAULTS


def test_every_answer_says_its_name_and_what_it_means() -> None:
    rows = {name: row for name, row in vars(ConfigGetters).items() if not name.startswith("_")}
    assert rows.keys() >= DEFAULTS.keys()
    assert [name for name, row in rows.items() if not row.__doc__.endswith(".")] == []
    assert {name for name, row in rows.items() if callable(row) and row.__name__ != name} == set()
    assert inspect.getdoc(ConfigGetters.train_batch_size) == "Samples per optimizer step over all ranks."
    assert inspect.getdoc(vars(ConfigGetters)["world_size"]) == "Number of ranks."


CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "zero_sub_group_size": ({"sub_group_size": 4096}, 4096),
    "zero_max_live_parameters": ({"stage3_max_live_parameters": 1e9}, 10**9),
    "zero_max_reuse_distance": ({"max_reuse_distance": 1e9}, 10**9),
    "zero_prefetch_bucket_size": ({"stage3_prefetch_bucket_size": 5e7}, 50_000_000),
    "zero_param_persistence_threshold": ({"stage3_param_persistence_threshold": 10}, 10),
    "zero_module_granularity_threshold": ({"stage3_module_granularity_threshold": 10}, 10),
    "zero_gather_16bit_weights_on_model_save": ({"stage3_gather_fp16_weights_on_model_save": True}, True),
    "zero_ignore_unused_parameters": ({"ignore_unused_parameters": False}, False),
    "zero_reduce_scatter": ({"reduce_scatter": False}, False),
    "zero_reduce_bucket_size": ({"reduce_bucket_size": 15099494.4}, 15_099_494),
    "zero_multi_rank_bucket_allreduce": ({"use_multi_rank_bucket_allreduce": False}, False),
    "zero_allgather_bucket_size": ({"allgather_bucket_size": 2e8}, 200_000_000),
    "zero_allgather_partitions": ({"allgather_partitions": False}, False),
    "zero_overlap_comm": ({"overlap_comm": False}, False),
    "zero_contiguous_gradients": ({"contiguous_gradients": False}, False),
    "zero_round_robin_gradients": ({"round_robin_gradients": True}, True),
    "zero_hpz_partition_size": ({"zero_hpz_partition_size": 2}, 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_key_is_answered_as_configured(name: str) -> None:
    block, expected = CHANGES[name]
    assert answer(Engine({"zero_optimization": block}, world_size=4), name) == expected


@pytest.mark.parametrize("stage", range(4))
def test_the_stage_says_what_is_partitioned(stage: int) -> None:
    engine = Engine({"zero_optimization": {"stage": stage}})
    assert engine.zero_optimization() is (stage > 0) and engine.zero_optimization_stage() == stage
    assert engine.zero_optimization_partition_gradients() is (stage > 1)
    assert engine.zero_optimization_partition_weights() is (stage > 2)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_offload_is_answered_by_block_and_by_place(tier: str) -> None:
    block = {"device": tier, "nvme_path": "/local_nvme"}
    engine = Engine({"zero_optimization": {"offload_param": block, "offload_optimizer": {**block, "ratio": 0.5}}})
    param, states = engine.zero_offload_param(), engine.zero_offload_optimizer()
    assert param is not None and param.device == tier and states is not None and states.device == tier
    assert engine.zero_use_cpu_optimizer() and engine.zero_partial_offload() == 0.5
    assert (engine.zero_cpu_offload(), engine.zero_nvme_offload_optimizer()) == (tier == "cpu", tier == "nvme")


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, torch.float32),
        ({"communication_data_type": "fp16"}, torch.float16),
    ],
)
def test_gradients_are_exchanged_in_the_weights_type_unless_it_is_said(
    keys: dict[str, Any], dtype: torch.dtype
) -> None:
    assert Engine(keys).communication_data_type == dtype


def test_answers_about_ranks_and_averages() -> None:
    keys = {"prescale_gradients": True, "gradient_predivide_factor": 2, "optimizer": {"type": "adam"},
            "steps_per_print": 10, "dataloader_drop_last": True}  # fmt: skip
    engine = Engine(keys, world_size=6)
    assert (engine.world_size, engine.dp_world_size, engine.mp_world_size) == (6, 6, 1)
    assert not engine.postscale_gradients() and engine.gradient_predivide_factor() == 2.0
    assert engine.optimizer_name() == "adam" and engine.steps_per_print() == 10 and engine.dataloader_drop_last()


@pytest.mark.parametrize(("said", "local"), [("3", 3), ("", 0), ("x", 0), ("-1", 0)])
def test_the_rank_on_the_node_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch, said: str, local: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", said)
    assert Engine({}).local_rank == local


@pytest.mark.parametrize(
    ("written", "expected"), [("false", False), (1, True), ("True", True), ("maybe", True), ([], True)]
)
def test_a_key_without_effect_is_answered_in_the_form_of_its_default(written: object, expected: bool) -> None:
    engine = Engine({"zero_optimization": {"contiguous_gradients": written}}, world_size=4)
    assert answer(engine, "zero_contiguous_gradients") is expected


def test_a_size_without_effect_that_is_no_number_is_answered_by_the_default() -> None:
    engine = Engine({"zero_optimization": {"reduce_bucket_size": "1GB"}}, world_size=4)
    assert answer(engine, "zero_reduce_bucket_size") == 500_000_000
