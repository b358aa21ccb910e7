"""Stages, groups of ranks, and what is exchanged: every key, its values, and what it may not stand beside."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from zero.config import Config, load_config
from zero.config.known_keys import known_keys
from zero.store.collectives import ReduceOptions
from zero.store.factory import ineffective_keys

TIERS: dict[str, dict[str, Any]] = {
    "none": {"device": "none"},
    "cpu": {"device": "cpu"},
    "nvme": {"device": "nvme", "nvme_path": "/local_nvme"},
}
FLAGS = [(True, True), (False, False), ("true", True), ("false", False), ("True", True), (1, True), (0, False)]
NO_FLAGS = ["yes", 2, [], 0.5]
BUCKET_NUMEL = 500_000_000


def zero_block(block: Any, **more: Any) -> Any:
    return load_config({"zero_optimization": block}, **more).zero_optimization


def problem(block: Any, **more: Any) -> str:
    """The one line that is wrong with a zero_optimization block."""
    return problem_of({"zero_optimization": block}, **more)


def problem_of(config: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, **more)
    _, *lines = str(caught.value).splitlines()
    assert len(lines) == 1
    return lines[0].strip()


# ---- the stage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_in_every_form_of_a_number(stage: int) -> None:
    for form in (stage, float(stage), str(stage)):
        assert zero_block({"stage": form}).stage == stage


@pytest.mark.parametrize("wrong", [-1, 4, 2.5, True, "two", "", [3], math.inf])
def test_what_is_no_stage_is_refused(wrong: Any) -> None:
    assert problem({"stage": wrong}).startswith("zero_optimization.stage: expected 0, 1, 2 or 3, got ")


@pytest.mark.parametrize("nothing", [{}, {"stage": None}, {"stage": "auto"}, {"sub_group_size": 1e9},
                                     {"offload_param": {"device": "none"}, "overlap_comm": True},
                                     {"zero_hpz_partition_size": 1, "mics_shard_size": -1}])  # fmt: skip
def test_without_the_key_the_stage_is_0_as_in_deepspeed(nothing: dict[str, Any]) -> None:
    assert zero_block(nothing).stage == 0
    assert load_config({}).zero_optimization.stage == 0
    assert load_config({"zero_optimization": nothing}).origin("zero_optimization.stage") in ("default", "auto")


@pytest.mark.parametrize(
    "asking",
    [
        {"offload_param": TIERS["cpu"]},
        {"offload_optimizer": TIERS["nvme"]},
        {"cpu_offload": True},
        {"stage3_max_live_parameters": 1e9},
        {"prefetch_bucket_size": 5e7},
        {"zero_hpz_partition_size": 2},
        {"mics_shard_size": 2},
    ],
)
def test_without_the_key_a_block_that_asks_for_more_than_0_has_is_stage_3(asking: dict[str, Any]) -> None:
    assert zero_block(asking, world_size=4).stage == 3
    assert load_config({"zero_optimization": asking}, world_size=4).origin("zero_optimization.stage") == "default"


@pytest.mark.parametrize(("switch", "stage"), [(True, 1), (False, 0)])
def test_a_bare_switch_is_stage_1_or_0_and_deprecated(switch: bool, stage: int) -> None:
    config = load_config({"zero_optimization": switch})
    assert config.zero_optimization.stage == stage
    assert config.as_dict() == load_config({"zero_optimization": {"stage": stage}}).as_dict()
    assert len(config.deprecated) == 1 and f'"stage": {stage}' in config.deprecated[0]


@pytest.mark.parametrize("wrong", [1, "true", [], 3.0])
def test_no_other_value_stands_for_the_block(wrong: Any) -> None:
    assert "zero_optimization: expected an object {...}" in problem(wrong)
    assert "bf16: expected an object {...}" in problem_of({"bf16": True})


@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("param", TIERS)
@pytest.mark.parametrize("stage", range(4))
def test_offload_needs_its_stage(stage: int, param: str, states: str) -> None:
    block = {"stage": stage, "offload_param": TIERS[param], "offload_optimizer": TIERS[states]}
    if stage < 1 and states != "none":
        line = problem(block)
        assert f'expected 1, 2 or 3, because offload_optimizer.device is "{states}", got 0' in line
        assert 'set "stage": 1 or higher' in line
    else:
        zero = zero_block(block)
        held = param if stage == 3 else "none"
        assert (zero.stage, zero.offload_param.device, zero.offload_optimizer.device) == (stage, held, states)
        inactive = load_config({"zero_optimization": block}).inactive
        assert ("zero_optimization.offload_param.device" in inactive) == (held != param)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_old_switches_of_offload_need_the_same_stages(stage: int) -> None:
    config = load_config({"zero_optimization": {"stage": stage, "cpu_offload_param": True}})
    assert config.zero_optimization.offload_param.device == "none"
    assert config.inactive == ("zero_optimization.cpu_offload_param",)
    if stage:
        assert zero_block({"stage": stage, "cpu_offload": True}).offload_optimizer.device == "cpu"
    else:
        assert 'set "stage": 1 or higher' in problem({"stage": 0, "cpu_offload": True})


@pytest.mark.parametrize("stage", range(4))
def test_a_resolved_block_loads_to_itself(stage: int) -> None:
    whole = load_config({"zero_optimization": {"stage": stage, "mics_shard_size": 0}})
    assert load_config(whole.as_dict()).as_dict() == whole.as_dict()


# ---- keys and their values ---------------------------------------------------------------------

FLAG_KEYS = {
    "zero_optimization.overlap_comm": True,
    "zero_optimization.ignore_unused_parameters": True,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "prescale_gradients": False,
    "reduce_scatter_with_fp32_accumulation": False,
    "bf16.enabled": False,
}


def value_at(config: Config, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def config_with(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return dict(value)


@pytest.mark.parametrize("path", FLAG_KEYS)
def test_a_flag_takes_true_and_false_also_as_words_and_nothing_else(path: str) -> None:
    assert value_at(load_config({"zero_optimization": {"stage": 1}}), path) is FLAG_KEYS[path]
    for form, meant in FLAGS:
        assert value_at(load_config(config_with(path, form)), path) is meant
    for wrong in NO_FLAGS:
        assert problem_of(config_with(path, wrong)).startswith(f"{path}: expected true or false, got ")


INERT_DEFAULTS = {
    "reduce_bucket_size": BUCKET_NUMEL,
    "allgather_bucket_size": BUCKET_NUMEL,
    "reduce_scatter": True,
    "allgather_partitions": True,
    "contiguous_gradients": True,
    "round_robin_gradients": False,
    "use_multi_rank_bucket_allreduce": True,
    "legacy_stage1": None,
}


@pytest.mark.parametrize("key", INERT_DEFAULTS)
def test_a_key_without_effect_has_a_default_and_is_read_as_it_was_given(key: str) -> None:
    assert getattr(zero_block({}), key) == INERT_DEFAULTS[key]
    for value in (True, 1, "5e8", 15099494.4):
        assert getattr(zero_block({key: value}), key) == value


def test_a_granularity_is_a_number_of_elements() -> None:
    key = "stage3_module_granularity_threshold"
    assert getattr(zero_block({}), key) == 0 and getattr(zero_block({key: 1e5}), key) == 100_000
    assert getattr(zero_block({"module_granularity_threshold": 7}), key) == 7
    assert "expected a number of elements" in problem({key: -1})


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("bf16", [True, False])
def test_gradients_travel_in_one_of_three_types(bf16: bool, world_size: int) -> None:
    key, base = "communication_data_type", {"bf16": {"enabled": bf16}}
    for form, meant in {"fp32": "fp32", "FP16": "fp16", "bf16": "bf16", None: None, "auto": None}.items():
        if meant == "fp16" and bf16 and world_size > 1:
            line = problem_of({**base, key: form}, world_size=world_size)
            assert (
                line.startswith(f'{key}: expected "fp32" or "bf16"') and "2 ranks" in line and "remove the key" in line
            )
        else:
            config = load_config({**base, key: form}, world_size=world_size)
            assert config.communication_data_type == meant and config.inactive == ()
            assert config.sums_16_bit_in_fp32 is (meant == "fp32" and bf16)
    for wrong in ("int8", 16, True, ["fp16"]):
        assert 'expected "fp32" or "fp16" or "bf16"' in problem_of({key: wrong}, world_size=world_size)


SENDING = {"communication_data_type": "bf16", "prescale_gradients": True, "gradient_predivide_factor": 2.0}
WIRE_KEYS = dict(zip(("dtype", "prescale", "predivide_factor"), SENDING, strict=True))
"""Field of `ReduceOptions` -> its key; the other fields act wherever gradients are added up."""


@pytest.mark.parametrize("key", SENDING)
def test_a_key_about_what_is_sent_says_that_it_does_nothing_in_shared_memory(key: str) -> None:
    config = load_config({key: SENDING[key]}, world_size=2)
    assert ineffective_keys(config, 2, shares_memory=True) == [key]
    assert ineffective_keys(config, 2, shares_memory=False) == ineffective_keys(config, 1, shares_memory=False) == []
    assert ineffective_keys(load_config({"communication_data_type": "fp32"}), 2, shares_memory=True) == []


def test_every_field_of_what_is_sent_has_a_key_that_says_so_or_acts_everywhere() -> None:
    assert {field.name for field in dataclasses.fields(ReduceOptions)} - WIRE_KEYS.keys() == {"averages", "overlaps"}


def test_sums_in_fp32_can_be_asked_for() -> None:
    for form, meant in FLAGS:
        assert load_config({"reduce_scatter_with_fp32_accumulation": form}).sums_16_bit_in_fp32 is meant


@pytest.mark.parametrize("divided", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2}])
def test_a_sum_has_no_division_to_place(divided: dict[str, Any]) -> None:
    assert load_config({"gradient_allreduce_op": "SUM"}, world_size=2).gradient_allreduce_op == "sum"
    assert 'expected "mean" together with' in problem_of({"gradient_allreduce_op": "sum", **divided})


def test_a_predivide_factor_is_above_zero() -> None:
    key = "gradient_predivide_factor"
    assert load_config({}).gradient_predivide_factor == 1.0
    for form, factor in {2: 2.0, "4": 4.0, 0.5: 0.5}.items():
        assert load_config({key: form}, world_size=2).gradient_predivide_factor == factor
    for wrong in (0, -1, "x", True, math.nan):
        assert problem_of({key: wrong}).startswith(f"{key}: expected ")


@pytest.mark.parametrize(
    ("form", "meant"), [("auto", "auto"), ("AUTO", "auto"), (None, "auto"), (True, True), ("false", False), (0, False)]
)
def test_host_memory_is_shared_always_never_or_where_it_helps(form: Any, meant: Any) -> None:
    assert zero_block({"shared_host_memory": form}).shared_host_memory == meant


@pytest.mark.parametrize("wrong", ["always", 2, [], 0.5])
def test_what_says_nothing_about_sharing_is_refused(wrong: Any) -> None:
    assert 'shared_host_memory: expected "auto", true or false' in problem({"shared_host_memory": wrong})


# ---- groups of ranks ---------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_shard_group_divides_the_ranks(world_size: int, group: int) -> None:
    if world_size % group == 0:
        assert zero_block({"stage": 3, "mics_shard_size": group}, world_size=world_size).mics_shard_size == group
    else:
        line = problem({"stage": 3, "mics_shard_size": group}, world_size=world_size)
        assert line.startswith("zero_optimization.mics_shard_size: expected a divisor of")
        assert str(world_size) in line and f"got {group}" in line and "set it to -1" in line


@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 64))
def test_a_secondary_group_divides_the_ranks_of_a_node(of_node: int, nodes: int, group: int) -> None:
    block, ranks = {"stage": 3, "zero_hpz_partition_size": group}, {"world_size": of_node * nodes}
    if of_node % group == 0:
        assert zero_block(block, **ranks, ranks_per_node=of_node).zero_hpz_partition_size == group
    else:
        line = problem(block, **ranks, ranks_per_node=of_node)
        assert line.startswith("zero_optimization.zero_hpz_partition_size: expected a divisor of")
        assert f"got {group}" in line and "set it to 1" in line
    if of_node * nodes % group == 0:
        assert zero_block(block, **ranks).zero_hpz_partition_size == group, "of nodes nothing is known"


@pytest.mark.parametrize("off", [-1, 0, -5, "0", "-1", 0.0, None, "auto"])
def test_groups_that_are_off_need_nothing(off: Any) -> None:
    for stage in range(4):
        zero = zero_block({"stage": stage, "mics_shard_size": off, "zero_hpz_partition_size": 0}, world_size=3)
        assert (zero.mics_shard_size, zero.zero_hpz_partition_size) == (-1, 1)


@pytest.mark.parametrize("key", ["mics_shard_size", "zero_hpz_partition_size"])
def test_groups_belong_to_stage_3(key: str) -> None:
    for stage in range(3):
        line = problem({"stage": stage, key: 2}, world_size=4)
        assert line.startswith("zero_optimization.stage: expected 3") and key in line and f"got {stage}" in line
    for wrong in (1.5, "x", True, [2]):
        assert problem({key: wrong}).startswith(f"zero_optimization.{key}: expected a whole number")


def test_the_two_kinds_of_groups_exclude_each_other() -> None:
    line = problem({"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2}, world_size=4)
    assert line.startswith("zero_optimization.mics_shard_size: ") and "zero_hpz_partition_size 2" in line


def test_a_config_is_checked_again_for_other_ranks() -> None:
    config = load_config({"zero_optimization": {"mics_shard_size": 2}}, world_size=4)
    assert load_config(config, world_size=4) is config
    assert load_config(config, world_size=6).zero_optimization.mics_shard_size == 2
    with pytest.raises(ConfigError, match="a divisor of 5"):
        load_config(config, world_size=5)


# ---- what has no effect ------------------------------------------------------------------------


COMMUNICATION = (
    "contiguous_gradients",
    "reduce_scatter",
    "allgather_partitions",
    "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
)


def test_a_key_without_effect_is_listed_with_its_reason() -> None:
    paths = [f"zero_optimization.{key}" for key in COMMUNICATION]
    reasons = {key.path: key.reason for key in known_keys(Config) if key.role == "inert"}
    for path in paths:
        for value in (1, 4) if path.endswith("_size") else (True, False):
            config = load_config(config_with(path, value), world_size=4)
            assert config.inactive == (path,) and config.inactive_with_reasons == (f"{path} ({reasons[path]})",)


def test_keys_without_effect_are_listed_by_reason_and_under_the_names_the_user_wrote() -> None:
    nebula = {"enabled": False, "load_path": "x"}
    config = load_config({"nebula": nebula, "zero_optimization": {"allgather_sequential": True}})
    assert config.inactive == ("nebula.enabled", "nebula.load_path", "zero_optimization.allgather_sequential")
    first, second = config.inactive_with_reasons
    assert first.startswith("nebula.enabled, nebula.load_path (checkpoints ")
    assert second.startswith("zero_optimization.allgather_sequential (")


@pytest.mark.parametrize("stage", range(4))
def test_knobs_of_fetching_are_listed_where_nothing_is_fetched(stage: int) -> None:
    keys = ["stage3_prefetch_bucket_size", "stage3_max_reuse_distance"]
    config = load_config({"zero_optimization": {"stage": stage, **dict.fromkeys(keys, 1e6)}})
    assert config.inactive == (tuple(f"zero_optimization.{key}" for key in keys) if stage < 3 else ())
