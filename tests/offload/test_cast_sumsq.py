"""A cast that also sums: the bits of the two kernels it stands for, on every path."""

from __future__ import annotations

import errno
import math
import warnings

import pytest
import torch
from harness import same_bits
from torch import Tensor

import native
from offload.kernels import kernels

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NUMELS = [0, 1, 17, 4095, 4096, 4097, 3 * 4096 + 5, 40 * 4096 + 1]
SPECIALS = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.4e38, 65520.0]


def values(numel: int, dtype: torch.dtype) -> Tensor:
    """All magnitudes, special ones among them."""
    generator = torch.Generator().manual_seed(numel)
    found = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-12, 12, (numel,), generator=generator)
    where = torch.randperm(numel, generator=generator)[: len(SPECIALS)]
    found[where] = torch.tensor(SPECIALS)[: len(where)]
    return found.to(dtype)


def in_two_passes(src: Tensor, dtype: torch.dtype, scale: float) -> list[Tensor]:
    out = torch.empty_like(src, dtype=dtype)
    kernels.cast(out, src, scale)
    return [out, kernels.block_sumsq(out)]


def in_one_pass(src: Tensor, dtype: torch.dtype, scale: float, threads: int = 1) -> list[Tensor]:
    out = torch.empty_like(src, dtype=dtype)
    return [out, kernels.cast_sumsq(out, src, scale, threads=threads)]


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("in_dtype", FLOATS)
@pytest.mark.parametrize("enabled", ["1", "0"], ids=["native", "torch"])
def test_one_pass_has_the_bits_of_two(
    monkeypatch: pytest.MonkeyPatch, enabled: str, in_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    monkeypatch.setenv("ZERO_NATIVE", enabled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for numel in NUMELS:
            for scale in (1.0, 0.3):
                src = values(numel, in_dtype)
                assert same_bits(in_one_pass(src, out_dtype, scale), in_two_passes(src, out_dtype, scale))


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    try:
        lib = native.load().lib
    except native.NativeUnavailable as error:
        pytest.skip(f"no native kernels: {error}")
    src = values(40 * 4096 + 1, torch.float32)
    reference = in_one_pass(src, torch.bfloat16, 0.3)
    status = lib.zn_cpu_isa_select(isa.encode())
    try:
        if status == -errno.ENOTSUP:
            pytest.skip(f"this CPU has no {isa}")
        assert status == 0
        assert same_bits(in_one_pass(src, torch.bfloat16, 0.3), reference)
    finally:
        lib.zn_cpu_isa_select(b"best")


def test_the_number_of_threads_changes_no_bit() -> None:
    src = values(5 * 65536 + 17, torch.float32)
    assert same_bits(in_one_pass(src, torch.bfloat16, 0.3, threads=4), in_one_pass(src, torch.bfloat16, 0.3))


def test_a_tensor_can_be_scaled_where_it_is() -> None:
    src = values(3 * 4096 + 5, torch.float32)
    reference = in_two_passes(src, torch.float32, 0.5)
    assert same_bits([src, kernels.cast_sumsq(src, src, 0.5)], reference)


@pytest.mark.parametrize("casting", [False, True])
def test_results_go_where_they_are_wanted_and_nowhere_else(casting: bool) -> None:
    src = values(4097, torch.bfloat16)
    reference = kernels.block_sumsq(src)
    sums = torch.full((5, 2), 7)
    into = sums[1:3]
    found = kernels.cast_sumsq(src.clone(), src, into=into) if casting else kernels.block_sumsq(src, into)
    assert torch.equal(found, reference) and torch.equal(into, reference)
    assert sums[[0, 3, 4]].unique().tolist() == [7]


def test_results_of_the_wrong_kind_are_refused_by_name() -> None:
    src = torch.ones(8)
    sums = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"into: expected 2 elements of torch.int64 on cpu, got 2 of torch.float64"):
        kernels.block_sumsq(src, sums.double())
    with pytest.raises(TypeError, match=r"into: expected a contiguous tensor of shape \(1, 2\), got \(2, 2\)"):
        kernels.cast_sumsq(src, src, 1.0, sums.repeat(2, 1))
    with pytest.raises(TypeError, match=r"out: expected 8 elements"):
        kernels.cast_sumsq(src[:7], src)
