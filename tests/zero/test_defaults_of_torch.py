"""torch's default dtype and device are the program's: the engine's own tensors follow neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ADAMW, build, make_config, tokens
from probe import units_read_once
from torch import Tensor

import zero
from zero import utils

Open = Callable[..., Any]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "kernel": {"type": "AdamW", "params": ADAMW},
    "rows": {"type": "Lion", "params": {"lr": 0.01}},
    "tiles": {"type": "AdamW", "params": {"lr": 0.01, "amsgrad": True}},
    "whole parameters": {"type": "Lamb", "params": {"lr": 0.02}},
    "two rules": {"type": "Muon", "params": {"lr": 0.01}},
    "small states": {"type": "Adafactor", "params": {"lr": 0.02}},
}
DEFAULTS = {"bf16": {"dtype": torch.bfloat16}, "another device": {"device": "meta"}}
NVME = ("nvme", "nvme")


@contextmanager
def default(dtype: torch.dtype | None = None, device: str | None = None) -> Iterator[None]:
    with ExitStack() as undo:
        if device is not None:
            undo.enter_context(torch.device(device))
        if dtype is not None:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        yield


def as_it_is(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


def life(open_engine: Open, folder: Path, pair: tuple[str, str], optimizer: str, given: dict[str, Any]) -> list[Tensor]:
    """All that an engine says and does between two steps, of a model that was built before."""
    config = make_config(pair, folder / "nvme", gradient_accumulation_steps=2, ema_decay=0.9)
    config["optimizer"] = OPTIMIZERS[optimizer]
    model, batches = build("gpt"), [tokens(index) for index in range(6)]
    seen: list[Tensor] = []

    def micro(engine: Any, index: int) -> None:
        loss = engine(batches[index])
        engine.backward(loss)
        seen.append(loss.detach().clone())
        for parameter in engine.module.parameters():
            if (gradient := utils.safe_get_full_grad(parameter)) is not None:
                seen.append(gradient)
        engine.step()

    def look(engine: Any) -> None:
        with units_read_once(engine):
            for name, parameter in engine.module.named_parameters():
                seen.extend([engine.full_parameter(name), engine.full_master(name)])
                if parameter.requires_grad:
                    held = engine.full_state(name)
                    seen.extend(as_it_is(held[key]) for key in sorted(held))

    with default(**given):
        engine = open_engine(model, config)
        for index in range(4):
            micro(engine, index)
        look(engine)
        with engine.averaged_weights():
            seen.extend(value.clone() for _, value in engine.named_full_parameters())
        first = next(engine.module.parameters())
        utils.safe_set_full_fp32_param(first, utils.safe_get_full_fp32_param(first) * 1.01)
        kept = engine.optimizer.state_dict()
        engine.save_checkpoint(folder / "saved")
        engine.save_fp32_model(folder / "weights")
        micro(engine, 4)
        utils.safe_set_full_grad(first, utils.safe_get_full_grad(first) * 2)
        engine.optimizer.load_state_dict(kept)
        with zero.GatheredParameters([first]):
            first.data.mul_(0.5)
        micro(engine, 5)
        look(engine)
        engine.load_checkpoint(folder / "saved")
        look(engine)
    return seen


@pytest.mark.parametrize(("optimizer", "pair"), [*((name, NVME) for name in OPTIMIZERS), ("kernel", ("none", "none"))])
def test_the_programs_defaults_change_no_bit(
    open_engine: Open, tmp_path: Path, optimizer: str, pair: tuple[str, str]
) -> None:
    expected = life(open_engine, tmp_path / "plain", pair, optimizer, {})
    for name, given in DEFAULTS.items():
        found = life(open_engine, tmp_path / name, pair, optimizer, given)
        assert len(found) == len(expected)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.dtype == other.dtype and torch.equal(one, other), (name, number)
