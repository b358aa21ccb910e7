"""What "auto" becomes once the model is known, and that each value is said once."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zero
from offload.errors import ConfigError
from zero.config import Config, load_config
from zero.config.auto_values import Facts, auto_lines, hidden_size_of, read_facts, resolve_auto

HIDDEN_KEYS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def zero_config(stage: int, *keys: str) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **dict.fromkeys(keys, "auto")}}


def sized(**attributes: Any) -> nn.Module:
    model = nn.Linear(4, 4)
    model.config = SimpleNamespace(**attributes)  # type: ignore[assignment]
    return model


@given(st.integers(1, 20_000))
def test_bucket_sizes_follow_from_the_hidden_size_as_transformers_derives_them(hidden: int) -> None:
    zero = resolve_auto(load_config(zero_config(3, *HIDDEN_KEYS)), Facts(hidden_numel=hidden)).zero_optimization
    assert zero.reduce_bucket_size == hidden * hidden
    assert zero.stage3_prefetch_bucket_size == int(0.9 * hidden * hidden)
    assert zero.stage3_param_persistence_threshold == 10 * hidden


@pytest.mark.parametrize(
    ("attributes", "hidden"),
    [
        ({"hidden_size": 64}, 64),
        ({"hidden_sizes": [32, 96, 64]}, 96),
        ({"text_config": SimpleNamespace(hidden_size=48)}, 48),
        ({"text_config": SimpleNamespace(hidden_sizes=(48, 12))}, 48),
        ({"hidden_size": 8, "hidden_sizes": [16], "text_config": SimpleNamespace(hidden_size=32)}, 8),
        ({"hidden_size": None, "text_config": None}, None),
        ({}, None),
    ],
)
def test_the_hidden_size_is_found_where_transformers_looks(attributes: dict[str, Any], hidden: int | None) -> None:
    assert hidden_size_of(SimpleNamespace(**attributes)) == hidden
    assert read_facts(sized(**attributes)).hidden_numel == hidden


def test_without_a_hidden_size_bucket_sizes_are_as_without_the_keys() -> None:
    plain = resolve_auto(load_config(zero_config(3, *HIDDEN_KEYS)), read_facts(nn.Linear(4, 4)))
    assert plain.as_dict() == load_config(zero_config(3)).as_dict()


def test_keys_of_stage_3_are_left_alone_below_it() -> None:
    config = resolve_auto(load_config(zero_config(2, *HIDDEN_KEYS)), Facts(hidden_numel=64))
    assert config.zero_optimization.reduce_bucket_size == 4096
    default = load_config({}).zero_optimization
    assert config.zero_optimization.stage3_prefetch_bucket_size == default.stage3_prefetch_bucket_size
    assert config.zero_optimization.stage3_param_persistence_threshold == default.stage3_param_persistence_threshold


@pytest.mark.parametrize("given_keys", [("bf16",), ("fp16",), ("bf16", "fp16")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_precision_is_that_of_the_model(dtype: torch.dtype, given_keys: tuple[str, ...]) -> None:
    model = nn.Linear(4, 4, dtype=dtype)
    config = load_config({key: {"enabled": "auto"} for key in given_keys})
    resolved = resolve_auto(config, read_facts(model))
    assert resolved.bf16.enabled is (dtype == torch.bfloat16 and "bf16" in given_keys)
    assert resolved.fp16.enabled is (dtype == torch.float16 and "fp16" in given_keys)
    assert all(resolved.origin(f"{key}.enabled") == "auto" for key in given_keys)


def test_a_precision_that_the_user_chose_leaves_the_other_off() -> None:
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    resolved = resolve_auto(load_config({"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}), read_facts(model))
    assert resolved.fp16.enabled and not resolved.bf16.enabled


def test_the_dtype_of_trained_parameters_counts_before_that_of_frozen_ones() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(4, 4, dtype=torch.bfloat16))
    assert read_facts(model).dtype == torch.float32
    model[0].requires_grad_(False)
    assert read_facts(model).dtype == torch.bfloat16
    assert read_facts(nn.ReLU()).dtype is None


def test_values_that_were_chosen_stay_when_the_number_of_ranks_changes() -> None:
    content = {**zero_config(3, *HIDDEN_KEYS), "train_batch_size": 8, "gradient_accumulation_steps": "auto"}
    resolved = resolve_auto(load_config(content), Facts(hidden_numel=64))
    again = load_config(resolved, world_size=2)
    assert again.zero_optimization == resolved.zero_optimization
    assert again.train_micro_batch_size_per_gpu == 4
    assert again.origin("zero_optimization.reduce_bucket_size") == "auto"


def test_a_configuration_without_auto_is_not_touched() -> None:
    config = load_config({"train_batch_size": 8})
    assert resolve_auto(config, Facts(hidden_numel=64, dtype=torch.bfloat16)) is config
    assert list(auto_lines(config)) == []


# ---- what is said ------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "zero_optimization": {"stage": 3, **dict.fromkeys((*HIDDEN_KEYS, "sub_group_size"), "auto")},
}


def leaves(config: Config) -> set[str]:
    return {path for path, origin in config.origins.items() if origin == "auto"}


def test_initialize_says_every_value_once_and_changes_no_dict(caplog: pytest.LogCaptureFixture) -> None:
    before = copy.deepcopy(EVERYTHING)
    with caplog.at_level(logging.INFO, logger="zero"):
        engine, *_ = zero.initialize(model=sized(hidden_size=8).bfloat16(), config=EVERYTHING)
        engine.destroy()
    assert before == EVERYTHING
    said = [message for record in caplog.records if (message := record.getMessage()).startswith("auto: ")]
    paths = [line.split()[1] for line in said]
    assert len(set(paths)) == len(paths)
    assert set(paths) == leaves(load_config(EVERYTHING))
    lines = dict(zip(paths, said, strict=True))
    assert "= true (from the model, which is bfloat16)" in lines["bf16.enabled"]
    assert "= 80 (from 10 x h, hidden size 8)" in lines["zero_optimization.stage3_param_persistence_threshold"]
    assert "= 0.001 (the default)" in lines["optimizer.params.lr"]
    assert "= 1.0 (from DeepSpeed's default)" in lines["gradient_clipping"]
    assert "= 2 (from 2 samples = 2 x 1 x 1 rank)" in lines["train_batch_size"]


def test_an_auto_that_the_engine_derives_later_is_said_to_be_left_to_it() -> None:
    lines = list(auto_lines(load_config({**zero_config(3, "sub_group_size"), "memory_budget": {"host": "auto"}})))
    assert len(lines) == 2
    assert any("sub_group_size is left to the engine" in line for line in lines)
    assert any("memory_budget.host is the memory that is free" in line for line in lines)
    (line,) = auto_lines(load_config(zero_config(3, "shared_host_memory")))
    assert line.endswith('shared_host_memory = "auto" (the default)')


# ---- schedules ---------------------------------------------------------------------------------

WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")


def scheduled(kind: str, *keys: str) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": kind, "params": dict.fromkeys(keys, "auto")},
    }


def chosen_by(content: dict[str, Any], facts: Facts) -> dict[str, Any]:
    config = resolve_auto(load_config(content), facts)
    return {path.rpartition(".")[2]: choice.value for path, choice in config.auto_values.items()}


@given(st.integers(1, 10**6), st.booleans())
def test_the_length_of_a_schedule_is_one_pass_over_the_data(samples: int, drop_last: bool) -> None:
    content = {**scheduled("WarmupDecayLR", *WARMUP, "total_num_steps"), "dataloader_drop_last": drop_last}
    chosen = chosen_by(content, Facts(samples=samples))
    steps = max(1, samples // 4 if drop_last else -(-samples // 4))
    assert chosen["total_num_steps"] == steps
    assert chosen["warmup_num_steps"] == min(1000, max(1, steps // 10))
    assert (chosen["warmup_min_lr"], chosen["warmup_max_lr"]) == (0.0, 0.5)


def test_the_largest_rate_is_that_of_the_optimizer_that_is_handed_over() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.25)
    facts = read_facts(nn.Linear(2, 2), optimizer, [1, 2, 3])
    assert (facts.learning_rate, facts.samples) == (0.25, 3)
    assert chosen_by(scheduled("WarmupLR", *WARMUP), facts)["warmup_max_lr"] == 0.25


def test_a_schedule_without_end_and_without_data_warms_up_as_deepspeeds_does() -> None:
    assert chosen_by(scheduled("WarmupLR", *WARMUP), Facts())["warmup_num_steps"] == 1000


def test_only_what_a_schedule_takes_is_chosen() -> None:
    chosen = chosen_by(scheduled("WarmupCosineLR", "warmup_num_steps", "total_num_steps"), Facts(samples=40))
    assert set(chosen) == {"warmup_num_steps", "total_num_steps"}


def test_an_unknown_length_is_an_error_only_when_the_schedule_is_made() -> None:
    content = scheduled("WarmupDecayLR", *WARMUP, "total_num_steps")
    assert load_config(content).scheduler is not None
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps.*training_data"):
        zero.initialize(model=nn.Linear(4, 4), config=content)
    engine, *_ = zero.initialize(model=nn.Linear(4, 4), config=content, training_data=[torch.ones(4)] * 8)
    assert engine.lr_scheduler is not None
    engine.destroy()
