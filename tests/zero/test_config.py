from __future__ import annotations

import copy
import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from offload.errors import ConfigError
from zero.config import Config, load_config, tolerating_unknown_keys
from zero.config.fields import AnyBlock
from zero.config.known_keys import keys_of, known_keys
from zero.config.numbers import parse_bytes, parse_count, parse_integer, parse_number
from zero.config.swap_paths import swap_paths, wants_pinning

KEYS = {key.path: key for key in known_keys(Config)}
BLOCKS: dict[str, AnyBlock] = {"": Config} | {path: key.inner for path, key in KEYS.items() if key.inner is not None}


def nested(path: str, value: Any) -> dict[str, Any]:
    """A config with one value at a dotted path."""
    for part in reversed(path.split(".") if path else []):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def problems(config: Any, **more: Any) -> list[str]:
    """The lines of the error, without its headline."""
    with pytest.raises(ConfigError) as caught:
        load_config(config, **more)
    headline, *lines = str(caught.value).splitlines()
    assert f"{len(lines)} problem" in headline
    return [line.strip() for line in lines]


def slips(key: str) -> set[str]:
    """The key with one letter dropped, doubled, replaced, or swapped with its neighbour."""
    made = set()
    for at, letter in enumerate(key):
        before, after = key[:at], key[at + 1 :]
        made |= {before + after, before + 2 * letter + after, before + string.ascii_lowercase[at % 26] + after}
        made.add(before + after[:1] + letter + after[1:])
    return {slip for slip in made if slip and "." not in slip and not slip.startswith(("comment", "_comment"))}


# ---- keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BLOCKS)
def test_every_slip_in_every_key_is_an_error_that_names_the_key_meant(path: str) -> None:
    block = BLOCKS[path]
    names = [*keys_of(block), *block.aliases]
    meant: dict[str, set[str]] = {}
    for name in names:
        for slip in slips(name) - set(names):
            meant.setdefault(slip, set()).add(name)
    assert meant
    prefix = f"{path}." if path else ""
    lines = {line.partition(": ")[0]: line for line in problems(nested(path, dict.fromkeys(meant, "auto")))}
    assert set(lines) == {prefix + slip for slip in meant}
    for slip, keys in meant.items():
        assert all(f"'{key}'" in lines[prefix + slip] for key in keys), lines[prefix + slip]


def test_a_key_in_the_wrong_block_is_sent_to_the_right_one() -> None:
    (line,) = problems({"zero_optimization": {"aio": {"block_size": 4096}}})
    assert line.startswith("zero_optimization.aio: unknown key") and "it belongs at the top level" in line
    (line,) = problems({"stage3_max_live_parameters": 1e9})
    assert "it belongs in zero_optimization" in line
    (line,) = problems({"zero_optimization": {"offload_param": {"pipeline_read": True}}})
    assert "it belongs in zero_optimization.offload_optimizer" in line


@pytest.mark.parametrize("content", [{"offload_activations": True}, {"zero_optimization": {"offload_activations": {}}}])
def test_a_wish_that_has_another_name_here_is_told_it(content: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"offload_activations: unknown key; set activation_checkpointing.activation"):
        load_config(content)


def test_an_unknown_key_that_resembles_nothing_lists_the_known_ones() -> None:
    (line,) = problems({"aio": {"zzz": 1}})
    assert "block_size" in line and "queue_depth" in line


