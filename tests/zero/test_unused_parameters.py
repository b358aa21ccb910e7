"""`ignore_unused_parameters: false`: a step without a gradient for every trained parameter is an error, and no step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import make_config
from torch import nn

from offload.errors import ConfigError, StateError

Open = Callable[..., Any]


class Branches(nn.Module):
    """Uses the branches it is told to."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return sum((self.branches[index](x) for index in used), x).square().mean()


def engine_of(open_engine: Open, nvme_path: Any, *, ignore: bool, count: int = 3, **keys: Any) -> Any:
    config = make_config(("cpu", "nvme"), nvme_path, bf16=False, zero={"ignore_unused_parameters": ignore}, **keys)
    torch.manual_seed(0)
    return open_engine(Branches(count), config)


def backward(engine: Any, used: list[int]) -> None:
    engine.backward(engine(torch.ones(2, 8), used))


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.named_full_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_unused_parameters_are_named_and_the_step_is_none(open_engine: Open, nvme_path: Any) -> None:
    engine = engine_of(open_engine, nvme_path, ignore=False)
    before = weights(engine)
    backward(engine, [0, 2])
    with pytest.raises(StateError, match=r"no gradient for branches\.1\.weight, branches\.1\.bias; .*requires_grad_"):
        engine.step()
    assert engine.global_steps == 0 and same(weights(engine), before)


@pytest.mark.parametrize("way", ["forget", "complete"])
def test_after_the_error_training_goes_on_as_if_it_had_not_been(open_engine: Open, nvme_path: Any, way: str) -> None:
    engine, plain = (engine_of(open_engine, nvme_path, ignore=ignore) for ignore in (False, True))
    backward(engine, [0, 1])
    with pytest.raises(StateError, match=r"branches\.2"):
        engine.step()
    if way == "forget":
        engine.zero_grad()
        rest = [[0, 1, 2]]
    else:
        backward(plain, [0, 1])
        rest = [[2]]
    for used in rest:
        for each in (engine, plain):
            backward(each, used)
            each.step()
    assert engine.global_steps == plain.global_steps == 1
    assert same(weights(engine), weights(plain))


def test_what_one_micro_batch_uses_counts_for_the_step(open_engine: Open, nvme_path: Any) -> None:
    engine = engine_of(open_engine, nvme_path, ignore=False, accumulation=2)
    for used in ([0], [1, 2]):
        backward(engine, used)
        engine.step()
    assert engine.global_steps == 1


def test_by_default_unused_and_in_any_case_frozen_parameters_are_no_mistake(open_engine: Open, nvme_path: Any) -> None:
    engine = engine_of(open_engine, nvme_path, ignore=True)
    backward(engine, [0])
    engine.step()
    model = Branches()
    model.branches[1].requires_grad_(False)
    config = make_config(("cpu", "cpu"), nvme_path, bf16=False, zero={"ignore_unused_parameters": False})
    strict = open_engine(model, config)
    backward(strict, [0, 2])
    strict.step()
    assert engine.global_steps == strict.global_steps == 1


def test_what_is_frozen_later_is_no_mistake_either(open_engine: Open, nvme_path: Any) -> None:
    engine = engine_of(open_engine, nvme_path, ignore=False)
    backward(engine, [0, 1, 2])
    engine.step()
    backward(engine, [0, 2])
    with pytest.raises(StateError, match=r"branches\.1"):
        engine.step()
    engine.module.branches[1].requires_grad_(False)
    engine.step()
    assert engine.global_steps == 2


def test_of_many_unused_parameters_a_few_are_named(open_engine: Open, nvme_path: Any) -> None:
    engine = engine_of(open_engine, nvme_path, ignore=False, count=8)
    backward(engine, [0])
    with pytest.raises(StateError, match=r"branches\.4\.bias and 6 more; "):
        engine.step()


def test_the_key_is_a_flag(open_engine: Open, nvme_path: Any) -> None:
    with pytest.raises(ConfigError, match="ignore_unused_parameters: expected true or false"):
        engine_of(open_engine, nvme_path, ignore="maybe")  # type: ignore[arg-type]
