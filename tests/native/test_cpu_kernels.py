"""The C kernels of every instruction set against each other and against independent references."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("native")
try:
    NATIVE = native.load()
except native.NativeUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)
ffi, lib = NATIVE.ffi, NATIVE.lib

NUMELS = [1, 7, 15, 16, 17, 63, 64, 65, 1023, 4095, 4096, 4097, 12289]
STORAGE = {lib.ZN_F32: np.uint32, lib.ZN_BF16: np.uint16, lib.ZN_F16: np.uint16}
SPECIAL_BITS = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x00000001]
SPECIAL_BITS += [0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7F8000, 0x33000000, 0x33000001, 0x387FC000, 0x477FF000]


def supported_isas() -> list[str]:
    isas = [isa for isa in ("scalar", "avx2", "avx512") if lib.zn_cpu_isa_select(isa.encode()) == 0]
    lib.zn_cpu_isa_select(b"best")
    return isas


WIDE_ISAS = [isa for isa in supported_isas() if isa != "scalar"] or [
    pytest.param("none", marks=pytest.mark.skip(reason="this CPU has the scalar kernels only"))
]


@pytest.fixture(autouse=True)
def best_isa_afterwards() -> Iterator[None]:
    yield
    assert lib.zn_cpu_isa_select(b"best") == 0


def pointer(array: np.ndarray | None, ctype: str = "void *") -> Any:
    return ffi.NULL if array is None else ffi.cast(ctype, array.ctypes.data)


def samples(numel: int, seed: int) -> np.ndarray:
    """fp32 values of all magnitudes, every special pattern among them once there is room."""
    random = np.random.default_rng(seed)
    values = (random.standard_normal(numel) * 10.0 ** random.integers(-42, 30, numel)).astype(np.float32)
    where = random.permutation(numel)[: len(SPECIAL_BITS)]
    values.view(np.uint32)[where] = np.array(SPECIAL_BITS, np.uint32)[: len(where)]
    return values


def stored(values: np.ndarray, dtype: int) -> np.ndarray:
    """`values` as `dtype`, by this test's own truncation: any bit pattern will do as an input."""
    if dtype == lib.ZN_F32:
        return values.copy()
    if dtype == lib.ZN_BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16).view(np.uint16)


