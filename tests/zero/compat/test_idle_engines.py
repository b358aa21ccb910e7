"""Under the alias engines that train nothing take what clients leave in their configs for them, as DeepSpeed does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offload.errors import ConfigError
from zero.compat.initialize_for_clients import initialize

OFFLOADED = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
"""What older TRL makes of a trainer's stage 2 for its reference model."""


def config(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": 1, "zero_optimization": OFFLOADED, **more}


@pytest.mark.parametrize("more", ({}, {"optimizer": {"type": None}}), ids=("no optimizer", "an optimizer of no type"))
def test_a_reference_model_needs_no_place_for_states(more: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    given = config(**more)
    engine, optimizer, _, _ = initialize(model=model, config=given)
    try:
        assert optimizer is None
        rows = torch.eye(4)
        assert torch.equal(engine(rows), nn.functional.linear(rows, weight, model.bias))
    finally:
        engine.close()
    assert given == config(**more)


@pytest.mark.parametrize("passed", (True, False), ids=("passed in", "of the config"))
def test_an_engine_that_trains_is_told_that_stage_0_offloads_nothing(passed: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters()) if passed else None
    more = {} if passed else {"optimizer": {"type": "AdamW"}}
    with pytest.raises(ConfigError, match="offload_optimizer"):
        initialize(model=model, config=config(**more), optimizer=optimizer)
