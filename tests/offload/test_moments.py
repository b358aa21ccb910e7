"""Moments stored as fp32, bf16 and 8-bit codes: the same bits on every path, and no bias from the rounding."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import same_bits
from torch import Tensor

import native
from offload.kernels import kernels
from offload.kernels.kernels import Moments, Segment

KINDS = [torch.float32, torch.bfloat16, torch.uint8]
NARROW = KINDS[1:]
MASTERS = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.int16),
    (torch.float16, torch.float32),
]
BLOCK = 256
SPECIALS = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-39, 1.1754944e-38, 3.4e38, -3.4028235e38]
# Exact in fp32: exp_avg becomes the gradient and exp_avg_sq its square, whatever they were.
TAKE_GRADIENT = Segment(0, 0, beta1=0.0, beta2=0.0)


def paths() -> list[str]:
    try:
        lib = native.load().lib
    except native.NativeUnavailable:
        return ["torch"]
    found = [name for name in ("scalar", "avx2", "avx512") if lib.zn_cpu_isa_select(name.encode()) == 0]
    lib.zn_cpu_isa_select(b"best")
    return [*found, "torch"]


PATHS = paths()


def on_path(path: str, monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> Any:
    """What `action` returns on one instruction set, or in torch."""
    if path != "torch":
        lib = native.load().lib
        assert lib.zn_cpu_isa_select(path.encode()) == 0
        try:
            return action()
        finally:
            lib.zn_cpu_isa_select(b"best")
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setenv("ZERO_NATIVE", "0")
        return action()


def zeros(kind: torch.dtype, numel: int, **at: int) -> Moments:
    exp_avg, exp_avg_sq = torch.zeros(numel, dtype=kind), torch.zeros(numel, dtype=kind)
    if kind != torch.uint8:
        return Moments(exp_avg, exp_avg_sq, **at)
    return Moments(exp_avg, exp_avg_sq, torch.zeros(numel // BLOCK), torch.zeros(numel // BLOCK), **at)


def parts(moments: Moments) -> list[Tensor]:
    tensors = [moments.exp_avg, moments.exp_avg_sq, moments.exp_avg_scale, moments.exp_avg_sq_scale]
    return [tensor for tensor in tensors if tensor is not None]


def cut(moments: Moments, begin: int, end: int) -> Moments:
    """The moments of [begin, end), at their coordinates."""
    scales = [None if s is None else s[begin // BLOCK : end // BLOCK] for s in parts(moments)[2:]] or [None, None]
    exp_avg, exp_avg_sq = moments.exp_avg[begin:end], moments.exp_avg_sq[begin:end]
    return replace(
        moments,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        exp_avg_scale=scales[0],
        exp_avg_sq_scale=scales[1],
        origin=moments.origin + begin,
    )


def gradient(numel: int, seed: int, specials: bool = False) -> Tensor:
    """Magnitudes over twelve decades; every special value in the last block, if asked for."""
    generator = torch.Generator().manual_seed(seed)
    decades = torch.randint(-12, 1, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator) * 10.0**decades
    values[torch.rand(numel, generator=generator) < 0.1] = 0.0
    if specials and numel >= BLOCK:
        values[-BLOCK : -BLOCK + len(SPECIALS)] = torch.tensor(SPECIALS)
    return values


def hyper(begin: int, end: int, **changes: Any) -> Segment:
    return Segment(begin, end, **({"step_size": 3e-3, "bias2_sqrt": 0.3, "decay": 1 - 1e-4} | changes))


def uneven(numel: int) -> list[Segment]:
    """Edges inside blocks, a skipped run, a block of three owners and a gap that belongs to nobody."""
    a, b, c = numel // 3 // 16 * 16, numel // 2 // 16 * 16, numel - numel // 5 // 16 * 16
    return [
        hyper(0, a),
        hyper(a, a + 16, step_size=1e-2),
        hyper(a + 16, b, skip=True),
        hyper(c, numel, decay=1.0, l2=0.01),
    ]


def steps(
    kind: torch.dtype,
    numel: int,
    weight_dtype: torch.dtype = torch.bfloat16,
    master_dtype: torch.dtype | None = torch.int16,
    edges: list[int] | None = None,
    threads: int = 1,
    specials: bool = False,
) -> list[Tensor]:
    """Weight, master and moments after three steps; the space is updated in calls that meet at `edges`."""
    full = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    weight = full.to(weight_dtype)
    master = full if master_dtype == torch.float32 else torch.zeros(numel, dtype=torch.int16)
    moments = zeros(kind, numel, origin=3 * 4096)
    for step in range(3):
        grad = gradient(numel, 10 + step, specials).bfloat16()
        for begin, end in itertools.pairwise(edges or [0, numel]):
            segments = [
                replace(s, begin=max(s.begin, begin) - begin, end=min(s.end, end) - begin)
                for s in uneven(numel)
                if s.begin < end and begin < s.end
            ]
            kernels.adamw(
                weight[begin:end],
                None if master_dtype is None else master[begin:end],
                replace(cut(moments, begin, end), step=step),
                grad[begin:end],
                segments,
                grad_scale=0.37,
                threads=threads,
            )
    return [weight, *([] if master_dtype is None else [master]), *parts(moments)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("weight_dtype", "master_dtype"), MASTERS)
def test_every_path_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, weight_dtype: torch.dtype, master_dtype: torch.dtype | None
) -> None:
    for numel in (0, BLOCK, 5 * BLOCK, 4096, 12288 + BLOCK):

        def run(numel: int = numel) -> list[Tensor]:
            return steps(kind, numel, weight_dtype, master_dtype, specials=True)

        results = [on_path(path, monkeypatch, run) for path in PATHS]
        for path, result in zip(PATHS, results, strict=True):
            assert same_bits(result, results[0]), (path, numel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("master_dtype", [torch.int16, None])
def test_neither_cutting_a_space_nor_threads_change_a_bit(kind: torch.dtype, master_dtype: torch.dtype | None) -> None:
    numel, bf16 = 5 * 65536, torch.bfloat16
    whole = steps(kind, numel, bf16, master_dtype)
    for edges in ([0, 4096, numel], [0, 8192, 8192 + 4096, 2 * 65536, numel]):
        assert same_bits(steps(kind, numel, bf16, master_dtype, edges=edges), whole)
    assert same_bits(steps(kind, numel, bf16, master_dtype, threads=3), whole)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_skipped_elements_keep_every_bit(
    monkeypatch: pytest.MonkeyPatch, path: str, kind: torch.dtype
) -> None:
    numel = 8 * BLOCK
    weight, moments = torch.randn(numel), zeros(kind, numel)
    kernels.moments_store(moments, gradient(numel, 1), gradient(numel, 2).square())
    before = [x.clone() for x in (weight, *parts(moments))]
    segments = [hyper(0, 100, skip=True), hyper(100, 3 * BLOCK + 16, skip=True), hyper(3 * BLOCK + 16, 4 * BLOCK)]
    on_path(path, monkeypatch, lambda: kernels.adamw(weight, None, moments, gradient(numel, 3), segments))
    for now, old in zip((weight, *parts(moments)), before, strict=True):
        per_block = len(old) // 8
        untouched = torch.ones(8, dtype=torch.bool)
        untouched[3] = False
        assert torch.equal(now.view(8, per_block)[untouched], old.view(8, per_block)[untouched])
        assert not torch.equal(now.view(8, per_block)[3], old.view(8, per_block)[3])


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_neighbours_in_a_block_keep_weight_and_moments_to_one_code(kind: torch.dtype) -> None:
    weight, moments = torch.ones(BLOCK), zeros(kind, BLOCK)
    first = torch.linspace(1e-3, 1.0, BLOCK)
    kernels.moments_store(moments, first, first.square())
    before = kernels.moments_load(moments)
    segments = [hyper(0, 16), hyper(16, BLOCK, skip=True)]
    kernels.adamw(weight, None, moments, torch.full((BLOCK,), 0.5), segments)
    assert torch.equal(weight[16:], torch.ones(BLOCK - 16))
    for now, old in zip(kernels.moments_load(moments), before, strict=True):
        # Codes are at most 1/8 apart, and one that is hit exactly can move by a last place of the ratio.
        assert ((now - old).abs()[16:] <= old[16:] / 8).all()
        assert kind == torch.uint8 or torch.equal(now[16:], old[16:])


def every_code() -> tuple[Tensor, Tensor]:
    """The ratios of all codes as the header documents them: exp_avg's and exp_avg_sq's."""

    def from_one_down(count_fine: int, count: int) -> list[float]:
        ratios, exponent = [1.0], 0
        while len(ratios) < count:
            exponent -= 1
            per_octave = 16 if len(ratios) <= count_fine else 8
            ratios += [2.0**exponent * (1 + k / per_octave) for k in range(per_octave - 1, -1, -1)]
        return ratios[:count][::-1]

    magnitudes = [0.0, *from_one_down(64, 127)]
    signed = magnitudes + [-x for x in magnitudes]
    return torch.tensor(signed), torch.tensor(from_one_down(128, 256))


@pytest.mark.parametrize("path", PATHS)
def test_codes_stand_for_the_documented_ratios(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    codes = torch.arange(BLOCK).to(torch.uint8)
    moments = Moments(codes, codes, torch.ones(1), torch.ones(1))
    loaded = on_path(path, monkeypatch, lambda: kernels.moments_load(moments))
    for ours, documented in zip(loaded, every_code(), strict=True):
        assert torch.equal(ours, documented)
    assert every_code()[0][[1, 63, 127]].tolist() == [1.25 * 2.0**-12, 2.0**-4, 1.0]
    assert every_code()[1][[0, 127, 255]].tolist() == [1.125 * 2.0**-24, 2.0**-8, 1.0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_loaded_comes_back_bit_for_bit(monkeypatch: pytest.MonkeyPatch, path: str, kind: torch.dtype) -> None:
    numel = 64 * BLOCK
    moments, again = zeros(kind, numel), zeros(kind, numel)
    exponents = torch.linspace(-99, 127, 64).repeat_interleave(BLOCK)
    values = [torch.rand(numel) * 2.0**exponents, torch.rand(numel) ** 8 * 2.0**exponents]
    if kind == torch.uint8:
        moments.exp_avg.copy_(torch.arange(numel) % 256)  # every code, the largest among them
        moments.exp_avg_sq.copy_(moments.exp_avg)
        for scale in parts(moments)[2:]:
            scale.copy_(2.0 ** torch.linspace(-99, 127, 64))
    else:
        kernels.moments_store(moments, *values)

    def round_trip() -> None:
        kernels.moments_store(again, *kernels.moments_load(moments))

    on_path(path, monkeypatch, round_trip)
    assert same_bits(parts(again), parts(moments))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", NARROW)
def test_storing_rounds_to_the_nearest_value_there_is(
    monkeypatch: pytest.MonkeyPatch, path: str, kind: torch.dtype
) -> None:
    numel = 32 * BLOCK
    values = torch.rand(numel, generator=torch.Generator().manual_seed(3)) ** 6
    values.view(-1, BLOCK)[:, 0] = 1.0  # the scale
    moments = zeros(kind, numel)
    on_path(path, monkeypatch, lambda: kernels.moments_store(moments, -values, values))
    for ratios, loaded, wanted in zip(every_code(), kernels.moments_load(moments), (-values, values), strict=True):
        if kind == torch.bfloat16:
            assert torch.equal(loaded, wanted.bfloat16().float())
            continue
        nearest = (ratios.double()[:, None] - wanted.double()).abs().amin(0)
        # The ratio is off by 2 ulp at most: the inverse is one above, and the product rounds.
        assert ((loaded.double() - wanted).abs() <= nearest + wanted.abs() * 2.0**-21).all()


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("value", [0.7, 0.1003, 3.3e-3, 1.7e-4, 2.0e-5])
def test_rounding_in_an_update_keeps_the_mean(kind: torch.dtype, value: float) -> None:
    """Up with the probability that keeps the mean: a binomial count within six of its standard deviations."""
    numel = 1024 * BLOCK
    grad = torch.full((numel,), value)
    grad.view(-1, BLOCK)[:, 0] = 1.0  # the scale
    moments = zeros(kind, numel, step=7)
    kernels.adamw(torch.zeros(numel), None, moments, grad, [replace(TAKE_GRADIENT, end=numel)])
    exact = grad[1].double(), (grad[1] * grad[1]).double()
    for loaded, wanted in zip(kernels.moments_load(moments), exact, strict=True):
        drawn = loaded.view(-1, BLOCK)[:, 1:].flatten().double()
        if kind == torch.uint8 and loaded.min() > 0 and wanted < every_code()[1][0]:
            assert (drawn == every_code()[1][0]).all()  # the floor that keeps exp_avg_sq from being 0
            continue
        low, high = drawn.min(), drawn.max()
        assert low <= wanted * (1 + 2.0**-21) and wanted <= high * (1 + 2.0**-21)
        gap = high - low
        deviation = gap / 2 / math.sqrt(len(drawn))  # at most, at probability one half
        assert abs(drawn.mean() - wanted) <= 6 * deviation + gap * 2.0**-16 + wanted * 2.0**-21


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_masters_follow_steps_of_much_less_than_half_a_place(kind: torch.dtype) -> None:
    """500 steps of 2^-12 of a place each; to nearest, none would be seen. The count of places is a binomial one."""
    numel, count, place = 256 * BLOCK, 500, 2.0**-7
    weight, moments = torch.full((numel,), 1.0, dtype=torch.bfloat16), zeros(kind, numel)
    for step in range(count):
        # exp_avg is the gradient, 1, and so is the root of exp_avg_sq, exactly, whatever they are stored in.
        segment = replace(TAKE_GRADIENT, end=numel, step_size=-(2.0**-12) * place, eps=0.0)
        kernels.adamw(weight, None, replace(moments, step=step), torch.ones(numel), [segment])
    moved = (weight.double() - 1.0) / place
    wanted = count * 2.0**-12
    assert abs(moved.mean() - wanted) <= 6 * math.sqrt(wanted / numel)


def test_a_bf16_master_and_its_moments_are_rounded_by_different_noise() -> None:
    """Both are half a place from either neighbour: they do not go up together more often than by chance."""
    numel = 1024 * BLOCK
    value = 1.0 + 2.0**-8
    weight, moments = torch.zeros(numel, dtype=torch.bfloat16), zeros(torch.bfloat16, numel, step=3)
    segment = replace(TAKE_GRADIENT, end=numel, step_size=-value, eps=0.0)
    kernels.adamw(weight, None, moments, torch.full((numel,), value), [segment])
    up = [(x > 1.0).double() - (x > 1.0).double().mean() for x in (weight, moments.exp_avg)]
    assert 0.49 < float((weight > 1.0).double().mean()) < 0.51
    assert abs((up[0] * up[1]).mean()) <= 6 * 0.25 / math.sqrt(numel)


@pytest.mark.parametrize("kind", NARROW)
def test_exp_avg_sq_decays_although_each_step_is_less_than_half_a_place(kind: torch.dtype) -> None:
    numel, count = 16 * BLOCK, 1500
    start = torch.rand(numel, generator=torch.Generator().manual_seed(4)) + 0.5
    grad = torch.zeros(numel)
    start.view(-1, BLOCK)[:, 0], grad.view(-1, BLOCK)[:, 0] = 4.0, 2.0  # keeps the scale where it is
    moments = zeros(kind, numel)
    kernels.moments_store(moments, torch.zeros(numel), start)
    before = kernels.moments_load(moments)[1]
    segment = Segment(0, numel, beta2=0.999)
    for step in range(count):
        kernels.adamw(torch.zeros(numel), None, replace(moments, step=step), grad, [segment])
    ratio = (kernels.moments_load(moments)[1].double() / before).view(-1, BLOCK)[:, 1:].flatten()
    assert abs(ratio.mean() - 0.999**count) <= 6 * ratio.std() / math.sqrt(len(ratio)) + count * 2.0**-23
    nearest, decayed = zeros(kind, numel), before * 0.999
    decayed.view(-1, BLOCK)[:, 0] = 4.0
    kernels.moments_store(nearest, torch.zeros(numel), decayed)
    assert torch.equal(kernels.moments_load(nearest)[1], before)  # rounding to nearest would stand still


@pytest.mark.parametrize("path", PATHS)
def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        moments = zeros(torch.uint8, 3 * BLOCK)
        grad = torch.ones(3 * BLOCK)
        grad[BLOCK + 5] = bad
        segment = replace(TAKE_GRADIENT, end=3 * BLOCK)

        def update(moments: Moments = moments, grad: Tensor = grad, segment: Segment = segment) -> Any:
            kernels.adamw(torch.zeros(3 * BLOCK), None, moments, grad, [segment])
            return kernels.moments_load(moments)

        for loaded in on_path(path, monkeypatch, update):
            rows = loaded.view(3, BLOCK)
            assert (rows[1].view(torch.int32) == 0x7FC00000).all()
            assert (rows[0] == 1).all() and (rows[2] == 1).all()


def test_blocks_too_small_for_normal_numbers_become_zero_and_larger_ones_never_divide_by_it() -> None:
    first = torch.zeros(2 * BLOCK)
    first[3], first[BLOCK + 3] = 2.0**-100 * (1 - 2.0**-24), 2.0**-100
    moments = zeros(torch.uint8, 2 * BLOCK)
    kernels.moments_store(moments, first, first)
    exp_avg, exp_avg_sq = kernels.moments_load(moments)
    assert (exp_avg[:BLOCK] == 0).all() and (exp_avg_sq[:BLOCK] == 0).all()
    assert torch.equal(exp_avg[BLOCK:], first[BLOCK:])
    assert exp_avg_sq[BLOCK + 3] == 2.0**-100 and (exp_avg_sq[BLOCK:] > 0).all()


def test_moments_that_fit_no_scheme_are_refused_by_name() -> None:
    weight, grad, segments = torch.zeros(512), torch.zeros(512), [Segment(0, 512)]
    codes, scale = torch.zeros(512, dtype=torch.uint8), torch.zeros(2)
    for moments, message in (
        (Moments(codes, codes), r"exp_avg_scale: only allowed with uint8 moments"),
        (Moments(grad, grad, scale, scale), r"exp_avg_scale: only allowed with uint8 moments, got moments of"),
        (Moments(codes, codes, scale, scale[:1]), r"exp_avg_sq_scale: expected 2 elements"),
        (Moments(codes, grad, scale, scale), r"exp_avg_sq: expected 512 elements of torch.uint8"),
        (
            Moments(codes, codes, scale, scale, origin=128),
            r"blocks of 256 elements, got 512 elements from coordinate 128",
        ),
        (Moments(grad.half(), grad.half()), r"exp_avg: expected 512 elements of torch.float32 or"),
    ):
        with pytest.raises(TypeError, match=message):
            kernels.adamw(weight, None, moments, grad, segments)
    with pytest.raises(ValueError, match=r"begins before 300, where the previous segment ends"):
        kernels.adamw(weight, None, zeros(torch.uint8, 512), grad, [Segment(0, 300), Segment(299, 512)])
