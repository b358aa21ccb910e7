"""The sum over ranks: the bits of plain torch operations in the given order, on every path."""

from __future__ import annotations

import contextlib
import errno
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import native
from offload.kernels import kernels

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SPECIALS = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-39, 3.4e38, 65520.0, -65519.0]
TARGETS = [(dtype, torch.float32, True) for dtype in FLOATS] + [
    (dtype, stored, False) for dtype in FLOATS for stored in {dtype, torch.float32}
]
"""(dtype of the sources, of what is stored, added to it)."""


@contextlib.contextmanager
def path(name: str) -> Iterator[None]:
    """Kernels by one instruction set, or in torch."""
    if name == "torch":
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            patch.setenv("ZERO_NATIVE", "0")
            yield
        return
    try:
        lib = native.load().lib
    except native.NativeUnavailable as error:
        pytest.skip(f"no native kernels: {error}")
    status = lib.zn_cpu_isa_select(name.encode())
    try:
        if status == -errno.ENOTSUP:
            pytest.skip(f"this CPU has no {name}")
        assert status == 0
        yield
    finally:
        lib.zn_cpu_isa_select(b"best")


def samples(numel: int, seed: int, dtype: torch.dtype, special: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, 9, (numel,), generator=generator).float()
    found = torch.randn(numel, generator=generator) * 10.0**exponents
    if special:
        where = torch.randperm(numel, generator=generator)[: len(SPECIALS)]
        found[where] = torch.tensor(SPECIALS)[: len(where)]
    return found.to(dtype)


def canonical(values: Tensor) -> Tensor:
    return values.masked_fill(values.isnan(), math.nan)


def expected(stored: Tensor, sources: list[Tensor], scale: float, add: bool) -> list[Tensor]:
    total = sources[0].float()
    for source in sources[1:]:
        total = total + source.float()
    total = total * torch.tensor(scale, dtype=torch.float32)
    result = canonical((stored + total if add else total).to(stored.dtype))
    return [result, kernels.block_sumsq(result)]


@pytest.mark.parametrize("name", ["scalar", "avx2", "avx512", "torch"])
@pytest.mark.parametrize(("dtype", "stored_dtype", "add"), TARGETS, ids=str)
def test_every_path_has_the_bits_of_plain_torch(
    name: str, dtype: torch.dtype, stored_dtype: torch.dtype, add: bool
) -> None:
    @settings(max_examples=25)
    @given(
        count=st.integers(1, 9),
        numel=st.one_of(st.integers(0, 300), st.integers(4090, 4100), st.integers(0, 3 * 4096)),
        offset=st.integers(0, 3),
        scale=st.sampled_from([1.0, 0.5, 1 / 3, 1e-6]),
        special=st.booleans(),
        seed=st.integers(0, 1 << 20),
    )
    def check(count: int, numel: int, offset: int, scale: float, special: bool, seed: int) -> None:
        sources = [samples(numel + offset, seed + i, dtype, special)[offset:] for i in range(count)]
        stored = samples(numel + offset, seed - 1, stored_dtype, special)[offset:]
        reference = expected(stored, sources, scale, add)
        sums = kernels.reduce_ranks(stored, sources, scale=scale, add=add)
        assert same_bits([stored, sums], reference)

    with path(name):
        check()


