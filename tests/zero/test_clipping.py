"""The clip coefficient is torch's, also where numbers stop being numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero.optim.stepper import clip_coefficient

norms = st.floats(0, 1e30, allow_nan=False)
maxima = st.floats(1e-6, 1e6)


@given(norms, maxima)
def test_gradients_never_grow_and_end_within_the_limit(norm: float, norm_max: float) -> None:
    coefficient = clip_coefficient(norm, norm_max)
    assert 0 <= coefficient <= 1
    assert coefficient * norm <= norm_max * (1 + 1e-12)


@given(norms, maxima)
def test_gradients_clearly_within_the_limit_are_left_alone(norm: float, norm_max: float) -> None:
    if norm + 1e-6 <= norm_max:
        assert clip_coefficient(norm, norm_max) == 1.0


@given(st.floats(0, 1e6), st.floats(0, 1e6), maxima)
def test_a_larger_norm_never_gets_a_larger_coefficient(a: float, b: float, norm_max: float) -> None:
    low, high = sorted((a, b))
    assert clip_coefficient(high, norm_max) <= clip_coefficient(low, norm_max)


@pytest.mark.parametrize("norm_max", [0, 0.0, -1.0])
@pytest.mark.parametrize("norm", [0.0, 5.0, math.inf, math.nan])
def test_no_limit_means_no_clipping(norm: float, norm_max: float) -> None:
    assert clip_coefficient(norm, norm_max) == 1.0


def test_a_nan_norm_is_not_hidden_and_an_infinite_one_gives_zero() -> None:
    assert math.isnan(clip_coefficient(math.nan, 1.0))
    assert clip_coefficient(math.inf, 1.0) == 0.0


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.floats(1e-2, 100))
def test_it_is_what_torch_multiplies_by(values: list[float], norm_max: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    parameter.grad = torch.tensor(values, dtype=torch.float64)
    before = parameter.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], norm_max)
    ours = before * clip_coefficient(float(norm), norm_max)
    # Coefficients are an ulp apart at most; of a subnormal product that is its last place.
    torch.testing.assert_close(ours, parameter.grad, rtol=1e-14, atol=math.ulp(0.0))
