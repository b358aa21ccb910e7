"""How long does each CPU kernel take per instruction set? `pytest benchmarks --benchmark-group-by=func`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import native
from offload.kernels import kernels

NUMEL = 4 << 20


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Any:
    """Each instruction set that this CPU has."""
    lib = native.load().lib
    if lib.zn_cpu_isa_select(request.param.encode()) != 0:
        pytest.skip(f"this CPU lacks {request.param}")
    yield request.param
    lib.zn_cpu_isa_select(b"best")


def test_adamw_on_the_split_master(benchmark: Any, isa: str) -> None:
    weight, gradient = torch.randn(NUMEL).bfloat16(), torch.randn(NUMEL).bfloat16()
    remainder = torch.zeros(NUMEL, dtype=torch.int16)
    exp_avg, exp_avg_sq = torch.zeros(NUMEL), torch.zeros(NUMEL)
    segment = kernels.Segment(
        begin=0, end=NUMEL, step_size=1e-3, bias2_sqrt=1.0, decay=0.9999, l2=0.0, beta1=0.9, beta2=0.999, eps=1e-8
    )
    benchmark(kernels.adamw, weight, remainder, kernels.Moments(exp_avg, exp_avg_sq), gradient, [segment])


def test_block_sums_of_a_bf16_gradient(benchmark: Any, isa: str) -> None:
    benchmark(kernels.block_sumsq, torch.randn(NUMEL).bfloat16())


def test_accumulation_of_a_bf16_gradient_in_fp32(benchmark: Any, isa: str) -> None:
    benchmark(kernels.accumulate, torch.zeros(NUMEL), torch.randn(NUMEL).bfloat16())


def test_split_of_fp32_into_weight_and_remainder(benchmark: Any, isa: str) -> None:
    weight, remainder = torch.empty(NUMEL, dtype=torch.bfloat16), torch.empty(NUMEL, dtype=torch.int16)
    benchmark(kernels.split, weight, remainder, torch.randn(NUMEL))
