"""The kernels in plain torch, for machines where no native library can be built.

Each function does what the one of its name in `kernels` says. They do the same operations in the same order, each
rounded to fp32 on its own, so the bits equal the native ones. All kernels work in tiles: the scratch memory is a few
MiB for tensors of any length.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from offload.kernels.checksums import POLYNOMIAL, combine
from offload.kernels.moments import MOMENTS_BLOCK_NUMEL, Moments
from offload.kernels.segment import Segment
from offload.kernels.square_sums import BIN_MIN, DIGIT_BITS, LOW, TAG_NONFINITE, TAG_SHIFT, TAGGED, row_count
from offload.kernels.tile_threads import tiles_of
from offload.sizes import BLOCK_NUMEL

TILE_NUMEL = 32 * BLOCK_NUMEL
DEVICE_TILE_NUMEL = 256 * BLOCK_NUMEL
"""Larger tiles need fewer launches; the scratch memory is still no more than a few MiB."""
CRC_LANES = 4096


def to_fp32(value: float) -> float:
    """`value` rounded to the nearest fp32, the type in the C structs."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _canonical(values: Tensor) -> Tensor:
    """Replace every NaN by the canonical one: payloads depend on operand order."""
    return values.masked_fill_(values.isnan(), float("nan"))


def _store(out: Tensor, values: Tensor) -> None:
    out.copy_(values)
    _canonical(out)


def _split(weight: Tensor, remainder: Tensor, values: Tensor) -> None:
    bits = _canonical(values).view(torch.int32)
    weight.view(torch.int16).copy_((bits + 0x8000) >> 16)
    remainder.copy_(bits)  # int32 -> int16 keeps the low bits, which is the signed remainder


def _join(weight: Tensor, remainder: Tensor) -> Tensor:
    bits = weight.view(torch.int16).to(torch.int32) << 16
    joined = (bits + remainder.to(torch.int32)).view(torch.float32)
    # Somebody has set a weight to 0 or inf since it was split: the remainder is an older weight's.
    return torch.where(joined.isnan(), bits.view(torch.float32), joined)


def _load_master(weight: Tensor, master: Tensor | None) -> Tensor:
    if master is not None and master.dtype == torch.int16:
        return _join(weight, master)
    return (weight if master is None else master).to(torch.float32, copy=True)


def _store_master(weight: Tensor, master: Tensor | None, values: Tensor, moments: Moments, begin: int) -> None:
    """Store new masters. For bf16 masters, `moments` and `begin` (the weights' first element) give the random bits."""
    if master is None and weight.dtype == torch.bfloat16:
        round_masters(weight, values, moments, begin)
        return
    if master is not None and master.dtype == torch.int16:
        _split(weight, master, values)
        return
    if master is not None:
        _store(master, values)
    _store(weight, values)


def _sqrt(values: Tensor) -> Tensor:
    """Correctly rounded square root: torch's own for fp32 on the CPU (MKL's) is off by an ulp for every fifth value.

    Rounding to fp64 first is safe: no root of an fp32 number lies close enough to the middle of two fp32 numbers.
    """
    return values.to(torch.float64).sqrt_().to(torch.float32)


def _update(
    weight: Tensor,
    master: Tensor | None,
    moments: tuple[Tensor, Tensor],
    grad: Tensor,
    segment: Segment,
    grad_scale: float,
) -> Tensor:
    """The new fp32 masters of one run of elements; `moments` are fp32, and updated in place."""
    m, v = moments
    step_size, eps, decay, l2 = (
        to_fp32(x) for x in (segment.step_size_hat, segment.eps_hat, segment.decay, segment.l2)
    )
    beta2, one_minus_beta1 = to_fp32(segment.beta2), to_fp32(segment.one_minus_beta1)
    one_minus_beta2, scale = to_fp32(segment.one_minus_beta2), to_fp32(grad_scale)
    w = _load_master(weight, master)
    g = grad.to(torch.float32) * scale
    if l2 != 0.0:
        g.add_(w * l2)
    if decay != 1.0:
        w.mul_(decay)
    m.add_((g - m).mul_(one_minus_beta1))
    v.mul_(beta2).add_((g * g).mul_(one_minus_beta2))
    update = m / _sqrt(v).add_(eps)
    w.sub_(update.mul_(step_size))
    _canonical(m)
    _canonical(v)
    return w