def segments(numel: int) -> Any:
    """AdamW, a skipped run, Adam with L2, and a gap that belongs to nobody."""
    cuts = [0, numel // 3, numel // 2, numel - numel // 5, numel]
    table = ffi.new("zn_segment[]", 3)
    for row, (begin, end) in zip(table, [cuts[0:2], cuts[1:3], cuts[3:5]], strict=True):
        row.begin, row.end = begin, end
        row.step_size, row.decay, row.eps = 3e-3, 1.0 - 1e-4, 1e-8
        row.beta1, row.one_minus_beta1, row.beta2, row.one_minus_beta2 = 0.9, 0.1, 0.95, 0.05
    table[1].skip = 1
    table[2].decay, table[2].l2 = 1.0, 0.01
    return table


MASTERS = {
    "in_weight": (lib.ZN_F32, None),
    "split": (lib.ZN_BF16, np.int16),
    "beside_bf16": (lib.ZN_BF16, np.float32),
    "beside_f16": (lib.ZN_F16, np.float32),
}


def fp32_moments(exp_avg: np.ndarray, exp_avg_sq: np.ndarray) -> Any:
    values = {"exp_avg": pointer(exp_avg), "exp_avg_sq": pointer(exp_avg_sq), "numel": len(exp_avg)}
    return ffi.new("zn_moments *", {"kind": lib.ZN_MOMENTS_F32, **values})


def adamw_steps(isa: str, master_kind: str, grad_dtype: int, numel: int, threads: int = 1) -> list[np.ndarray]:
    """Bytes of weight, master and both moments after three updates of the same inputs."""
    weight_dtype, master_type = MASTERS[master_kind]
    weight = stored(samples(numel, 1), weight_dtype)
    master = None if master_type is None else samples(numel, 2).view(np.int32).astype(master_type)
    exp_avg, exp_avg_sq = samples(numel, 3), samples(numel, 4)
    assert lib.zn_cpu_isa_select(isa.encode()) == 0
    for step in range(3):
        grad = stored(samples(numel, 10 + step), grad_dtype)
        status = lib.zn_cpu_adamw(
            *(pointer(weight), weight_dtype, pointer(master), int(master_type is np.float32)),
            *(fp32_moments(exp_avg, exp_avg_sq), pointer(grad), grad_dtype, segments(numel), 3, 0.37, threads),
        )
        assert status == 0
    arrays = [weight, exp_avg, exp_avg_sq] + ([] if master is None else [master])
    return [array.view(np.uint8) for array in arrays]


@pytest.mark.parametrize("isa", WIDE_ISAS)
@pytest.mark.parametrize("grad_dtype", list(STORAGE))
@pytest.mark.parametrize("master_kind", list(MASTERS))
def test_every_isa_updates_like_scalar_bit_for_bit(isa: str, grad_dtype: int, master_kind: str) -> None:
    for numel in NUMELS:
        ours = adamw_steps(isa, master_kind, grad_dtype, numel)
        reference = adamw_steps("scalar", master_kind, grad_dtype, numel)
        for index, (left, right) in enumerate(zip(ours, reference, strict=True)):
            assert np.array_equal(left, right), (numel, index)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_an_update_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    numel = 9 * 65536 + 4097  # enough for every thread to get a part
    ours = adamw_steps("scalar", "split", lib.ZN_BF16, numel, threads)
    for left, right in zip(ours, adamw_steps("scalar", "split", lib.ZN_BF16, numel), strict=True):
        assert np.array_equal(left, right)


def test_a_range_that_starts_late_is_cut_into_parts_without_gap_or_overlap() -> None:
    numel, begin = 40 * 65536, 4096 + 5
    table = segments(numel)
    table[0].begin, table[0].end = begin, numel
    results = []
    for threads in (1, 5, 300):
        weight, exp_avg, exp_avg_sq = (np.ones(numel, np.float32) for _ in range(3))
        grad = np.full(numel, 0.5, np.float32)
        moments = fp32_moments(exp_avg, exp_avg_sq)
        assert lib.zn_cpu_adamw(pointer(weight), 0, ffi.NULL, 0, moments, pointer(grad), 0, table, 1, 1.0, threads) == 0
        results.append(weight)
    assert (results[0][:begin] == 1).all() and (results[0][begin:] == results[0][begin]).all()
    assert results[0][begin] < 1
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


def casts(isa: str, out_dtype: int, in_dtype: int, numel: int, scale: float) -> np.ndarray:
    out, source = np.zeros(numel, STORAGE[out_dtype]), stored(samples(numel, 5), in_dtype)
    assert lib.zn_cpu_isa_select(isa.encode()) == 0
    assert lib.zn_cpu_cast(pointer(out), out_dtype, pointer(source), in_dtype, numel, scale, 2) == 0
    return out


@pytest.mark.parametrize("isa", WIDE_ISAS)
@pytest.mark.parametrize("in_dtype", list(STORAGE))
@pytest.mark.parametrize("out_dtype", list(STORAGE))
def test_every_isa_casts_like_scalar_bit_for_bit(isa: str, in_dtype: int, out_dtype: int) -> None:
    for numel in NUMELS:
        for scale in (1.0, 0.3):
            ours = casts(isa, out_dtype, in_dtype, numel, scale)
            assert np.array_equal(ours, casts("scalar", out_dtype, in_dtype, numel, scale)), (numel, scale)


@pytest.mark.parametrize("isa", supported_isas())
def test_every_binary16_pattern_becomes_the_float_that_numpy_says(isa: str) -> None:
    halves, out = np.arange(1 << 16, dtype=np.uint16), np.zeros(1 << 16, np.float32)
    assert lib.zn_cpu_isa_select(isa.encode()) == 0
    assert lib.zn_cpu_cast(pointer(out), lib.ZN_F32, pointer(halves), lib.ZN_F16, 1 << 16, 1.0, 1) == 0
    expected = halves.view(np.float16).astype(np.float32)
    expected[np.isnan(expected)] = np.nan
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("isa", supported_isas())
def test_rounding_to_binary16_is_to_nearest_even_around_every_half(isa: str) -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = ((halves[1:].astype(np.float64) + halves[:-1]) / 2).astype(np.float32)
    points = np.concatenate(
        [halves, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(9e9))]
    )
    points = np.concatenate([points, -points, np.array([65519.996, 65520, 65536, 1e30, 1e-45], np.float32)])
    out = np.zeros(len(points), np.uint16)
    assert lib.zn_cpu_isa_select(isa.encode()) == 0
    assert lib.zn_cpu_cast(pointer(out), lib.ZN_F16, pointer(points), lib.ZN_F32, len(points), 1.0, 1) == 0
    with np.errstate(over="ignore"):
        assert np.array_equal(out, points.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("isa", WIDE_ISAS)
@pytest.mark.parametrize("first_dtype", [None, *STORAGE])
@pytest.mark.parametrize("in_dtype", list(STORAGE))
def test_every_isa_accumulates_like_scalar_bit_for_bit(isa: str, first_dtype: int | None, in_dtype: int) -> None:
    for numel in NUMELS:
        first = None if first_dtype is None else stored(samples(numel, 6), first_dtype)
        source, sums = stored(samples(numel, 7), in_dtype), []
        for name in (isa, "scalar"):
            assert lib.zn_cpu_isa_select(name.encode()) == 0
            sums.append(samples(numel, 8))
            destination = pointer(sums[-1], "float *")
            status = lib.zn_cpu_accumulate(
                destination, pointer(first), first_dtype or 0, pointer(source), in_dtype, numel, 2
            )
            assert status == 0
        assert np.array_equal(sums[0].view(np.uint32), sums[1].view(np.uint32)), numel


def split_and_join(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weight, remainder = np.empty(len(bits), np.uint16), np.empty(len(bits), np.int16)
    joined = np.empty(len(bits), np.uint32)
    kept = pointer(remainder, "int16_t *")
    assert lib.zn_cpu_split(pointer(weight), kept, pointer(bits, "float *"), len(bits), 2) == 0
    assert lib.zn_cpu_join(pointer(joined, "float *"), pointer(weight), kept, len(bits), 2) == 0
    return weight, joined


EDGES = np.array([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234, 0xABCD], np.uint32)
"""Low halves of fp32 values around the places where rounding turns."""


@pytest.mark.parametrize("low", [EDGES, pytest.param(np.arange(1 << 16, dtype=np.uint32), marks=pytest.mark.slow)])
def test_the_split_master_restores_every_fp32_bit_pattern(low: np.ndarray) -> None:
    for top in range(1 << 8):
        bits = (((np.arange(1 << 8, dtype=np.uint32) + np.uint32(top << 8)) << 16)[:, None] + low).reshape(-1)
        _, joined = split_and_join(bits)
        expected = bits
        if top & 0x7F == 0x7F:
            expected = np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC00000), bits)
        assert np.array_equal(joined, expected), hex(top)


