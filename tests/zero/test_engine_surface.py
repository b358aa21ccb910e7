"""What clients of DeepSpeed do with an engine, its optimizer, its parameters and `zero.Init`, besides training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import train
from models import ADAMW, build, tokens
from on_tiers import config_of, equal, masters, on_every_tier
from torch import nn

import zero
from offload.errors import ConfigError, StateError
from zero.config import load_config
from zero.config.sources import user_config
from zero.params.released_parameter import ReleasedParameter, ZeroParamStatus

Open = Callable[..., Any]


# ---- the group of one rank --------------------------------------------------------------------


def test_who_makes_an_engine_can_use_torch_distributed_right_after_and_end_it(
    open_engine: Open, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if dist.is_initialized():
        dist.destroy_process_group()
    open_engine(build("gpt"), config_of("cpu", nvme_path), dist_init_required=False)
    assert not dist.is_initialized()
    for _ in range(2):
        engine = open_engine(build("gpt"), config_of("cpu", nvme_path))
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1.0] * 3
        dist.destroy_process_group()
        train(engine, 0)  # an engine alone needs no group
    zero.init_distributed(verbose=False)
    assert dist.get_world_size() == 1


# ---- what is asked and set --------------------------------------------------------------------


def test_the_config_is_the_dict_that_was_given_and_nobody_changes_it(open_engine: Open, nvme_path: Path) -> None:
    given = config_of("cpu", nvme_path)
    before = copy.deepcopy(given)
    engine = train(open_engine(build("gpt"), given), 0)
    assert given == before and engine.config == before
    assert engine.config.get("zero_optimization", {}).get("stage") == 3
    engine.config["zero_optimization"]["stage"] = 0
    assert given == before and engine.zero_optimization_stage() == 3


def test_the_config_of_an_engine_has_values_for_auto_and_always_the_stage() -> None:
    content: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "bfloat16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {
            "offload_param": {"device": "cpu"},
            "sub_group_size": "auto",
            "allgather_bucket_size": 5e8,
        },
        "_comment": "auto",
    }
    assert user_config(load_config(content, world_size=4)) == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "bfloat16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}},
        "zero_optimization": {
            "offload_param": {"device": "cpu"},
            "sub_group_size": "auto",  # the plan's
            "allgather_bucket_size": 5e8,
            "stage": 3,
        },
        "_comment": "auto",
    }
    for content, stage in (({}, 0), ({"zero_optimization": True}, 1), ({"zero_optimization": {"stage": "2"}}, 2)):
        assert user_config(load_config(content)) == {"zero_optimization": {"stage": stage}}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_a_tier_of_weights_has_no_effect(
    open_engine: Open, nvme_path: Path, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of("device", nvme_path)
    config["zero_optimization"] = {"stage": stage}
    expected = masters(train(open_engine(build("gpt"), config), 0, 1))
    folder = nvme_path / "never_made"
    config["zero_optimization"] = {"stage": stage, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}
    with caplog.at_level("INFO", "zero"):
        engine = open_engine(build("gpt"), config)
    assert equal(masters(train(engine, 0, 1)), expected)
    assert not folder.exists()
    assert "zero_optimization.offload_param.device" in caplog.text


def test_unknown_names_are_the_models_or_attribute_errors(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of("device", nvme_path))
    assert engine.trunk == engine.module.trunk
    assert not hasattr(engine, "_hf_hook")


def test_batch_sizes_change_as_in_deepspeed(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of("cpu", nvme_path, accumulation=2))
    assert engine.get_batch_info() == (4, 2, 2)
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    engine.set_train_micro_batch_size(1)
    assert engine.get_batch_info() == (3, 1, 3)
    engine.set_gradient_accumulation_steps(1)
    assert engine.get_batch_info() == (1, 1, 1)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        engine.set_train_micro_batch_size(0)
    engine.set_train_micro_batch_size(2)
    with pytest.raises(ConfigError, match="expected a multiple of 2"):
        engine.set_train_batch_size(3)


def test_a_changed_accumulation_is_followed(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of("nvme", nvme_path))
    other = open_engine(build("gpt"), config_of("nvme", nvme_path, accumulation=2))
    engine.set_gradient_accumulation_steps(2)
    for trainer in (engine, other):
        train(trainer, 0, 1)
        assert (trainer.global_steps, trainer.global_samples, trainer.micro_steps) == (1, 4, 2)
    assert equal(masters(engine), masters(other))


def test_learning_rates_and_momenta_of_groups(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of("cpu", nvme_path))
    assert [list(mom) for mom in engine.get_mom()] == [[0.9, 0.95]]
    engine.set_lr(0.125)
    assert engine.get_lr() == [0.125] == [group["lr"] for group in engine.optimizer.param_groups]


@on_every_tier
def test_plain_torch_calls_train_as_the_engines_do(open_engine: Open, nvme_path: Path, tier: str) -> None:
    """`loss.backward(); optimizer.step()`, with two backwards a step and without."""
    ours, theirs = (open_engine(build("gpt"), config_of(tier, nvme_path)) for _ in range(2))
    for step in range(3):
        for part in range(1 + step % 2):
            (ours(tokens(2 * step + part))).backward()
            theirs.set_gradient_accumulation_boundary(part == step % 2)
            theirs.backward(theirs(tokens(2 * step + part)))
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        theirs.step()
    assert equal(masters(ours), masters(theirs))
    assert ours.global_steps == theirs.global_steps == 3


@on_every_tier
def test_emptying_the_cache_changes_no_number(open_engine: Open, nvme_path: Path, tier: str) -> None:
    ours, theirs = (open_engine(build("gpt"), config_of(tier, nvme_path)) for _ in range(2))
    for index in range(2):
        train(ours, index).empty_partition_cache()
        with torch.no_grad():
            ours(tokens(7))
        ours.empty_partition_cache()
        train(theirs, index)
    assert equal(masters(ours), masters(theirs))
    ours.destroy()
    ours.destroy()
    with pytest.raises(StateError, match="closed"):
        ours.empty_partition_cache()


def test_the_engine_compiles_its_model(open_engine: Open, nvme_path: Path) -> None:
    engine = open_engine(build("gpt"), config_of("cpu", nvme_path, bf16=False))
    assert not engine.is_compiled
    with pytest.raises(ConfigError, match="DeepCompile"):
        engine.compile(schedule=[(0, [])])
    engine.compile(backend="eager")
    assert engine.is_compiled
    with torch.no_grad():
        torch.testing.assert_close(engine(tokens(0)), build("gpt")(tokens(0)))


# ---- engines that follow each other -------------------------------------------------------------


@on_every_tier
def test_a_model_that_was_evaluated_by_an_engine_is_trained_by_the_next(
    open_engine: Open, nvme_path: Path, tier: str
) -> None:
    """An engine without an optimizer first, as TRL makes one for reference values, and nobody closes it.

    It keeps no fp32 values beside its bf16 weights, as DeepSpeed's does not: training starts from those.
    """
    model = build("gpt")
    first = open_engine(model, config_of(tier, nvme_path, optimizer={}))
    first.eval()
    with torch.no_grad():
        before = first(tokens(0))
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    second = open_engine(model, config_of(tier, nvme_path))
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    second.eval()
    with torch.no_grad():
        assert torch.equal(second(tokens(0)), before)
    second.train()
    rounded = build("gpt").bfloat16().float()
    fresh = open_engine(rounded, config_of(tier, nvme_path))
    assert equal(masters(train(second, 0, 1)), masters(train(fresh, 0, 1)))


def test_engines_that_are_dropped_leave_room_for_others(nvme_path: Path) -> None:
    for index in range(6):
        engine = zero.initialize(model=build("gpt"), config=config_of("nvme", nvme_path))[0]
        train(engine, index)
    engine.destroy()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_initialize_inside_an_open_init_trains_as_outside(open_engine: Open, nvme_path: Path, tier: str) -> None:
    config = config_of(tier, nvme_path, zero={"stage3_max_live_parameters": 52_000})
    constructor, apply = nn.Linear.__init__, nn.Module.apply
    with zero.Init(config_dict_or_path=config):
        inside = build("gpt")
        engine = open_engine(inside, config)
        losses = [train(engine, index)(tokens(index)).item() for index in range(2)]
        later = nn.Linear(3, 3)
    assert (nn.Linear.__init__, nn.Module.apply) == (constructor, apply)
    assert isinstance(later.weight, ReleasedParameter) == (tier == "nvme")
    other = open_engine(build("gpt"), config)
    assert losses == [train(other, index)(tokens(index)).item() for index in range(2)]


@pytest.mark.parametrize(
    "batch",
    [
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
        {},
    ],
    ids=["auto", "contradicting placeholders", "none"],
)
def test_init_needs_no_batch_sizes(nvme_path: Path, batch: dict[str, Any]) -> None:
    config = config_of("nvme", nvme_path)
    del config["train_micro_batch_size_per_gpu"]
    with zero.Init(config_dict_or_path={**config, **batch}):
        layer = nn.Linear(8, 8)
    assert layer.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE


# ---- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_stage_3_parameters_say_that_they_are_to_be_gathered(
    open_engine: Open, nvme_path: Path, stage: int
) -> None:
    model = build("lora")  # a frozen base with adapters
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    engine = train(open_engine(model, config_of("device", nvme_path, zero={"stage": stage})), 0)
    for name, parameter in engine.module.named_parameters():
        for attribute in ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_active_sub_modules"):
            assert hasattr(parameter, attribute) == (stage == 3), (name, attribute)
        assert parameter._is_hf_initialized
        if stage == 3:
            assert parameter.ds_numel == parameter.numel() == parameter.ds_shape.numel()
            parameter.ds_active_sub_modules.clear()
        else:
            assert torch.isfinite(parameter).all()  # nobody has to gather it
    assert hasattr(engine.optimizer, "parameter_offload") == (stage == 3)


@on_every_tier
def test_status_says_where_values_are(open_engine: Open, nvme_path: Path, tier: str) -> None:
    engine = train(open_engine(build("gpt"), config_of(tier, nvme_path)), 0)
    away, here = ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE
    seen = []
    weight = engine.module.blocks[0].up.weight
    engine.module.blocks[0].up.register_forward_pre_hook(lambda module, args: seen.append(weight.ds_status))
    assert weight.ds_status == away
    engine(tokens(1))
    assert seen == [here] and weight.ds_status == away
    with zero.GatheredParameters([weight]):
        assert weight.ds_status == here
    assert weight.ds_status == away


@on_every_tier
def test_gathering_takes_whatever_clients_give_it(open_engine: Open, nvme_path: Path, tier: str) -> None:
    engine = open_engine(build("gpt"), config_of(tier, nvme_path))
    weight, foreign = engine.module.head.weight, nn.Parameter(torch.ones(2))
    value = engine.full_parameter("head.weight")
    for given in (weight, [weight, weight], (p for p in engine.parameters()), [weight, foreign], [], None):
        with zero.GatheredParameters(given if given is not None else [foreign]):
            if given is not None and given != []:
                assert torch.equal(weight, value)
    with zero.GatheredParameters([weight], modifier_rank=None, fwd_module=engine.module, enabled=False):
        assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with zero.GatheredParameters([weight]):
        with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.add_(1)
        assert weight.ds_status == ZeroParamStatus.AVAILABLE  # the outer one still holds it
        copied = copy.deepcopy(engine.module.head)
    assert torch.equal(engine.full_parameter("head.weight"), value + 1)
    assert type(copied.weight) is nn.Parameter and torch.equal(copied.weight, value + 1)
    assert not hasattr(copied.weight, "ds_id")
    assert torch.equal(copied(torch.eye(32, dtype=value.dtype)).T, value + 1)  # no hook of the engine came along


@on_every_tier
def test_a_parameter_may_be_replaced_inside_gathering(open_engine: Open, nvme_path: Path, tier: str) -> None:
    """As resize_token_embeddings does: another module's parameter takes its place."""
    engine = train(open_engine(build("gpt"), config_of(tier, nvme_path, bf16=False)), 0)
    model = engine.module
    old = model.embedding.weight
    with zero.GatheredParameters([old], modifier_rank=0):
        wider = nn.Embedding(80, 32)
        with torch.no_grad():
            wider.weight[:64] = old
        model.embedding.weight = wider.weight
        rows = old.detach().clone()
    train(engine, 1)
    changed = engine.full_parameter("embedding.weight")
    assert changed.shape == (80, 32)
    unused = [row for row in range(64) if row not in tokens(1)]
    decayed = (rows - changed[:64])[unused].abs().max()  # rows that no token looks up: weight decay alone moves them
    assert 0 < decayed <= ADAMW["lr"] * ADAMW["weight_decay"] * rows.abs().max() * 1.001


@pytest.mark.parametrize("keys", [{"stage": 2}, {"stage": 3}, {"stage3_param_persistence_threshold": 10**9}], ids=str)
@on_every_tier
def test_a_parameter_made_of_anothers_memory_trains_as_one_that_is_a_copy(
    open_engine: Open, nvme_path: Path, tier: str, keys: dict[str, Any]
) -> None:
    """As torch's weight_norm makes one."""

    def trained(take: Callable[[nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
        engine = train(open_engine(build("gpt"), config_of(tier, nvme_path, zero=keys)), 0)
        head = engine.module.head
        with zero.GatheredParameters([head.weight]):
            head.weight = nn.Parameter(take(head.weight))
        found = masters(train(engine, 1, 2))
        engine.close()
        return found

    expected = trained(lambda weight: weight.detach().clone())
    assert expected["head.weight"].isfinite().all()
    assert equal(trained(lambda weight: weight.data), expected)