def adamw(
    weight: Tensor,
    master: Tensor | None,
    moments: Moments,
    grad: Tensor,
    segments: Sequence[Segment],
    grad_scale: float,
) -> None:
    first = min(segment.begin for segment in segments) // MOMENTS_BLOCK_NUMEL * MOMENTS_BLOCK_NUMEL
    for tile in tiles_of(first, weight.numel(), TILE_NUMEL):
        runs = [(max(s.begin, tile.start), min(s.end, tile.stop), s) for s in segments if not s.skip]
        runs = [(begin, end, segment) for begin, end, segment in runs if begin < end]
        if not runs:
            continue
        exp_avg, exp_avg_sq = load(moments, tile)
        touched = torch.zeros(tile.stop - tile.start, dtype=torch.bool, device=weight.device)
        for begin, end, segment in runs:
            run, in_tile = slice(begin, end), slice(begin - tile.start, end - tile.start)
            part = None if master is None else master[run]
            values = _update(weight[run], part, (exp_avg[in_tile], exp_avg_sq[in_tile]), grad[run], segment, grad_scale)
            _store_master(weight[run], part, values, moments, begin)
            touched[in_tile] = True
        store(moments, tile, exp_avg, exp_avg_sq, touched)


def moments_load(exp_avg: Tensor, exp_avg_sq: Tensor, moments: Moments) -> None:
    for tile in tiles_of(0, exp_avg.numel(), TILE_NUMEL):
        for target, values in zip((exp_avg, exp_avg_sq), load(moments, tile), strict=True):
            _store(target[tile], values)


