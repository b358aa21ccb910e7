"""Losses that are fp16 themselves: what their backward can hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_config

Open = Callable[..., Any]


class Half(torch.nn.Module):
    """Its loss has the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs).mean()


@pytest.mark.parametrize("accumulation", [2, 3, 8])
def test_a_scale_that_fits_fp16_only_in_parts_is_no_overflow(
    open_engine: Open, nvme_path: Path, accumulation: int
) -> None:
    """65536 is more than fp16 holds, a half of it is not: an fp16 loss is divided before its gradient is fp16."""
    config = make_config(("cpu", "cpu"), nvme_path, bf16=False, accumulation=accumulation)
    engine = open_engine(Half(), {**config, "fp16": {"enabled": True, "initial_scale_power": 16}})
    inputs = torch.full((2, 4), 1 / 8, dtype=torch.float16)
    for _ in range(accumulation):
        loss = engine(inputs)
        given = engine.backward(loss)
        engine.step()
        assert loss.dtype == torch.float16
        assert torch.equal(given, loss.float() / accumulation)
    assert engine.was_step_applied()
    assert (engine.skipped_steps, engine.optimizer.cur_scale) == (0, 2.0**16)