@pytest.mark.parametrize("isa", supported_isas())
def test_the_split_weight_rounds_half_away_from_zero_on_every_isa(isa: str) -> None:
    assert lib.zn_cpu_isa_select(isa.encode()) == 0
    bits = np.array([0x3F807FFF, 0x3F808000, 0x3F808001, 0xBF808000, 0xBF818000, 0x7F800000, 0xFFFFFFFF], np.uint32)
    weight, joined = split_and_join(bits)
    assert weight.tolist() == [0x3F80, 0x3F81, 0x3F81, 0xBF81, 0xBF82, 0x7F80, 0x7FC0]
    assert joined.tolist() == [*bits[:-1].tolist(), 0x7FC00000]
    for numel in NUMELS:
        values = samples(numel, 9).view(np.uint32)
        values = np.where((values & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC00000), values)
        assert np.array_equal(split_and_join(values)[1], values)


def block_sums(source: np.ndarray, dtype: int, threads: int = 1) -> np.ndarray:
    sums = np.full((-(-len(source) // 4096), 2), -1, np.int64)
    assert lib.zn_cpu_block_sumsq(pointer(sums, "zn_square_sum *"), pointer(source), dtype, len(source), threads) == 0
    return sums


def plain_square_sum(values: list[float]) -> list[int]:
    """High digit with its tag, and low digit of a sum of squares, as the note in zn_square_sum.h defines them."""
    exponent = math.frexp(max(map(abs, values)))[1]
    bin_ = 2 * exponent // 48 if any(values) else -7
    digits = [0, 0]
    for value in values:
        rest = Fraction(value) ** 2
        for place in (0, 1):
            unit = Fraction(2) ** (48 * (bin_ - place))
            digit = round(rest / unit)  # halves go to the even neighbour
            digits[place] += digit
            rest -= digit * unit
    return [(bin_ + 7 << 59) + digits[0], digits[1]]


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("dtype", list(STORAGE))
def test_block_sums_are_the_documented_digits(isa: str, dtype: int) -> None:
    assert lib.zn_cpu_isa_select(isa.encode()) == 0
    random = np.random.default_rng(3)
    for numel in NUMELS:
        values = (random.standard_normal(numel) * 10.0 ** random.integers(-4, 4, numel)).astype(np.float32)
        source = stored(values, dtype)
        widened = {
            lib.ZN_F32: lambda x: x,
            lib.ZN_BF16: lambda x: (x.astype(np.uint32) << 16).view(np.float32),
            lib.ZN_F16: lambda x: x.view(np.float16).astype(np.float32),
        }[dtype](source)
        expected = [plain_square_sum(widened[i : i + 4096].tolist()) for i in range(0, numel, 4096)]
        assert block_sums(source, dtype).tolist() == expected


@pytest.mark.parametrize("isa", supported_isas())
def test_block_sums_hold_the_squares_of_every_magnitude(isa: str) -> None:
    """From the smallest subnormal to the largest number, alone and beside a larger one; halves of a unit are there."""
    assert lib.zn_cpu_isa_select(isa.encode()) == 0
    numbers = [math.ldexp(mantissa, exponent) for exponent in range(-149, 128, 3) for mantissa in (1.0, 1.25, 1.5)]
    numbers += [0.0, 2.0**-149, 2.0**-126, (2 - 2.0**-23) * 2.0**127]
    for number in numbers:
        for beside in (0.0, 2.0**-100, 2.0**-25, 1.0, 2.0**24, 2.0**120):
            values = np.array([number, -number, beside], np.float32)
            assert block_sums(values, lib.ZN_F32).tolist() == [plain_square_sum(values.tolist())], (number, beside)


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("dtype", list(STORAGE))
def test_block_sums_count_every_inf_and_nan_in_its_block(isa: str, dtype: int) -> None:
    assert lib.zn_cpu_isa_select(isa.encode()) == 0
    values = np.ones(3 * 4096 + 5, np.float32)
    values[[4096, 4097, 8191]] = [np.inf, -np.inf, np.nan]
    values[-1] = np.inf
    ones = [(7 << 59) + 4096, 0]
    assert block_sums(stored(values, dtype), dtype).tolist() == [ones, [(15 << 59) + 3, 0], ones, [(15 << 59) + 1, 0]]


def test_block_sums_do_not_depend_on_the_number_of_threads() -> None:
    source = np.random.default_rng(4).standard_normal(5 * 65536 + 17).astype(np.float32)
    assert np.array_equal(block_sums(source, lib.ZN_F32), block_sums(source, lib.ZN_F32, 4))


@pytest.mark.parametrize("isa", supported_isas())
def test_crc32c_gives_the_published_check_values(isa: str) -> None:
    assert lib.zn_cpu_isa_select(isa.encode()) == 0
    vectors = {  # RFC 3720, B.4, and the catalogue's check value
        b"": 0,
        b"123456789": 0xE3069283,
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(range(31, -1, -1)): 0x113FDB5C,
    }
    for text, crc in vectors.items():
        assert lib.zn_cpu_crc32c(0, ffi.from_buffer(text), len(text)) == crc
        head = lib.zn_cpu_crc32c(0, ffi.from_buffer(text), len(text) // 3)
        rest = text[len(text) // 3 :]
        assert lib.zn_cpu_crc32c(head, ffi.from_buffer(rest), len(rest)) == crc


def test_selecting_an_unknown_isa_is_refused_and_changes_nothing() -> None:
    assert lib.zn_cpu_isa_select(b"scalar") == 0
    assert lib.zn_cpu_isa_select(b"sse9") == -errno.EINVAL
    assert ffi.string(lib.zn_cpu_isa()) == b"scalar"
    assert lib.zn_cpu_isa_select(b"best") == 0
    assert ffi.string(lib.zn_cpu_isa()).decode() == supported_isas()[-1]


def test_arguments_that_fit_no_scheme_are_refused_before_anything_is_written() -> None:
    data = np.ones(4, np.float32)
    floats, table = pointer(data, "float *"), ffi.new("zn_segment[]", [{"begin": 0, "end": 4, "step_size": 1.0}])
    moments = fp32_moments(data, data)

    def update(weight_dtype: int, master: Any, master_f32: int, grad_dtype: int = 0, threads: int = 1) -> int:
        return lib.zn_cpu_adamw(
            *(floats, weight_dtype, master, master_f32, moments, floats, grad_dtype, table, 1, 1.0, threads)
        )

    assert update(7, ffi.NULL, 0) == -errno.EINVAL
    assert update(lib.ZN_F32, floats, 1) == -errno.EINVAL
    assert update(lib.ZN_F16, ffi.NULL, 0) == -errno.EINVAL
    planes, of_bf16 = ffi.new("float *[3]"), (floats, lib.ZN_BF16, ffi.NULL, 0)  # only Adam's may be their own masters
    assert lib.zn_cpu_update(lib.ZN_SGD, *of_bf16, planes, floats, 0, 4, table, 1, 1.0, 1) == -errno.EINVAL
    assert update(lib.ZN_F16, floats, 0) == -errno.EINVAL
    assert update(lib.ZN_F32, ffi.NULL, 0, grad_dtype=3) == -errno.EINVAL
    assert update(lib.ZN_F32, ffi.NULL, 0, threads=0) == -errno.EINVAL
    assert lib.zn_cpu_cast(floats, 3, floats, 0, 4, 1.0, 1) == -errno.EINVAL
    assert lib.zn_cpu_cast(floats, 0, floats, 0, -1, 1.0, 1) == -errno.EINVAL
    assert lib.zn_cpu_accumulate(floats, ffi.NULL, 0, ffi.NULL, 0, 4, 1) == -errno.EINVAL
    assert lib.zn_cpu_block_sumsq(ffi.NULL, floats, 0, 4, 1) == -errno.EINVAL
    table[0].begin = 5
    assert update(lib.ZN_F32, ffi.NULL, 0) == -errno.EINVAL
    table[0].begin, table[0].end = 0, 5
    assert update(lib.ZN_F32, ffi.NULL, 0) == -errno.EINVAL
    table[0].end = 4
    for name, wrong in (("kind", 3), ("numel", -1), ("origin", -256), ("exp_avg_sq", ffi.NULL)):
        good = getattr(moments, name)
        setattr(moments, name, wrong)
        assert update(lib.ZN_F32, ffi.NULL, 0) == -errno.EINVAL, name
        setattr(moments, name, good)
    moments.kind = lib.ZN_MOMENTS_8BIT  # 4 elements are no block, and there are no scales
    assert update(lib.ZN_F32, ffi.NULL, 0) == -errno.EINVAL
    assert data.tolist() == [1.0] * 4
