"""Narrow moments in plain torch: the same operations and bits as native/include/zn_moments.h.

uint32 arithmetic is done in int64 and cut to 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels.moments import MOMENTS_BLOCK_NUMEL, Moments

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
