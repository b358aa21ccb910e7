"""One sum of squares, whatever the elements are cut into, in whatever order, with whatever beside them."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import norm_of

from offload.kernels import kernels
from offload.kernels.square_sums import SquareSum

parts_of = st.lists(st.integers(1, 9000), min_size=0, max_size=4)
spreads = st.sampled_from([0, 3, 12, 40])


def values(numel: int, spread: int, seed: int) -> torch.Tensor:
    """fp32 whose magnitudes span 2 * `spread` decades, as far as fp32 goes."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread + 1, (numel,), generator=generator).clamp(-40, 35).double()
    return (torch.randn(numel, generator=generator).double() * 10.0**exponents).float()


def sum_of(elements: torch.Tensor, cuts: list[int]) -> SquareSum:
    """The elements are cut into tensors, each of which has blocks of its own."""
    parts, begin = [], 0
    for numel in [*cuts, max(elements.numel(), 1)]:
        parts.append(SquareSum.from_rows(kernels.block_sumsq(elements[begin : begin + numel].contiguous())))
        begin += numel
    return SquareSum.merge(parts)


@given(numel=st.integers(0, 20_000), cuts=parts_of, spread=spreads, seed=st.integers(0, 1 << 20))
def test_the_sum_does_not_depend_on_cuts_and_order(numel: int, cuts: list[int], spread: int, seed: int) -> None:
    elements = values(numel, spread, seed)
    shuffled = elements[torch.randperm(numel, generator=torch.Generator().manual_seed(seed + 1))]
    whole = sum_of(elements, [])
    assert sum_of(elements, cuts) == whole
    assert sum_of(shuffled, cuts[::-1]) == whole
    assert whole.norm() == norm_of({"": elements})


@given(numel=st.integers(1, 6000), spread=spreads, seed=st.integers(0, 1 << 20))
def test_each_square_is_off_by_no_more_than_a_part_of_the_largest(numel: int, spread: int, seed: int) -> None:
    elements = values(numel, spread, seed)
    squares = [Fraction(value) ** 2 for value in elements.tolist()]
    found = SquareSum.from_rows(kernels.block_sumsq(elements))
    total = found.high * Fraction(2) ** (48 * found.bin) + found.low * Fraction(2) ** (48 * (found.bin - 1))
    assert abs(total - sum(squares)) <= numel * Fraction(1, 2**47) * max(squares)


@given(parts=st.lists(st.tuples(st.integers(1, 5000), spreads, st.integers(0, 99)), min_size=1, max_size=5))
def test_sums_travel_between_ranks_and_add_up_in_any_grouping(parts: list[tuple[int, int, int]]) -> None:
    sums = [SquareSum.from_rows(kernels.block_sumsq(values(*part))) for part in parts]
    assert [SquareSum.unpack(part.pack()) for part in sums] == sums
    grouped = SquareSum()
    for part in sums:
        grouped = SquareSum.merge([part, grouped])
    assert grouped == SquareSum.merge(sums)


def test_whole_numbers_have_their_exact_norm() -> None:
    assert SquareSum.from_rows(kernels.block_sumsq(torch.tensor([3.0, -4.0]))).norm() == 5.0
    assert SquareSum().norm() == SquareSum.from_rows(kernels.block_sumsq(torch.zeros(5000))).norm() == 0.0
    largest = torch.full((3 * 4096,), torch.finfo(torch.float32).max)
    assert (
        SquareSum.from_rows(kernels.block_sumsq(largest)).norm() == math.sqrt(3 * 4096) * torch.finfo(torch.float32).max
    )


def test_the_norm_is_not_a_number_as_soon_as_one_element_is_not_finite() -> None:
    sums = [SquareSum.from_rows(kernels.block_sumsq(torch.tensor([1.0, bad]))) for bad in (2.0, math.inf, math.nan)]
    assert [part.nonfinite for part in sums] == [0, 1, 1]
    assert math.isnan(SquareSum.merge(sums).norm())
