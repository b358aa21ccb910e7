"""A gradient that somebody puts into `parameter.grad` counts in the next step, as with torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, make_config, tokens, trainability
from reference import differences, snapshot
from tiled import LIMIT, wide
from torch import Tensor, nn

from zero import utils

Open = Callable[..., Any]

PLACES = {
    "stage 0": (("none", "none"), {"stage": 0}),
    "stage 2, cpu": (("none", "cpu"), {"stage": 2}),
    "stage 3, nvme": (("nvme", "nvme"), {}),
    "stage 3, nvme, tiles": (("nvme", "nvme"), {"stage3_max_live_parameters": LIMIT}),
}
everywhere = pytest.mark.parametrize("place", PLACES)
STEPS = 2


def opened(open_engine: Open, place: str, nvme_path: Path, **more: Any) -> Any:
    pair, zero_keys = PLACES[place]
    model = wide() if "tiles" in place else build("gpt")
    return open_engine(model, make_config(pair, nvme_path, bf16=False, zero=zero_keys, **more))


def backward(engine: Any, index: int) -> None:
    engine.backward(engine(tokens(index)))


def chosen(engine: Any) -> list[nn.Parameter]:
    """Every other one that is trained, so that what is left alone is seen too."""
    return [p for p in engine.module.parameters() if p.requires_grad][::2]


def drawn(parameter: nn.Parameter, seed: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


def held(engine: Any) -> dict[str, Tensor]:
    return snapshot(engine, trainability(engine.module))


@everywhere
def test_a_written_gradient_replaces_what_backward_has_collected(
    open_engine: Open, nvme_path: Path, place: str
) -> None:
    written, told = opened(open_engine, place, nvme_path), opened(open_engine, place, nvme_path)
    untouched = opened(open_engine, place, nvme_path)
    for index in range(STEPS):
        for engine in (written, told, untouched):
            backward(engine, index)
        for seed, parameter in enumerate(chosen(written)):
            parameter.grad = drawn(parameter, seed)
        for seed, parameter in enumerate(chosen(told)):
            utils.safe_set_full_grad(parameter, drawn(parameter, seed))
        for engine in (written, told, untouched):
            engine.step()
        assert all(p.grad is None for p in written.module.parameters())
    assert written.get_global_grad_norm() == told.get_global_grad_norm() == written.optimizer._global_grad_norm
    assert differences(held(written), held(told)) == []
    assert differences(held(written), held(untouched)) != []


def test_backward_adds_to_what_was_written_before_it(open_engine: Open, nvme_path: Path) -> None:
    written, told = (opened(open_engine, "stage 3, nvme", nvme_path) for _ in range(2))
    for seed, parameter in enumerate(chosen(written)):
        parameter.grad = drawn(parameter, seed)
    for engine in (written, told):
        backward(engine, 0)
    for seed, parameter in enumerate(chosen(told)):
        gradient = utils.safe_get_full_grad(parameter)
        assert gradient is not None
        utils.safe_set_full_grad(parameter, drawn(parameter, seed) + gradient)
    for engine in (written, told):
        engine.step()
    assert differences(held(written), held(told)) == []


def test_a_step_needs_no_backward_where_gradients_are_written(open_engine: Open, nvme_path: Path) -> None:
    """As with torch: what has none is left as it is."""
    engine = opened(open_engine, "stage 3, nvme", nvme_path)
    before = held(engine)
    parameter = engine.module.get_parameter("head.weight")
    parameter.grad = drawn(parameter, 1)
    engine.step()
    assert {difference.split("/")[0] for difference in differences(held(engine), before)} == {"head.weight"}


def test_zero_grad_forgets_what_was_written(open_engine: Open, nvme_path: Path) -> None:
    engine, left = (opened(open_engine, "stage 3, nvme", nvme_path) for _ in range(2))
    for seed, parameter in enumerate(chosen(engine)):
        parameter.grad = drawn(parameter, seed)
    engine.zero_grad()
    assert all(p.grad is None for p in engine.module.parameters())
    for each in (engine, left):
        backward(each, 0)
        each.step()
    assert differences(held(engine), held(left)) == []