def moments_store(moments: Moments, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    for tile in tiles_of(0, exp_avg.numel(), TILE_NUMEL):
        if moments.is_quantised:
            everywhere = torch.ones(tile.stop - tile.start, dtype=torch.bool, device=exp_avg.device)
            store(moments, tile, exp_avg[tile], exp_avg_sq[tile], everywhere, nearest=True)
        else:
            _store(moments.exp_avg[tile], exp_avg[tile])
            _store(moments.exp_avg_sq[tile], exp_avg_sq[tile])


def cast(out: Tensor, src: Tensor, scale: float) -> None:
    for tile in tiles_of(0, src.numel(), TILE_NUMEL):
        _store(out[tile], src[tile].to(torch.float32) * to_fp32(scale))


def accumulate(total: Tensor, src: Tensor, first: Tensor) -> None:
    for tile in tiles_of(0, src.numel(), TILE_NUMEL):
        _store(total[tile], first[tile].to(torch.float32) + src[tile].to(torch.float32))


def split(weight: Tensor, remainder: Tensor, src: Tensor) -> None:
    for tile in tiles_of(0, src.numel(), TILE_NUMEL):
        _split(weight[tile], remainder[tile], src[tile].clone())


def join(out: Tensor, weight: Tensor, remainder: Tensor) -> None:
    for tile in tiles_of(0, out.numel(), TILE_NUMEL):
        out.view(torch.int32)[tile].copy_(_join(weight[tile], remainder[tile]).view(torch.int32))


def block_sumsq(sums: Tensor, src: Tensor) -> None:
    """See the note in native/include/zn_square_sum.h."""
    for tile in tiles_of(0, src.numel(), TILE_NUMEL):
        values = src[tile].to(torch.float64)
        blocks = row_count(values.numel())
        # The zeros of the padding change no digit.
        rows = torch.nn.functional.pad(values, (0, blocks * BLOCK_NUMEL - values.numel())).view(blocks, BLOCK_NUMEL)
        nonfinite = rows.isfinite().logical_not_().sum(1)
        rows.masked_fill_(nonfinite.bool()[:, None], 0.0)
        largest = rows.abs().amax(1)
        bins = torch.frexp(largest).exponent.to(torch.int64).mul_(2).floor_divide_(DIGIT_BITS)
        bins.masked_fill_(largest == 0, BIN_MIN)
        above, below = _anchors(bins), _anchors(bins - 1)
        squares = rows.square_()
        cut = squares + above
        remainder = squares.sub_(cut - above)
        high = (cut.view(torch.int64) - above.view(torch.int64)).sum(1)
        target = sums[tile.start // BLOCK_NUMEL :][:blocks]
        target[:, TAGGED] = torch.where(
            nonfinite > 0, TAG_NONFINITE << TAG_SHIFT | nonfinite, bins - BIN_MIN << TAG_SHIFT | high
        )
        target[:, LOW] = (remainder.add_(below).view(torch.int64) - below.view(torch.int64)).sum(1)


def _anchors(bins: Tensor) -> Tensor:
    """(blocks, 1) fp64: 1.5 * 2^52 units of the digits of `bins`; adding it to a number cuts off a digit."""
    return ((bins * DIGIT_BITS + 52 + 1023) << 52 | 1 << 51).view(torch.float64)[:, None]


def cast_sumsq(out: Tensor, sums: Tensor, src: Tensor, scale: float) -> None:
    cast(out, src, scale)
    block_sumsq(sums, out)


def reduce_ranks(stored: Tensor, sources: Sequence[Tensor], scale: float, add: bool) -> None:
    """Without the block sums. GPUs have no other implementation."""
    tile_numel = TILE_NUMEL if stored.device.type == "cpu" else DEVICE_TILE_NUMEL
    for tile in tiles_of(0, stored.numel(), tile_numel):
        total = sources[0][tile].to(torch.float32, copy=True)
        for source in sources[1:]:
            total.add_(source[tile].to(torch.float32))
        total.mul_(to_fp32(scale))
        _store(stored[tile], stored[tile] + total if add else total)


@functools.cache
def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (np.uint32(POLYNOMIAL) * (table & np.uint32(1)))
    return table


def _crc_bytes(states: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Advance one CRC state per row of `columns` [rows, bytes] by the bytes of that row."""
    table = _crc_table()
    for column in columns.T:
        states = (states >> np.uint32(8)) ^ table[(states ^ column) & np.uint32(0xFF)]
    return states


def crc32c(data: np.ndarray, crc: int) -> int:
    """CRC-32C of a flat uint8 array, continued from `crc`.

    The array is cut into rows, and the checksums of all rows are computed in parallel and then combined.
    """
    state = crc ^ 0xFFFFFFFF
    row_bytes = len(data) // CRC_LANES
    body_bytes = row_bytes * CRC_LANES
    if row_bytes:
        rows = _crc_bytes(np.zeros(CRC_LANES, np.uint32), data[:body_bytes].reshape(CRC_LANES, row_bytes))
        for row in rows.tolist():
            state = combine(state, row, row_bytes)
    tail = _crc_bytes(np.array([state], np.uint32), data[body_bytes:].reshape(1, -1))
    return int(tail[0]) ^ 0xFFFFFFFF


# ---- moments fallback ----------------------------------------------------------------------------------------------
# Narrow moments in plain torch: the same operations and bits as native/include/zn_moments.h.
#
# uint32 arithmetic is done in int64 and cut to 32 bits.


MASK = 0xFFFFFFFF
STEP_FINE, STEP_COARSE = 19, 20
KNEE_CODE_AVG, KNEE_CODE_SQ = 63, 127
KNEE_AVG, KNEE_SQ = (127 - 4) << 23, (127 - 8) << 23
LEAST_AVG = KNEE_AVG - ((KNEE_CODE_AVG - 1) << STEP_COARSE)
LEAST_AVG_INVERSE = 2.0**28 / 1.25
ONE_BITS, INF_BITS, SCALE_MIN_BITS = 0x3F800000, 0x7F800000, (127 - 100) << 23
NEAREST = 0x8000


def _hash(x: Tensor) -> Tensor:
    """`zn_hash` of int64 values below 2^32. The second factor is taken as negative, so that no product overflows."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * (0x846CA68B - (1 << 32))) & MASK
    return x ^ (x >> 16)


def _counters(moments: Moments, begin: int, end: int) -> Tensor:
    """The numbers that are hashed for elements [begin, end), int64 below 2^32."""
    key = int(_hash(torch.tensor((moments.step + 0x9E3779B9) & MASK, device="cpu")))
    first = moments.origin + begin + key
    return torch.arange(first, first + end - begin, device=moments.exp_avg.device) & MASK


def _noise(moments: Moments, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """16 random bits each for exp_avg and exp_avg_sq of elements [begin, end)."""
    hashed = _hash(_counters(moments, begin, end))
    return hashed & 0xFFFF, hashed >> 16


def round_masters(weight: Tensor, masters: Tensor, moments: Moments, begin: int) -> None:
    """Store fp32 masters of elements from `begin` on as bf16 weights, rounded up or down at random."""
    noise = _hash(_counters(moments, begin, begin + weight.numel()) ^ MASK) >> 16
    weight.copy_(_round_bf16(masters, noise))


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).to(torch.int64) & MASK


def _floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _with_canonical_nan(values: Tensor) -> Tensor:
    return values.masked_fill(values.isnan(), float("nan"))


def _ratio_of_code(code: Tensor, knee_code: int, knee: int) -> Tensor:
    fine = code + code.clamp(max=knee_code)
    return (fine << STEP_FINE) + (knee - (knee_code << STEP_COARSE))


def _decode_avg(codes: Tensor) -> Tensor:
    code = codes.to(torch.int64)
    ratio = _floats(_ratio_of_code(code & 0x7F, KNEE_CODE_AVG, KNEE_AVG)).masked_fill_((code & 0x7F) == 0, 0.0)
    return torch.where(code >= 0x80, -ratio, ratio)


def _decode_sq(codes: Tensor) -> Tensor:
    return _floats(_ratio_of_code(codes.to(torch.int64), KNEE_CODE_SQ, KNEE_SQ))


def _code_of_ratio(ratio: Tensor, knee_code: int, knee: int, noise: Tensor | int) -> Tensor:
    excess = ratio - knee
    fine = torch.maximum(excess, excess >> (STEP_COARSE - STEP_FINE))
    return ((fine + noise * (1 << (STEP_FINE - 16))) >> STEP_FINE) + knee_code


def _scale_of(blocks: Tensor) -> Tensor:
    """One scale per row of `blocks` (B, 256) fp32."""
    largest = (_bits(blocks) & 0x7FFFFFFF).amax(1)
    scale = _floats(largest.masked_fill(largest < SCALE_MIN_BITS, 0))
    return scale.masked_fill_(largest >= INF_BITS, float("nan"))


def _ratio(blocks: Tensor, scale: Tensor) -> Tensor:
    ones = torch.ones_like(scale)
    inverse = _floats(_bits(ones / scale) + 1).masked_fill_((scale > 0).logical_not_(), 0.0)
    return (_bits(blocks * inverse[:, None]) & 0x7FFFFFFF).clamp_(max=ONE_BITS)


def _encode_avg(blocks: Tensor, scale: Tensor, noise: Tensor | int) -> Tensor:
    ratio = _ratio(blocks, scale)
    code = _code_of_ratio(ratio, KNEE_CODE_AVG, KNEE_AVG, noise)
    least = (_floats(ratio) * LEAST_AVG_INVERSE).to(torch.int64) > noise
    code = torch.where(ratio < LEAST_AVG, least.to(torch.int64), code)
    return (code | (_bits(blocks) >> 31 << 7)).to(torch.uint8)


def _encode_sq(blocks: Tensor, scale: Tensor, noise: Tensor | int) -> Tensor:
    ratio = _ratio(blocks, scale)
    return _code_of_ratio(ratio, KNEE_CODE_SQ, KNEE_SQ, noise).clamp_(min=0).to(torch.uint8)


def _round_bf16(values: Tensor, noise: Tensor) -> Tensor:
    upper = ((_bits(values) + noise) >> 16).masked_fill_(values.isnan(), 0x7FC0)
    return upper.to(torch.int16).view(torch.bfloat16)


def load(moments: Moments, tile: slice) -> tuple[Tensor, Tensor]:
    """Elements `tile` as fp32: views of fp32 moments, copies of narrow ones. Tiles of codes must be whole blocks."""
    if moments.exp_avg_scale is None or moments.exp_avg_sq_scale is None:
        return moments.exp_avg[tile].to(torch.float32), moments.exp_avg_sq[tile].to(torch.float32)
    blocks = slice(tile.start // MOMENTS_BLOCK_NUMEL, tile.stop // MOMENTS_BLOCK_NUMEL)
    pairs = (
        (_decode_avg(moments.exp_avg[tile]), moments.exp_avg_scale[blocks]),
        (_decode_sq(moments.exp_avg_sq[tile]), moments.exp_avg_sq_scale[blocks]),
    )
    exp_avg, exp_avg_sq = (
        _with_canonical_nan(ratio.view(-1, MOMENTS_BLOCK_NUMEL) * scale[:, None]).view(-1) for ratio, scale in pairs
    )
    return exp_avg, exp_avg_sq


def store(
    moments: Moments, tile: slice, exp_avg: Tensor, exp_avg_sq: Tensor, touched: Tensor, *, nearest: bool = False
) -> None:
    """Round fp32 values of `tile` back where `touched` (bool, per element); with codes, in whole blocks."""
    if moments.exp_avg.dtype == torch.float32:
        return
    noise_avg, noise_sq = _noise(moments, tile.start, tile.stop)
    if moments.exp_avg_scale is None or moments.exp_avg_sq_scale is None:
        moments.exp_avg[tile] = torch.where(touched, _round_bf16(exp_avg, noise_avg), moments.exp_avg[tile])
        moments.exp_avg_sq[tile] = torch.where(touched, _round_bf16(exp_avg_sq, noise_sq), moments.exp_avg_sq[tile])
        return
    rows = touched.view(-1, MOMENTS_BLOCK_NUMEL).any(1)
    blocks = slice(tile.start // MOMENTS_BLOCK_NUMEL, tile.stop // MOMENTS_BLOCK_NUMEL)
    for values, codes, scales, noise, encode in (
        (exp_avg, moments.exp_avg, moments.exp_avg_scale, noise_avg, _encode_avg),
        (exp_avg_sq, moments.exp_avg_sq, moments.exp_avg_sq_scale, noise_sq, _encode_sq),
    ):
        table = values.view(-1, MOMENTS_BLOCK_NUMEL)
        scale = _scale_of(table)
        new = encode(table, scale, NEAREST if nearest else noise.view(-1, MOMENTS_BLOCK_NUMEL))
        stored = codes[tile].view(-1, MOMENTS_BLOCK_NUMEL)
        stored.copy_(torch.where(rows[:, None], new, stored))
        scales[blocks] = torch.where(rows, scale, scales[blocks])
