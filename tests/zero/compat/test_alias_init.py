"""`deepspeed.zero.Init` and `unwrap_model_for_generation`, in this process: parameters that stay in memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens
from reference import differences
from torch import nn

import zero
from offload.errors import ConfigError, StateError
from zero.compat.helpers import unwrap_model_for_generation
from zero.compat.partition_parameters import Init, MiCS_Init, ZeroParamStatus
from zero.compat.to_fp32 import load_state_dict_from_zero_checkpoint
from zero.params.released_parameter import is_managed
from zero.utils import safe_set_full_fp32_param

Open = Callable[..., Any]
NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_persist")


def shows(parameter: Any) -> bool:
    return (
        all(hasattr(parameter, name) for name in NAMES)
        and (parameter.ds_shape, parameter.ds_numel) == (parameter.shape, parameter.numel())
        and parameter.ds_status is ZeroParamStatus.AVAILABLE
    )


@pytest.mark.parametrize("kind", [Init, MiCS_Init])
def test_parameters_have_the_attributes_as_soon_as_their_module_is_made(kind: Any) -> None:
    with kind():
        layer = nn.Linear(4, 3)
        assert shows(layer.weight) and shows(layer.bias)
        with kind():
            inner: Any = build("gpt")
        assert all(shows(p) for p in inner.parameters())
    outside = nn.Linear(4, 3)
    assert shows(layer.weight) and not any(hasattr(outside.weight, name) for name in NAMES)
    assert not any(is_managed(p) for p in inner.parameters()), "they are in memory, where torch has them"
    with torch.no_grad():
        layer.weight.fill_(2.0)
    assert torch.equal(layer(torch.ones(1, 4)), 8.0 + layer.bias[None])


def test_what_is_disabled_or_empty_or_a_copy_has_none() -> None:
    with Init(enabled=False):
        disabled = nn.Linear(4, 3)
    with Init():
        layer = nn.Linear(4, 3)
        empty = nn.Linear(4, 0)
    copied, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    for parameter in (disabled.weight, empty.weight, copied.weight, pickled.weight):
        assert not any(hasattr(parameter, name) for name in NAMES)
    assert torch.equal(copied.weight, layer.weight) and torch.equal(pickled.weight, layer.weight)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_goes_on_with_them(open_engine: Open, nvme_path: Path, stage: int) -> None:
    config = make_config(("none", "cpu"), nvme_path, zero={"stage": stage})
    with Init(config_dict_or_path=config):
        model = build("gpt")
    ids = [p.ds_id for p in model.parameters()]  # type: ignore[union-attr]
    engine, plain = open_engine(model, config), open_engine(build("gpt"), config)
    for each in (engine, plain):
        each.backward(each(tokens(0)))
        each.step()
    assert [getattr(p, "ds_id", None) for p in model.parameters()] == (ids if stage == 3 else [None] * len(ids))
    assert differences(dict(engine.named_full_parameters()), dict(plain.named_full_parameters())) == []


def test_a_gather_of_them_keeps_what_each_rank_has_made() -> None:
    with Init():
        layer = nn.Linear(4, 3)
    for modifier_rank in (None, 0):
        with zero.GatheredParameters(layer.parameters(), modifier_rank=modifier_rank), torch.no_grad():
            layer.weight.add_(1.0)
    assert shows(layer.weight) and not is_managed(layer.weight)


def test_unwrapping_takes_the_hooks_off_and_puts_them_back(open_engine: Open, nvme_path: Path) -> None:
    engine, left = (open_engine(build("gpt"), make_config(("nvme", "nvme"), nvme_path)) for _ in range(2))
    expected = engine(tokens(0)).detach()
    with unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
        assert unwrapped.parameter_offload.forward_hooks == []
        gathers = engine.statistics().gathers
        assert torch.equal(unwrapped.module(tokens(0)), expected)
        assert engine.statistics().gathers == gathers, "no hook has fetched anything"
    assert engine.parameter_offload.forward_hooks
    for each in (engine, left):
        each.backward(each(tokens(1)))
        each.step()
    assert differences(dict(engine.named_full_parameters()), dict(left.named_full_parameters())) == []


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_is_loaded_into_an_engines_model_which_closes_the_engine(
    open_engine: Open, nvme_path: Path, tmp_path: Path, stage: int, gathered: bool
) -> None:
    engine = open_engine(build("gpt"), make_config(("none", "cpu"), nvme_path, zero={"stage": stage}))
    for index in range(3):
        engine.backward(engine(tokens(index)))
        engine.step()
        if index == 1:
            master = engine.full_master("head.weight")
            master.view(-1)[:2] = torch.tensor([1.0, -3.0]) * (1 + 2**-8)  # between two bf16 numbers
            safe_set_full_fp32_param(engine.module.head.weight, master)
            engine.save_checkpoint(tmp_path)
            saved = {name: value.clone() for name, value in engine.named_full_parameters()}
    with pytest.raises(ConfigError, match="no_such"):
        load_state_dict_from_zero_checkpoint(engine.module, tmp_path, "no_such")
    assert is_managed(engine.module.head.weight)
    with zero.GatheredParameters(engine.module.parameters(), enabled=gathered):
        model = load_state_dict_from_zero_checkpoint(engine.module, tmp_path)
    assert model is engine.module and not any(is_managed(p) for p in model.parameters())
    assert differences({name: p.detach() for name, p in model.named_parameters()}, saved) == []
    with pytest.raises(StateError, match="closed"):
        engine.step()
    engine.destroy()
