"""The runs that tests compare with: computed once, and nobody's to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import names_of, reference_of, reference_run, train, unequal, values
from models import build, make_config


@pytest.mark.parametrize("model", ["gpt", "tied", "mixed"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_is_not_computed_again_is_the_run_and_goes_on_as_it_does(model: str, accumulation: int) -> None:
    fresh = reference_of(model, accumulation=accumulation, clipping=0.3)
    for count in (3, 3, 5):
        kept = reference_run(*range(count), model=model, accumulation=accumulation, clipping=0.3)
        train(fresh, *range(fresh.micro_steps, count))
        assert unequal(kept, fresh, model) == []
        assert (kept.norms, kept.coefficients, kept.micro_steps) == (fresh.norms, fresh.coefficients, count)
        assert kept.grads.keys() == fresh.grads.keys()
    assert unequal(train(kept, 5, 6, 7), train(fresh, 5, 6, 7), model) == []


def test_whoever_changes_a_run_changes_his_own() -> None:
    first = train(reference_run(0, 1), 2)
    first.model.norm.weight.data.zero_()  # type: ignore[union-attr, operator]
    first.states["norm.weight"].master.zero_()
    second = reference_run(0, 1)
    assert len(second.norms) == 2 and unequal(second, train(reference_of(), 0, 1)) == []
    assert not torch.equal(second.full_master("norm.weight"), first.full_master("norm.weight"))


@pytest.mark.parametrize("sub_group_numel", [4096, 10**9])
@pytest.mark.parametrize("pair", [("none", "none"), ("cpu", "nvme"), ("nvme", "nvme")], ids="-".join)
@pytest.mark.parametrize("model", ["mixed", "tied"])
def test_planes_that_are_read_once_give_what_each_request_by_itself_gives(
    open_engine: Callable[..., Any], nvme_path: Path, model: str, pair: tuple[str, str], sub_group_numel: int
) -> None:
    engine = open_engine(build(model), make_config(pair, nvme_path, zero={"sub_group_size": sub_group_numel}))
    train(engine, 0, 1)
    held = values(engine, model)
    for name, trainable in names_of(model):
        assert torch.equal(held.pop(f"{name}/weight"), engine.full_parameter(name))
        if trainable:
            state = engine.full_state(name)
            assert torch.equal(held.pop(f"{name}/master"), engine.full_master(name))
            assert all(torch.equal(held.pop(f"{name}/{kind}"), state[kind]) for kind in ("exp_avg", "exp_avg_sq"))
            assert held.pop(f"{name}/step") == state["step"]
    assert held == {}