@pytest.mark.parametrize("name", ["avx512", "torch"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_result_may_take_the_place_of_any_source(name: str, dtype: torch.dtype, which: int) -> None:
    with path(name):
        sources = [samples(9000, i, dtype, True) for i in range(3)]
        reference = expected(sources[which], sources, 0.25, False)
        sums = kernels.reduce_ranks(sources[which], sources, scale=0.25)
        assert same_bits([sources[which], sums], reference)


def test_the_number_of_threads_changes_no_bit() -> None:
    def run(threads: int) -> list[Tensor]:
        sources = [samples(5 * 65536 + 17, i, torch.bfloat16, True) for i in range(4)]
        stored = torch.ones(5 * 65536 + 17)
        return [stored, kernels.reduce_ranks(stored, sources, scale=0.25, add=True, threads=threads)]

    assert same_bits(run(4), run(1))


def test_the_order_of_the_sources_is_the_order_of_additions() -> None:
    big, small = torch.full((4096,), 1e8), torch.full((4096,), 1.0)
    stored = torch.empty(4096)
    kernels.reduce_ranks(stored, [big, small, -big])
    assert stored.unique().tolist() == [0.0]
    kernels.reduce_ranks(stored, [big, -big, small])
    assert stored.unique().tolist() == [1.0]


def test_block_sums_go_where_they_are_wanted_and_nowhere_else() -> None:
    sources = [samples(4097, i, torch.bfloat16, False) for i in range(2)]
    stored = torch.empty(4097, dtype=torch.bfloat16)
    sums = torch.full((5, 2), 7)
    kernels.reduce_ranks(stored, sources, into=sums[1:3])
    assert torch.equal(sums[1:3], kernels.block_sumsq(stored))
    assert sums[[0, 3, 4]].unique().tolist() == [7]


ONES = torch.ones(8)
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: kernels.reduce_ranks(ONES, []), ValueError, "sources: expected at least one tensor, got none"),
    (
        lambda: kernels.reduce_ranks(ONES.clone(), [ONES, ONES.bfloat16()]),
        TypeError,
        r"sources\[1\]: expected 8 elements of torch.float32 on cpu, got 8 of torch.bfloat16",
    ),
    (
        lambda: kernels.reduce_ranks(ONES.clone(), [ONES, ONES[:7]]),
        TypeError,
        r"sources\[1\]: expected 8 elements of torch.float32 on cpu, got 7",
    ),
    (
        lambda: kernels.reduce_ranks(ONES.half(), [ONES.bfloat16()]),
        TypeError,
        r"stored: expected 8 elements of torch.float32 or torch.bfloat16 on cpu, got 8 of torch.float16",
    ),
    (
        lambda: kernels.reduce_ranks(ONES.bfloat16(), [ONES.bfloat16()], add=True),
        TypeError,
        r"stored: expected 8 elements of torch.float32 on cpu, got 8 of torch.bfloat16",
    ),
    (
        lambda: kernels.reduce_ranks(torch.ones(9)[1:], [torch.ones(16).long()]),
        TypeError,
        r"sources\[0\]: expected 8 elements of torch.float32 or torch.bfloat16 or torch.float16 on cpu",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2][:28] for row in REFUSED])
def test_operands_that_do_not_go_together_are_refused_by_name(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("shift", [-4, -1, 1, 7])
def test_a_source_that_overlaps_the_result_without_being_it_is_refused(shift: int) -> None:
    memory = torch.ones(32)
    with pytest.raises(ValueError, match=r"sources\[1\]: overlaps stored but is not the same memory"):
        kernels.reduce_ranks(memory[8:16], [torch.ones(8), memory[8 + shift : 16 + shift]])
    kernels.reduce_ranks(memory[8:16], [memory[:8], memory[16:24]])  # neighbours do not overlap
    with pytest.raises(ValueError, match=r"sources\[0\]: overlaps stored"):
        kernels.reduce_ranks(memory[8:16], [memory.view(torch.bfloat16)[16:24]])


def test_what_c_is_told_wrongly_it_refuses() -> None:
    library = native.load()
    lib, ffi = library.lib, library.ffi
    data = ffi.new("float[]", 8)
    sums = ffi.new("zn_square_sum[]", 1)
    good, null = ffi.new("void *[]", [data]), ffi.new("void *[]", [ffi.NULL])

    def call(stored: Any, dtype: int, sources: Any, count: int, in_dtype: int, add: int = 0) -> int:
        return int(lib.zn_cpu_reduce_ranks(stored, dtype, sums, sources, count, in_dtype, 8, 1.0, add, 1))

    assert call(data, lib.ZN_F32, good, 1, lib.ZN_F32) == 0
    for arguments in (
        (data, lib.ZN_F32, good, 0, lib.ZN_F32),
        (data, lib.ZN_F32, null, 1, lib.ZN_F32),
        (data, 3, good, 1, lib.ZN_F32),
        (data, lib.ZN_BF16, good, 1, lib.ZN_F32),
        (data, lib.ZN_BF16, good, 1, lib.ZN_BF16, 1),
        (ffi.NULL, lib.ZN_F32, good, 1, lib.ZN_F32),
    ):
        assert call(*arguments) == -errno.EINVAL
