"""Hooks that clients take off to generate and put back, on an engine that trains and on one that does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train
from models import GPT, build, tokens
from on_tiers import config_of, equal, masters, on_every_tier
from torch import Tensor

import zero
from offload.errors import StateError
from zero.compat.engine_names import add_deepspeed_names

Open = Callable[..., Any]


def generate(model: GPT, length: int = 6) -> Tensor:
    """Greedy tokens."""
    found = tokens(3)
    with torch.no_grad():
        for _ in range(length):
            logits = model.head(model.trunk(found[:, -8:]))
            found = torch.cat([found, logits[:, -1:].argmax(-1)], 1)
    return found


def generate_without_hooks(engine: Any) -> Tensor:
    """The calls of TRL's unwrap_model_for_generation."""
    handle = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    with zero.GatheredParameters(engine.parameters()):
        external = handle.module.ds_external_parameters()
        for _, parameter in itertools.chain(handle.module.named_parameters(recurse=True), external):
            parameter.ds_active_sub_modules.clear()
        for hook in (*handle.forward_hooks, *handle.backward_hooks):
            hook.remove()
        handle.forward_hooks, handle.backward_hooks = [], []
        ours = [m for m in engine.module.modules() if m._forward_hooks or m._forward_pre_hooks]
        assert not ours and type(engine.module.head._parameters) is dict
        found = generate(engine.module)
        if not handle.param_coordinator.is_invalid_trace():
            handle.param_coordinator._invalidate_trace()
        handle._register_deepspeed_module(handle.module)
    return found


@on_every_tier
def test_generation_with_hooks_taken_off_is_plain_and_training_goes_on(
    open_engine: Open, nvme_path: Path, tier: str
) -> None:
    ours, theirs = (open_engine(build("gpt"), config_of(tier, nvme_path)) for _ in range(2))
    for index in range(3):
        train(ours, index)
        train(theirs, index)
        plain = build("gpt").bfloat16()
        plain.load_state_dict(dict(theirs.named_full_parameters()))
        assert torch.equal(generate_without_hooks(ours), generate(plain))
    assert equal(masters(ours), masters(theirs))
    ours.destroy()
    ours.optimizer.parameter_offload._register_deepspeed_module(ours.module)  # too late: nothing comes back
    assert not any(module._forward_hooks for module in ours.module.modules())


@pytest.mark.parametrize("stage", (2, 3))
def test_behind_the_alias_an_engine_that_trains_nothing_has_the_handle_for_an_optimizer(
    open_engine: Open, nvme_path: Path, stage: int
) -> None:
    """At stage 3, as DeepSpeed's; and nothing of it steps."""
    engine = open_engine(build("gpt"), config_of("device", nvme_path, zero={"stage": stage}, optimizer={}))
    assert engine.optimizer is None
    add_deepspeed_names(engine)
    assert engine.optimizer is (engine.parameter_offload if stage == 3 else None)
    if stage == 3:
        plain = build("gpt").bfloat16()
        plain.load_state_dict(dict(engine.named_full_parameters()))
        assert torch.equal(generate_without_hooks(engine), generate(plain))
    with pytest.raises(StateError, match="without an optimizer"):
        engine.step()
