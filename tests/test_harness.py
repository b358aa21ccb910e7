"""The runs that tests compare with: computed once, and nobody's to change."""

from __future__ import annotations

import pytest
import torch
from harness import reference_of, reference_run, train, unequal


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
