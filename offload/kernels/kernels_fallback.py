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

from offload.kernels import moments_fallback
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
        moments_fallback.round_masters(weight, values, moments, begin)
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
        exp_avg, exp_avg_sq = moments_fallback.load(moments, tile)
        touched = torch.zeros(tile.stop - tile.start, dtype=torch.bool, device=weight.device)
        for begin, end, segment in runs:
            run, in_tile = slice(begin, end), slice(begin - tile.start, end - tile.start)
            part = None if master is None else master[run]
            values = _update(weight[run], part, (exp_avg[in_tile], exp_avg_sq[in_tile]), grad[run], segment, grad_scale)
            _store_master(weight[run], part, values, moments, begin)
            touched[in_tile] = True
        moments_fallback.store(moments, tile, exp_avg, exp_avg_sq, touched)


def moments_load(exp_avg: Tensor, exp_avg_sq: Tensor, moments: Moments) -> None:
    for tile in tiles_of(0, exp_avg.numel(), TILE_NUMEL):
        for target, values in zip((exp_avg, exp_avg_sq), moments_fallback.load(moments, tile), strict=True):
            _store(target[tile], values)


def moments_store(moments: Moments, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    for tile in tiles_of(0, exp_avg.numel(), TILE_NUMEL):
        if moments.is_quantised:
            everywhere = torch.ones(tile.stop - tile.start, dtype=torch.bool, device=exp_avg.device)
            moments_fallback.store(moments, tile, exp_avg[tile], exp_avg_sq[tile], everywhere, nearest=True)
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