def test_the_documented_keys_of_deepspeed_are_known() -> None:
    zero = """stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
        elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
        cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size param_persistence_threshold
        model_persistence_threshold max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save
        module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential
        stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
        parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather
        memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
        enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module stage3_prefetch_bucket_size
        stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
        stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"""
    top = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        managed_gradient_accumulation steps_per_print dump_state disable_python_gc disable_allgather
        communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
        gradient_allreduce_op zero_optimization activation_checkpointing comms_logger tensorboard wandb csv_monitor
        comet gradient_clipping fp16 bf16 bfloat16 amp torch_autocast optimizer scheduler
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer flops_profiler wall_clock_breakdown
        memory_breakdown autotuning elasticity use_data_before_expert_parallelism
        use_data_before_expert_parallel_ hybrid_engine pipeline data_efficiency curriculum_learning
        compression_training sparse_attention sparse_gradients checkpoint data_types aio dataloader_drop_last
        nebula datastates_ckpt weight_quantization compile timers tensor_parallel expert_parallel inference
        graph_harvesting eigenvalue progressive_layer_drop pld sequence_parallel_size vocabulary_size log_level
        comms_config monitor_config"""
    load_config(dict.fromkeys(top.split(), "auto") | {"zero_optimization": dict.fromkeys(zero.split(), "auto")})


def test_comments_are_accepted() -> None:
    config = load_config({"_comment": "mine", "comment_2": {"a": 1}, "zero_optimization": {"//": "x"}})
    assert config.as_dict() == load_config({}).as_dict()
    assert config.inactive == config.ignored == ()


def test_a_dotted_key_is_an_error_that_says_where_it_goes() -> None:
    (line,) = problems({"zero_optimization.reduce_bucket_size": 1024})
    assert 'put "reduce_bucket_size" into the block "zero_optimization"' in line
    (line,) = problems({"zero.optimization": {}})
    assert "nearest known key is 'zero_optimization'" in line


# ---- all problems at once ----------------------------------------------------------------------


def test_all_problems_come_at_once_with_path_expectation_and_value() -> None:
    lines = problems(
        {
            "train_batch_size": 7,
            "gradient_accumulation_steps": 2,
            "gradient_clippng": 1.0,
            "gradient_clipping": -1,
            "fp16": {"fp16_master_weights_and_grads": True},
            "aio": 3,
            "optimizer": {"type": "OneBitLamb", "params": {"lr": True, "betas": [0.9]}},
            "zero_optimization": {
                "stage": 4,
                "sub_group_size": "1GB",
                "offload_param": {"device": "nvme"},
                "offload_optimizer": {"device": "disk", "buffer_count": 1},
            },
        }
    )
    found = {line.partition(": ")[0]: line for line in lines}
    assert set(found) == {
        "train_batch_size",
        "gradient_clippng",
        "gradient_clipping",
        "fp16.fp16_master_weights_and_grads",
        "aio",
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "zero_optimization.stage",
        "zero_optimization.sub_group_size",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.buffer_count",
    }
    assert all("expected" in line and "got" in line for path, line in found.items() if path != "gradient_clippng")
    assert 'got "disk"' in found["zero_optimization.offload_optimizer.device"]
    assert found["zero_optimization.stage"] == "zero_optimization.stage: expected 0, 1, 2 or 3, got 4"


def test_a_faulty_value_causes_no_second_complaint_about_what_depends_on_it() -> None:
    offload = {"offload_param": {"device": "nvme", "nvme_path": 3}}
    (line,) = problems({"zero_optimization": offload})
    assert line.startswith("zero_optimization.offload_param.nvme_path: ")


def test_a_problem_is_reported_under_the_name_the_user_wrote() -> None:
    (line,) = problems({"zero_optimization": {"prefetch_bucket_size": "x"}})
    assert line.startswith("zero_optimization.prefetch_bucket_size: ")
    (line,) = problems({"bfloat16": {"enabled": "maybe"}})
    assert line.startswith("bfloat16.enabled: ")


# ---- files -------------------------------------------------------------------------------------


def test_a_file_loads_like_its_content(tmp_path: Path) -> None:
    content = {"train_batch_size": 8, "steps_per_print": float("inf"), "zero_optimization": {"sub_group_size": 1e9}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert load_config(path).as_dict() == load_config(str(path)).as_dict() == load_config(content).as_dict()


def test_a_missing_or_broken_file_is_a_config_error_with_path_and_position(tmp_path: Path) -> None:
    missing, broken, array = tmp_path / "no.json", tmp_path / "broken.json", tmp_path / "array.json"
    broken.write_text('{\n  "fp16": {,\n}', encoding="utf-8")
    array.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no\.json: .*No such file"):
        load_config(missing)
    with pytest.raises(ConfigError, match=r"broken\.json: line 2, column 12"):
        load_config(broken)
    with pytest.raises(ConfigError, match=r"array\.json: expected an object"):
        load_config(array)
    with pytest.raises(ConfigError, match="got a folder"):
        load_config(tmp_path)


def test_a_key_written_twice_in_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text('{"train_batch_size": 8, "train_batch_size": 16}', encoding="utf-8")
    (line,) = problems(path)
    assert line == "train_batch_size: expected once in its block, got 2 times"


@pytest.mark.parametrize("wrong", [None, 3, ["ds.json"]])
def test_anything_but_a_path_or_a_dict_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="expected a path"):
        load_config(wrong)


# ---- numbers -----------------------------------------------------------------------------------


@given(st.integers(0, 2**53))
def test_every_form_of_a_number_reads_the_same(number: int) -> None:
    for form in (number, float(number), str(number), f" {number} ", f"{number}.0", f"{number}e0"):
        assert parse_integer(form) == parse_count(form) == parse_bytes(form) == number
    assert parse_bytes(f"{number}B") == number
    for power, letter in enumerate("KMG", start=1):
        if number * 1024**power < 2**63:
            assert (
                parse_bytes(f"{number}{letter}B") == parse_bytes(f"{number} {letter.lower()}b") == number * 1000**power
            )
            assert parse_bytes(f"{number}{letter}iB") == number * 1024**power


@given(st.integers(0, 10**9), st.integers(0, 9))
def test_a_count_is_rounded_and_a_whole_number_must_be_one(number: int, tenths: int) -> None:
    value = number + tenths / 10
    assert parse_count(value) == parse_bytes(value) == round(value)
    if tenths:
        with pytest.raises(ValueError, match="whole"):
            parse_integer(value)


def test_the_number_forms_clients_send_are_read() -> None:
    zero = {"stage3_prefetch_bucket_size": 15099494.4, "sub_group_size": 5e8, "stage3_max_live_parameters": "1e9"}
    config = load_config({"zero_optimization": zero, "memory_budget": {"host": "12GB", "device": "1.5GiB"}})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 15099494
    assert config.zero_optimization.sub_group_size == 500_000_000
    assert config.zero_optimization.stage3_max_live_parameters == 10**9
    assert (config.memory_budget.host, config.memory_budget.device) == (12 * 10**9, 3 * 2**29)


@pytest.mark.parametrize("parse", [parse_integer, parse_count, parse_bytes])
@pytest.mark.parametrize(
    "wrong", [True, False, None, -1, -0.6, "-1", "", "GB", "1 2", "12XB", "1e999999999", 2**63, 1e300,
              float("nan"), float("inf"), "nan", "inf", [1], {}, "0x10"]
)  # fmt: skip
def test_what_is_no_size_is_refused(parse: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match="number"):
        parse(wrong)


@pytest.mark.parametrize("wrong", [True, "x", None, float("nan"), float("inf"), "nan", [1], 10**400])
def test_what_is_no_finite_number_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="finite"):
        parse_number(wrong)


def test_a_budget_that_is_no_size_names_the_forms_it_may_take() -> None:
    (line,) = problems({"memory_budget": {"host": "12 gigs"}})
    assert line.startswith("memory_budget.host: ") and '"auto"' in line and '"12GB"' in line


def test_elements_have_no_unit() -> None:
    (line,) = problems({"zero_optimization": {"stage3_max_live_parameters": "1GB"}})
    assert "without a unit" in line


def test_a_block_size_becomes_whole_pages() -> None:
    assert load_config({"aio": {"block_size": "1MB"}}).aio.block_size == 999_424
    assert "at least 4096" in problems({"aio": {"block_size": 4095}})[0]


# ---- batch sizes -------------------------------------------------------------------------------

TRIPLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def triple(config: Config) -> tuple[int, int, int]:
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.sets(st.sampled_from(TRIPLE), min_size=2))
@settings(max_examples=60, deadline=None)
def test_any_two_batch_sizes_give_the_third(micro: int, steps: int, world_size: int, kept: set[str]) -> None:
    values = dict(zip(TRIPLE, (micro * steps * world_size, micro, steps), strict=True))
    config = load_config({key: values[key] for key in kept}, world_size=world_size)
    assert triple(config) == tuple(values.values())
    assert config.world_size == world_size


@given(st.integers(1, 1000), st.integers(1, 8), st.sampled_from(TRIPLE))
@settings(max_examples=60, deadline=None)
def test_one_batch_size_gives_the_others(value: int, world_size: int, key: str) -> None:
    given_value = value * world_size if key == "train_batch_size" else value
    train, micro, steps = triple(load_config({key: given_value}, world_size=world_size))
    assert train == micro * steps * world_size
    assert micro * steps == value
    assert (steps == 1) == (key != "gradient_accumulation_steps" or value == 1)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_batch_sizes_that_contradict_show_the_product(train: int, micro: int, steps: int, world_size: int) -> None:
    config = dict(zip(TRIPLE, (train, micro, steps), strict=True))
    if train == micro * steps * world_size:
        assert triple(load_config(config, world_size=world_size)) == (train, micro, steps)
        return
    (line,) = problems(config, world_size=world_size)
    assert line.startswith("train_batch_size: ") and f"expected {micro * steps * world_size} (" in line
    assert f"world_size {world_size}" in line and f"got {train}" in line
    there = "there is 1 rank" if world_size == 1 else f"there are {world_size} ranks"
    fits = train % (micro * steps) == 0
    assert (f"{there}, and the values fit {train // (micro * steps)}" in line) == fits
    assert ("they were computed before the other ranks were known" in line) == (train == micro * steps)


def test_no_batch_size_means_one_sample_per_rank() -> None:
    assert triple(load_config({}, world_size=4)) == (4, 1, 1)


@pytest.mark.parametrize("config", [{"train_batch_size": 7, "gradient_accumulation_steps": 2}, {"train_batch_size": 3}])
def test_a_batch_that_does_not_divide_is_refused(config: dict[str, int]) -> None:
    (line,) = problems(config, world_size=4)
    assert "a multiple of" in line and "world_size 4" in line


def test_a_config_is_completed_again_for_another_world_size() -> None:
    config = load_config({"train_batch_size": 8})
    assert load_config(config) is config
    assert triple(load_config(config, world_size=4)) == (8, 2, 1)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
def test_a_world_size_is_a_positive_integer(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        load_config({}, world_size=wrong)


# ---- auto, null, defaults, origins -------------------------------------------------------------


@pytest.mark.parametrize("absent", ["auto", None])
def test_auto_and_null_are_like_an_absent_key_everywhere(absent: str | None) -> None:
    for path, key in KEYS.items():
        if absent is None or not (key.means_auto or path == "memory_budget"):
            parent = path.rpartition(".")[0]
            without = load_config(nested(parent, {}))
            config = load_config(nested(path, absent))
            assert config.as_dict() == without.as_dict(), path
            assert config.origin(path) == ("default" if absent is None else "auto"), path
            assert config.inactive == ()


def test_an_auto_budget_is_told_from_an_absent_one() -> None:
    for config in (
        load_config({"memory_budget": "auto"}),
        load_config({"memory_budget": dict.fromkeys(("device", "host"), "auto")}),
    ):
        assert (config.memory_budget.device, config.memory_budget.host) == ("auto", "auto")
        assert config.origin("memory_budget.host") == "auto"
    absent = load_config({})
    assert (absent.memory_budget.device, absent.memory_budget.host) == (None, None)


def test_origins_tell_user_default_and_auto_apart() -> None:
    config = load_config({"bf16": "auto", "zero_optimization": {"prefetch_bucket_size": 5e7, "sub_group_size": "auto"}})
    assert config.origin("zero_optimization.stage3_prefetch_bucket_size") == "user"
    assert config.origin("zero_optimization.prefetch_bucket_size") == "user"
    assert config.origin("zero_optimization.sub_group_size") == "auto"
    assert config.origin("bf16.enabled") == "auto"
    assert config.origin("train_batch_size") == config.origin("aio.queue_depth") == "default"
    with pytest.raises(ConfigError, match="nearest known key is 'stage'"):
        config.origin("zero_optimization.stge")


def test_what_the_engine_derives_is_none_and_the_rest_has_a_default() -> None:
    config = load_config({})
    zero = config.zero_optimization
    assert zero.stage == 0 and zero.stage3_param_persistence_threshold == 100_000
    derived = (zero.sub_group_size, zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters,
               zero.stage3_max_reuse_distance, zero.offload_param.buffer_count, zero.offload_param.buffer_size,
               zero.offload_param.max_in_cpu, zero.offload_optimizer.buffer_count)  # fmt: skip
    assert set(derived) == {None}
    assert (zero.offload_param.device, zero.offload_optimizer.device) == ("none", "none")
    assert config.optimizer is None and config.gradient_clipping == 0.0 and not config.bf16.enabled
    assert (config.aio.block_size, config.aio.queue_depth, config.aio.thread_count) == (2 << 20, 32, 4)


def test_the_effective_config_loads_to_itself_and_is_plain_json() -> None:
    optimizer = {"type": "adamw", "params": {"betas": [0.9, 0.95]}}
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": ["/a", "/b"]}, "cpu_offload_param": True}
    config = load_config({"train_batch_size": 8, "optimizer": optimizer, "zero_optimization": offload}, world_size=2)
    effective = config.as_dict()
    assert load_config(json.loads(json.dumps(effective)), world_size=2).as_dict() == effective
    assert effective["optimizer"]["params"]["eps"] == 1e-8
    effective["optimizer"]["params"]["eps"] = 1
    assert config.as_dict()["optimizer"]["params"]["eps"] == 1e-8


# ---- roles -------------------------------------------------------------------------------------


def test_every_inert_key_in_use_is_listed_once_and_acting_ones_are_not() -> None:
    for path, key in KEYS.items():
        if key.role == "inert":
            assert load_config(nested(path, 1)).inactive == (path,)
    acting = {"gradient_clipping": 1.0, "aio": {"queue_depth": 4}, "fp16": {"enabled": False}}
    assert load_config(acting).inactive == ()


def test_knobs_that_the_device_leaves_without_effect_are_listed() -> None:
    blocks = {
        "offload_param": {"device": "none", "buffer_count": 5, "nvme_path": None},
        "offload_optimizer": {"device": "cpu", "nvme_path": "/local_nvme", "buffer_count": 4},
    }
    on_device = {"offload_optimizer": {"device": "none", "state_dtype": "bf16", "buffer_count": 4}}
    assert load_config({"zero_optimization": on_device}).inactive == (
        "zero_optimization.offload_optimizer.buffer_count",
    )
    assert set(load_config({"zero_optimization": blocks}).inactive) == {
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_optimizer.nvme_path",
    }


REFUSED = {
    "fp16.fp16_master_weights_and_grads": (True, "set it to false"),
    "amp.enabled": (True, "bf16"),
    "optimizer.type": ("OneBitAdam", "AdamW"),
    "optimizer.params.momentum": (0.9, "it belongs to Muon, SGD, RMSprop"),
    "optimizer.params.lambd": (1e-4, "it belongs to ASGD"),
    "optimizer.params.freeze_step": (100, "remove it"),
    "optimizer.params.max_grad_norm": (1.0, "gradient_clipping"),
    "data_efficiency.enabled": (True, "set it to false"),
    "compression_training.sparse_pruning.shared_parameters.enabled": (True, "set it to false"),
    "compression_training.layer_reduction.enabled": (True, "set it to false"),
    "expert_parallel.enabled": (True, "set it to false"),
    "data_types.param_dtype": ("bf16", "enable bf16"),
    "data_types.buffer_dtype": ("int8", '"fp32", "fp16" or "bf16"'),
    "sequence_parallel_size": (2, "set it to 1"),
    "tensor_parallel.autotp_size": (2, "set it to 1"),
    "inference.tensor_parallel.tp_size": (2, "set it to 1"),
    "aio.use_gds": (True, "set it to false"),
    "zero_optimization.zero_quantized_weights": (True, "set it to false"),
    "zero_optimization.zero_quantized_gradients": (True, "set it to false"),
    "zero_optimization.zero_quantized_nontrainable_weights": (True, "set it to false"),
    "zero_optimization.zero_hpz_partition_size": (8, "set it to 1"),
    "zero_optimization.mics_shard_size": (4, "set it to -1"),
    "zero_optimization.offload_optimizer.update_in_backward": (True, "this key no longer exists"),
    "zero_optimization.zenflow.topk_ratio": (0.1, "remove the block"),
    "scheduler.type": ("ReduceLROnPlateau", "yourself"),
    "sparse_attention.mode": ("fixed", "remove the block"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_would_change_the_numbers_is_refused_with_a_way_out(path: str) -> None:
    value, way_out = REFUSED[path]
    (line,) = problems(nested(path, value))
    assert line.startswith(f"{path}: expected ") and way_out in line


def test_every_refusing_key_accepts_its_own_default() -> None:
    for path, key in KEYS.items():
        if key.refused is not None and key.default is not None:
            config = load_config(nested(path, key.default))
            assert config.inactive == () and config.origin(path) == "user"


@pytest.mark.parametrize(
    "harmless",
    [
        {"fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 32, "auto_cast": True}},
        {"elasticity": {"enabled": False, "max_train_batch_size": 100}},
        {"curriculum_learning": {"enabled": False, "schedule_config": {"difficulty_step": 8}}},
        {"data_efficiency": {"enabled": False, "data_routing": {"enabled": True}}},
        {"compression_training": {"weight_quantization": {"different_groups": {"wq1": {"modules": ["a"]}}}}},
        {"sparse_attention": {"mode": "dense"}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"zero_optimization": {"mics_shard_size": -1, "zero_hpz_partition_size": 1}},
    ],
)
def test_a_refused_feature_that_is_off_is_harmless(harmless: dict[str, Any]) -> None:
    load_config(harmless)


ODD = [
    ("fp16", {"enabled": False}, {"hysteresis": 0, "loss_scale_window": -1, "initial_scale_power": 200}),
    ("fp16", {"enabled": "false"}, {"loss_scale": "-2", "min_loss_scale": -1, "fp16_master_weights_and_grads": True}),
    ("torch_autocast", {"enabled": False}, {"dtype": "float32"}),
    ("flops_profiler", {"enabled": False}, {"profile_step": 0, "top_modules": 0}),
    ("comet", {"enabled": False}, {"samples_log_interval": 0, "mode": "never", "online": []}),
]


@pytest.mark.parametrize(("path", "off", "odd"), ODD, ids=str)
def test_values_of_a_block_that_is_switched_off_are_not_looked_at(
    path: str, off: dict[str, Any], odd: dict[str, Any]
) -> None:
    plain = load_config(nested(path, off)).as_dict()
    assert load_config(nested(path, {**off, **odd})).as_dict() == plain
    assert len(problems(nested(path, {**off, **odd, "enabled": True}))) == len(odd)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hysteresys": 3}, "fp16.hysteresys: unknown key; the nearest known key is 'hysteresis'"),
        ({"enabled": "no"}, "fp16.enabled: expected true or false"),
    ],
)
def test_its_keys_have_their_names_nonetheless(wrong: dict[str, Any], said: str) -> None:
    (line,) = problems({"fp16": {"enabled": False, **wrong}})
    assert line.startswith(said)


# ---- single blocks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "decoupled"),
    [
        ({"type": "AdamW"}, True),
        ({"type": "adam"}, True),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, False),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, True),
        ({"type": "DeepSpeedCPUAdam", "params": {"adamw_mode": False, "torch_adam": True}}, False),
    ],
)
def test_the_optimizer_follows_deepspeeds_rule_for_weight_decay(block: dict[str, Any], decoupled: bool) -> None:
    optimizer = load_config({"optimizer": block}).optimizer
    assert optimizer is not None and optimizer.decoupled_weight_decay is decoupled
    assert optimizer.type in ("Adam", "AdamW")
    assert (optimizer.params.lr, optimizer.params.betas) == (1e-3, (0.9, 0.999))


def test_adam_w_mode_beside_params_may_say_what_holds_without_it() -> None:
    """Configurations of BEiT and its kin have it there, where DeepSpeed does not read it."""
    assert load_config({"optimizer": {"type": "Adam", "adam_w_mode": True, "params": {"lr": 1e-2}}}).optimizer
    (line,) = problems({"optimizer": {"type": "Adam", "adam_w_mode": False}})
    assert line.startswith("optimizer.adam_w_mode: ") and "optimizer.params" in line


def test_two_spellings_of_a_key_must_agree() -> None:
    assert load_config({"aio": {"thread_count": 2, "intra_op_parallelism": 2}}).aio.thread_count == 2
    assert load_config({"aio": {"intra_op_parallelism": 4}}).aio.thread_count == 4
    (line,) = problems({"aio": {"thread_count": 2, "intra_op_parallelism": 4}})
    assert line.startswith("aio.intra_op_parallelism: ") and "aio.thread_count" in line
    assert len(problems({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}})) == 1


def test_an_nvme_path_is_one_folder_or_several() -> None:
    for given_path, paths in (("/a", ("/a",)), (["/a", "/b"], ("/a", "/b"))):
        block = {"offload_param": {"device": "nvme", "nvme_path": given_path}}
        assert load_config({"zero_optimization": block}).zero_optimization.offload_param.nvme_path == paths
    for wrong in ([], "", ["/a", "/a"], 3, ["/a", 3]):
        block = {"offload_param": {"device": "nvme", "nvme_path": wrong}}
        assert len(problems({"zero_optimization": block})) == 1


def test_empty_offload_blocks_keep_everything_on_the_device() -> None:
    for empty in (None, {}, {"device": "none", "nvme_path": None}, {"device": "auto"}):
        zero = load_config(
            {"zero_optimization": {"offload_param": empty, "offload_optimizer": empty}}
        ).zero_optimization
        assert (zero.offload_param.device, zero.offload_optimizer.device) == ("none", "none")


def test_deprecated_offload_switches_are_translated_and_noted() -> None:
    old = {"cpu_offload": True, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False}
    config = load_config({"zero_optimization": old})
    zero = config.zero_optimization
    assert (zero.offload_optimizer.device, zero.offload_param.device) == ("cpu", "cpu")
    assert not zero.offload_optimizer.pin_memory and not wants_pinning(config)
    assert len(config.deprecated) == 3 and config.deprecated[0].startswith("zero_optimization.cpu_offload: ")
    both = {"cpu_offload": True, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}
    (line,) = problems({"zero_optimization": both})
    assert line.startswith("zero_optimization.cpu_offload: ")


def test_a_folder_with_two_names_is_one_folder(tmp_path: Path) -> None:
    """Its snapshots would lock themselves out."""
    (tmp_path / "link").symlink_to(tmp_path)
    names = [str(tmp_path), f"{tmp_path}/", str(tmp_path / "link"), str(tmp_path / "other")]
    block = {"device": "nvme", "nvme_path": names}
    zero = {"offload_param": block, "offload_optimizer": {**block, "nvme_path": names[1]}}
    assert swap_paths(load_config({"zero_optimization": zero})) == [names[0], names[3]]


def test_an_endless_print_interval_means_never() -> None:
    for never in (float("inf"), None, "auto", "Infinity"):
        assert load_config({"steps_per_print": never}).steps_per_print is None
    assert load_config({"steps_per_print": 2000}).steps_per_print == 2000
    assert "at least 1" in problems({"steps_per_print": 0})[0]


def test_an_empty_sub_group_is_left_to_the_engine() -> None:
    assert load_config({"zero_optimization": {"sub_group_size": 0}}).zero_optimization.sub_group_size is None


# ---- the real world ----------------------------------------------------------------------------

FP16_AUTO = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
             "hysteresis": 2, "min_loss_scale": 1}  # fmt: skip
BATCH_AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
              "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}  # fmt: skip
ADAMW_AUTO = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
STAGE3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
          "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
          "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
          "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
REAL = {
    "transformers_cpu": {
        **BATCH_AUTO, "fp16": FP16_AUTO, "bf16": {"enabled": "auto"}, "optimizer": ADAMW_AUTO,
        "zero_optimization": {**STAGE3, "offload_param": CPU, "offload_optimizer": CPU},
        "steps_per_print": 2000, "wall_clock_breakdown": False,
    },
    "transformers_nvme": {
        **BATCH_AUTO, "bf16": {"enabled": True}, "optimizer": ADAMW_AUTO,
        "zero_optimization": {
            **STAGE3,
            "offload_optimizer": {**NVME, "buffer_count": 4, "fast_init": False},
            "offload_param": {**NVME, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
        },
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False,
                "overlap_events": True},
    },
    "transformers_filled": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0, "bf16": {"enabled": True}, "fp16": {"enabled": False},
        "zero_optimization": {**STAGE3, "reduce_bucket_size": 1048576, "stage3_prefetch_bucket_size": 943718.4,
                              "stage3_param_persistence_threshold": 10240},
        "checkpoint": {"use_node_local_storage": False}, "zero_allow_untested_optimizer": True,
    },
    "accelerate_plugin": {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0, "steps_per_print": float("inf"), "bf16": {"enabled": True},
        "fp16": {"enabled": False, "auto_cast": True},
    },
    "axolotl": {
        **BATCH_AUTO, "bf16": {"enabled": True}, "fp16": {**FP16_AUTO, "auto_cast": False},
        "zero_optimization": {**STAGE3, "sub_group_size": 0, "stage3_max_live_parameters": 0,
                              "stage3_max_reuse_distance": 0, "offload_param": CPU, "offload_optimizer": CPU},
        "wall_clock_breakdown": False,
    },
    "trl_reference_model": {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {**STAGE3, "stage3_max_live_parameters": "auto"},
        "zero_optimization.reduce_bucket_size": 1024, "zero_optimization.stage3_prefetch_bucket_size": 921.6,
        "zero_optimization.stage3_param_persistence_threshold": 320,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_configs_of_the_real_world_load_and_stay_untouched(name: str) -> None:
    before = copy.deepcopy(REAL[name])
    with tolerating_unknown_keys():
        config = load_config(REAL[name])
    assert REAL[name] == before
    assert config.zero_optimization.stage == 3
    gathers = REAL[name]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
    assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save is gathers
    assert len(set(config.inactive)) == len(config.inactive)


def test_the_values_of_a_real_nvme_config_arrive() -> None:
    config = load_config(REAL["transformers_nvme"])
    param, states = config.zero_optimization.offload_param, config.zero_optimization.offload_optimizer
    assert (param.device, param.nvme_path, param.buffer_count) == ("nvme", ("/local_nvme",), 5)
    assert (param.buffer_size, param.max_in_cpu, states.buffer_count) == (10**8, 10**9, 4)
    assert (config.aio.block_size, config.aio.queue_depth) == (262144, 32)
    assert config.optimizer is not None and config.optimizer.params.weight_decay == 0.0


# ---- immutability ------------------------------------------------------------------------------


def test_a_config_cannot_be_changed() -> None:
    config = load_config({"optimizer": {"type": "Adam"}})
    assert config.optimizer is not None
    for block, name in (
        (config, "train_batch_size"),
        (config.zero_optimization, "stage"),
        (config.optimizer.params, "lr"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(block, name, 2)
    with pytest.raises(ValidationError):
        config.novel = 1  # type: ignore[attr-defined]


def test_changing_the_dict_later_does_not_change_the_config() -> None:
    tuning = {"arg_mappings": {"a": "--a"}}
    given_dict: dict[str, Any] = {"autotuning": tuning, "zero_optimization": {"sub_group_size": 8}}
    config = load_config(given_dict)
    before = config.as_dict()
    given_dict["autotuning"]["arg_mappings"]["a"] = "--b"
    given_dict["zero_optimization"]["sub_group_size"] = 16
    assert config.as_dict() == before and load_config(config, world_size=2).zero_optimization.sub_group_size == 8
