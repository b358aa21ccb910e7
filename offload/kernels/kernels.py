"""Optimizer, cast, norm and checksum kernels over flat tensors: native where built, torch elsewhere.

Every function works on flat, contiguous tensors of one device and gives the same bits on every path: scalar, AVX2 and
AVX-512 code, CUDA, and the torch fallback. All NaN are written as the canonical one. CPU calls return when done and
release the GIL; CUDA calls enqueue on the current stream. `threads` is the limit of CPU threads: the result does not
depend on it. Every function raises TypeError: dtype, device, length or layout of a tensor is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.errors import NativeError
from offload.kernels import kernels_fallback as fallback
from offload.kernels.kernel_backend import (
    DTYPES,
    FLOATS,
    backend_for,
    check,
    check_moments,
    check_ranks,
    check_sums,
    check_update,
)
from offload.kernels.moments import Moments
from offload.kernels.segment import Formula, Segment
from offload.sizes import BLOCK_NUMEL

__all__ = [
    "BLOCK_NUMEL",
    "Formula",
    "Moments",
    "Segment",
    "accumulate",
    "adamw",
    "block_sumsq",
    "cast",
    "cast_sumsq",
    "crc32c",
    "isa",
    "join",
    "moments_load",
    "moments_store",
    "native_on",
    "reduce_ranks",
    "split",
    "update",
]


def adamw(
    weight: Tensor,
    master: Tensor | None,
    moments: Moments,
    grad: Tensor,
    segments: Sequence[Segment],
    *,
    grad_scale: float = 1.0,
    threads: int = 1,
) -> None:
    """One Adam or AdamW update in place and in one pass; elements outside of all segments do not change.

    Raises ValueError: a segment lies outside the tensors or begins before its predecessor ends.

    Args:
        weight: (N,) fp32 (the masters themselves), bf16 or fp16.
        master: None with fp32 weights; (N,) int16 remainder of the exact split (bf16 weights only), or (N,) fp32. None
            with bf16 weights: they are the masters, rounded up or down at random like bf16 moments.
        moments: of N elements; fp32, bf16 or 8-bit.
        grad: (N,) fp32, bf16 or fp16.
        segments: disjoint ranges inside [0, N), in ascending order. With 8-bit moments, each block of 256 that a
            segment without `skip` overlaps is rounded again as a whole.
        grad_scale: multiplies the gradient first: 1 / loss scale * clip coefficient.
    """
    check_update(weight, master, grad, segments, rounded=True)
    check_moments(moments, weight.numel(), weight.device)
    if weight.numel() == 0 or not segments:
        return
    backend = backend_for(weight.device)
    if backend is None:
        fallback.adamw(weight, master, moments, grad, segments, grad_scale)
        return
    operands = *backend.masters(weight, master), backend.moments(moments), backend.pointer(grad), DTYPES[grad.dtype]
    with backend.table(segments) as table:
        backend.call("adamw", *operands, table, len(segments), grad_scale, threads=threads)


def native_on(device: torch.device) -> bool:
    """True if there is a native library for the device; `update` has no fallback."""
    return backend_for(device) is not None


def update(
    formula: Formula,
    weight: Tensor,
    master: Tensor | None,
    states: Sequence[Tensor | None],
    grad: Tensor,
    segments: Sequence[Segment],
    *,
    grad_scale: float = 1.0,
    threads: int = 1,
) -> None:
    """As `adamw`, with another formula; gives the same bits as torch's optimizer over the fp32 masters.

    `states`: (N,) fp32 each, in the order of `formula.states`; None for a state that is not used. Raises NativeError
    too: the formula lacks a state, or there is no native library.
    """
    check_update(weight, master, grad, segments)
    for name, state in zip(formula.states, states, strict=True):
        if state is not None:
            check(name, state, (torch.float32,), weight.numel(), weight.device)
    if weight.numel() == 0 or not segments:
        return
    backend = backend_for(weight.device)
    if backend is None:
        raise NativeError(
            f"update: there is no native library for {weight.device}; use torch's optimizer on that device"
        )
    ffi = backend.native.ffi
    pointers = [ffi.NULL if state is None else backend.pointer(state, "float *") for state in states]
    pointers += [ffi.NULL] * (backend.native.lib.ZN_STATES - len(pointers))
    operands = (
        *backend.masters(weight, master),
        ffi.new("float *[]", pointers),
        backend.pointer(grad),
        DTYPES[grad.dtype],
    )
    with backend.table(segments) as table:
        arguments = weight.numel(), table, len(segments), grad_scale
        backend.call("update", int(formula), *operands, *arguments, threads=threads)


def moments_load(moments: Moments, threads: int = 1) -> tuple[Tensor, Tensor]:
    """Both moments as new fp32 tensors of (N,)."""
    numel, device = moments.exp_avg.numel(), moments.exp_avg.device
    check_moments(moments, numel, device)
    exp_avg, exp_avg_sq = (torch.empty(numel, dtype=torch.float32, device=device) for _ in range(2))
    backend = backend_for(device)
    if backend is None:
        fallback.moments_load(exp_avg, exp_avg_sq, moments)
        return exp_avg, exp_avg_sq
    outputs = backend.pointer(exp_avg, "float *"), backend.pointer(exp_avg_sq, "float *")
    backend.call("moments_load", *outputs, backend.moments(moments), threads=threads)
    return exp_avg, exp_avg_sq


def moments_store(moments: Moments, exp_avg: Tensor, exp_avg_sq: Tensor, threads: int = 1) -> None:
    """Write (N,) fp32 values into `moments`, rounded to nearest; this restores the values of `moments_load` exactly."""
    numel, device = exp_avg.numel(), exp_avg.device
    check("exp_avg", exp_avg, (torch.float32,), numel, device)
    check("exp_avg_sq", exp_avg_sq, (torch.float32,), numel, device)
    check_moments(moments, numel, device)
    backend = backend_for(device)
    if backend is None:
        fallback.moments_store(moments, exp_avg, exp_avg_sq)
        return
    inputs = backend.pointer(exp_avg, "float *"), backend.pointer(exp_avg_sq, "float *")
    backend.call("moments_store", backend.moments(moments), *inputs, threads=threads)


def cast(out: Tensor, src: Tensor, scale: float = 1.0, threads: int = 1) -> None:
    """Convert: `out = (out.dtype)((fp32)src * scale)`, rounded to nearest even; `out` may be `src`.

    Args:
        out: (N,) fp32, bf16 or fp16.
        src: (N,) fp32, bf16 or fp16.
        scale: fp32 factor; 1 converts only.
    """
    check("src", src, FLOATS, src.numel(), src.device)
    check("out", out, FLOATS, src.numel(), src.device)
    if src.numel() == 0:
        return
    backend = backend_for(src.device)
    if backend is None:
        fallback.cast(out, src, scale)
        return
    pointers = backend.pointer(out), DTYPES[out.dtype], backend.pointer(src), DTYPES[src.dtype]
    backend.call("cast", *pointers, src.numel(), scale, threads=threads)


def accumulate(total: Tensor, src: Tensor, first: Tensor | None = None, threads: int = 1) -> None:
    """Accumulate in fp32: `total = total + src`, or `first + src` when `first` is passed.

    Args:
        total: (N,) fp32.
        src: (N,) fp32, bf16 or fp16.
        first: (N,) fp32, bf16 or fp16; the only contribution so far, when there is no sum yet.
    """
    check("src", src, FLOATS, src.numel(), src.device)
    check("total", total, (torch.float32,), src.numel(), src.device)
    first = total if first is None else first
    check("first", first, FLOATS, src.numel(), src.device)
    if src.numel() == 0:
        return
    backend = backend_for(src.device)
    if backend is None:
        fallback.accumulate(total, src, first)
        return
    operands = backend.pointer(first), DTYPES[first.dtype], backend.pointer(src), DTYPES[src.dtype]
    backend.call("accumulate", backend.pointer(total, "float *"), *operands, src.numel(), threads=threads)


def split(weight: Tensor, remainder: Tensor, src: Tensor, threads: int = 1) -> None:
    """Split fp32 exactly into a bf16 weight, rounded half away from zero, and a signed 16-bit remainder.

    Args:
        weight: (N,) bf16, written.
        remainder: (N,) int16, written.
        src: (N,) fp32.
    """
    check("src", src, (torch.float32,), src.numel(), src.device)
    check("weight", weight, (torch.bfloat16,), src.numel(), src.device)
    check("remainder", remainder, (torch.int16,), src.numel(), src.device)
    if src.numel() == 0:
        return
    backend = backend_for(src.device)
    if backend is None:
        fallback.split(weight, remainder, src)
        return
    outputs = backend.pointer(weight), backend.pointer(remainder, "int16_t *")
    backend.call("split", *outputs, backend.pointer(src, "float *"), src.numel(), threads=threads)


def join(out: Tensor, weight: Tensor, remainder: Tensor, threads: int = 1) -> None:
    """Undo `split`: restores every fp32 bit pattern (NaN as the canonical one).

    Args:
        out: (N,) fp32, written.
        weight: (N,) bf16.
        remainder: (N,) int16.
    """
    check("out", out, (torch.float32,), out.numel(), out.device)
    check("weight", weight, (torch.bfloat16,), out.numel(), out.device)
    check("remainder", remainder, (torch.int16,), out.numel(), out.device)
    if out.numel() == 0:
        return
    backend = backend_for(out.device)
    if backend is None:
        fallback.join(out, weight, remainder)
        return
    inputs = backend.pointer(weight), backend.pointer(remainder, "int16_t *")
    backend.call("join", backend.pointer(out, "float *"), *inputs, out.numel(), threads=threads)


def block_sumsq(src: Tensor, into: Tensor | None = None, threads: int = 1) -> Tensor:
    """Sum of squares and count of inf/NaN of every block of 4096 elements (the last may be shorter).

    Args:
        src: (N,) fp32, bf16 or fp16.
        into: memory for the results, shaped as returned; None allocates it.

    Returns:
        (ceil(N / 4096), 2) int64 on the device of `src`, the input of `square_sums.SquareSum.from_rows`.
    """
    check("src", src, FLOATS, src.numel(), src.device)
    sums = check_sums(into, src)
    if src.numel() == 0:
        return sums
    backend = backend_for(src.device)
    if backend is None:
        fallback.block_sumsq(sums, src)
        return sums
    source = backend.pointer(src), DTYPES[src.dtype], src.numel()
    backend.call("block_sumsq", backend.pointer(sums, "zn_square_sum *"), *source, threads=threads)
    return sums


def cast_sumsq(out: Tensor, src: Tensor, scale: float = 1.0, into: Tensor | None = None, threads: int = 1) -> Tensor:
    """`cast`, and `block_sumsq` of the stored values, in one pass over memory; returns these sums."""
    check("src", src, FLOATS, src.numel(), src.device)
    check("out", out, FLOATS, src.numel(), src.device)
    sums = check_sums(into, out)
    if src.numel() == 0:
        return sums
    backend = backend_for(src.device)
    if backend is None:
        fallback.cast_sumsq(out, sums, src, scale)
        return sums
    outputs = backend.pointer(out), DTYPES[out.dtype], backend.pointer(sums, "zn_square_sum *")
    source = backend.pointer(src), DTYPES[src.dtype], src.numel()
    backend.call("cast_sumsq", *outputs, *source, scale, threads=threads)
    return sums


def reduce_ranks(
    stored: Tensor,
    sources: Sequence[Tensor],
    *,
    scale: float = 1.0,
    add: bool = False,
    into: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """Sum the contributions of ranks in fp32, in their order, with `block_sumsq` of the result, in one pass.

    For each element: `s = sources[0] + sources[1] + ...; s = s * scale; stored = s`, or `stored + s` with `add`.
    Returns the sums as `block_sumsq(stored)`. Raises ValueError: there is no source, or one overlaps `stored` without
    being it.

    Args:
        stored: (N,) fp32, or the dtype of the sources (rounded to nearest even); may be one of the sources.
        sources: one or more (N,) of one dtype, fp32, bf16 or fp16.
        scale: fp32 factor, applied to the sum.
        add: add to the present values of `stored` (fp32).
        into: as for `block_sumsq`.
    """
    check_ranks(stored, sources, add)
    sums = check_sums(into, stored)
    backend = backend_for(stored.device)
    if backend is None or stored.device.type != "cpu":
        fallback.reduce_ranks(stored, sources, scale, add)
        return block_sumsq(stored, sums, threads)
    if stored.numel() > 0:
        outputs = backend.pointer(stored), DTYPES[stored.dtype], backend.pointer(sums, "zn_square_sum *")
        table = backend.native.ffi.new("void *[]", [backend.pointer(source) for source in sources])
        operands = table, len(sources), DTYPES[sources[0].dtype], stored.numel(), scale, int(add)
        backend.call("reduce_ranks", *outputs, *operands, threads=threads)
    return sums


def crc32c(tensor: Tensor, crc: int = 0) -> int:
    """CRC-32C (Castagnoli) of the bytes of a flat CPU tensor of any dtype, continued from `crc`."""
    check("tensor", tensor, (tensor.dtype,), tensor.numel(), torch.device("cpu"))
    data = tensor.detach().view(torch.uint8)
    backend = backend_for(tensor.device)
    if backend is None:
        return fallback.crc32c(data.numpy(), crc)
    return int(backend.native.lib.zn_cpu_crc32c(crc, backend.pointer(data), data.numel()))


def isa() -> str:
    """Instruction set of the CPU kernels: "scalar", "avx2", "avx512", or "torch" for the fallback."""
    backend = backend_for(torch.device("cpu"))
    if backend is None:
        return "torch"
    return str(backend.native.ffi.string(backend.native.lib.zn_cpu_isa()).decode())
