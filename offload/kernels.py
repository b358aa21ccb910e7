"""Optimizer, cast, norm and checksum kernels over flat tensors: native where built, torch elsewhere.

Every function works on flat, contiguous tensors of one device and gives the same bits on every
path: scalar, AVX2 and AVX-512 code, CUDA, and the torch fallback. Every NaN written is the canonical
one. CPU calls return when done and release the GIL; CUDA calls enqueue on the current stream.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from native import Native, NativeUnavailable, load, load_cuda
from offload import kernels_fallback as fallback
from offload.errors import NativeError
from offload.segment import Segment
from offload.sizes import BLOCK_NUMEL

__all__ = [
    "BLOCK_NUMEL",
    "Segment",
    "accumulate",
    "adamw",
    "block_sumsq",
    "cast",
    "cast_sumsq",
    "crc32c",
    "isa",
    "join",
    "split",
]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLOATS = tuple(_DTYPES)


def adamw(
    weight: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    segments: Sequence[Segment],
    *,
    grad_scale: float = 1.0,
    threads: int = 1,
) -> None:
    """One Adam or AdamW update in place and in one pass; elements outside every segment are left alone.

    Args:
        weight: (N,) fp32 (is the master), bf16 or fp16.
        master: None with fp32 weights; (N,) int16 remainder of the exact split (bf16 weights only), or (N,) fp32.
        exp_avg: (N,) fp32 first moment.
        exp_avg_sq: (N,) fp32 second moment.
        grad: (N,) fp32, bf16 or fp16.
        segments: disjoint ranges inside [0, N).
        grad_scale: multiplies the gradient first: 1 / loss scale * clip coefficient.
        threads: at most this many CPU threads; the result does not depend on it.

    Raises:
        TypeError: dtype, device, length or layout of a tensor is wrong.
        ValueError: a segment lies outside the tensors.
    """
    numel, device = weight.numel(), weight.device
    _check("weight", weight, _FLOATS, numel, device)
    _check_master(weight, master)
    _check("exp_avg", exp_avg, (torch.float32,), numel, device)
    _check("exp_avg_sq", exp_avg_sq, (torch.float32,), numel, device)
    _check("grad", grad, _FLOATS, numel, device)
    for segment in segments:
        if not 0 <= segment.begin <= segment.end <= numel:
            raise ValueError(f"segment [{segment.begin}, {segment.end}) is outside tensors of {numel} elements")
    if numel == 0 or not segments:
        return
    backend = _backend(device)
    if backend is None:
        for segment in segments:
            if not segment.skip:
                fallback.adamw(weight, master, exp_avg, exp_avg_sq, grad, segment, grad_scale)
        return
    ffi = backend.native.ffi
    table = ffi.new("zn_adam_segment[]", [_segment_values(segment) for segment in segments])
    keep_alive = _on_device(ffi, table, device)
    backend.call(
        "adamw",
        *(backend.pointer(weight), _DTYPES[weight.dtype]),
        *((ffi.NULL, 0) if master is None else (backend.pointer(master), int(master.dtype == torch.float32))),
        *(backend.pointer(exp_avg, "float *"), backend.pointer(exp_avg_sq, "float *")),
        *(backend.pointer(grad), _DTYPES[grad.dtype]),
        table if keep_alive is None else backend.pointer(keep_alive, "zn_adam_segment *"),
        *(len(segments), grad_scale),
        threads=threads,
    )


def cast(out: Tensor, src: Tensor, scale: float = 1.0, threads: int = 1) -> None:
    """Convert: `out = (out.dtype)((fp32)src * scale)`, rounded to nearest even; `out` may be `src`.

    Args:
        out: (N,) fp32, bf16 or fp16.
        src: (N,) fp32, bf16 or fp16.
        scale: fp32 factor; 1 converts only.
        threads: at most this many CPU threads.

    Raises:
        TypeError: dtype, device, length or layout of a tensor is wrong.
    """
    _check("src", src, _FLOATS, src.numel(), src.device)
    _check("out", out, _FLOATS, src.numel(), src.device)
    if src.numel() == 0:
        return
    backend = _backend(src.device)
    if backend is None:
        fallback.cast(out, src, scale)
        return
    pointers = backend.pointer(out), _DTYPES[out.dtype], backend.pointer(src), _DTYPES[src.dtype]
    backend.call("cast", *pointers, src.numel(), scale, threads=threads)


def accumulate(total: Tensor, src: Tensor, first: Tensor | None = None, threads: int = 1) -> None:
    """Accumulate in fp32: `total = total + src`, or `first + src` when `first` is given.

    Args:
        total: (N,) fp32.
        src: (N,) fp32, bf16 or fp16.
        first: (N,) fp32, bf16 or fp16; the contribution kept so far when there is no sum yet.
        threads: at most this many CPU threads.

    Raises:
        TypeError: dtype, device, length or layout of a tensor is wrong.
    """
    _check("src", src, _FLOATS, src.numel(), src.device)
    _check("total", total, (torch.float32,), src.numel(), src.device)
    first = total if first is None else first
    _check("first", first, _FLOATS, src.numel(), src.device)
    if src.numel() == 0:
        return
    backend = _backend(src.device)
    if backend is None:
        fallback.accumulate(total, src, first)
        return
    operands = backend.pointer(first), _DTYPES[first.dtype], backend.pointer(src), _DTYPES[src.dtype]
    backend.call("accumulate", backend.pointer(total, "float *"), *operands, src.numel(), threads=threads)


def split(weight: Tensor, remainder: Tensor, src: Tensor, threads: int = 1) -> None:
    """Split fp32 exactly into a bf16 weight, rounded half away from zero, and a signed 16-bit remainder.

    Args:
        weight: (N,) bf16, written.
        remainder: (N,) int16, written.
        src: (N,) fp32.
        threads: at most this many CPU threads.

    Raises:
        TypeError: dtype, device, length or layout of a tensor is wrong.
    """
    _check("src", src, (torch.float32,), src.numel(), src.device)
    _check("weight", weight, (torch.bfloat16,), src.numel(), src.device)
    _check("remainder", remainder, (torch.int16,), src.numel(), src.device)
    if src.numel() == 0:
        return
    backend = _backend(src.device)
    if backend is None:
        fallback.split(weight, remainder, src)
        return
    outputs = backend.pointer(weight), backend.pointer(remainder, "int16_t *")
    backend.call("split", *outputs, backend.pointer(src, "float *"), src.numel(), threads=threads)


def join(out: Tensor, weight: Tensor, remainder: Tensor, threads: int = 1) -> None:
    """Undo `split`: every fp32 bit pattern comes back (NaN as the canonical one).

    Args:
        out: (N,) fp32, written.
        weight: (N,) bf16.
        remainder: (N,) int16.
        threads: at most this many CPU threads.

    Raises:
        TypeError: dtype, device, length or layout of a tensor is wrong.
    """
    _check("out", out, (torch.float32,), out.numel(), out.device)
    _check("weight", weight, (torch.bfloat16,), out.numel(), out.device)
    _check("remainder", remainder, (torch.int16,), out.numel(), out.device)
    if out.numel() == 0:
        return
    backend = _backend(out.device)
    if backend is None:
        fallback.join(out, weight, remainder)
        return
    inputs = backend.pointer(weight), backend.pointer(remainder, "int16_t *")
    backend.call("join", backend.pointer(out, "float *"), *inputs, out.numel(), threads=threads)


def block_sumsq(src: Tensor, into: tuple[Tensor, Tensor] | None = None, threads: int = 1) -> tuple[Tensor, Tensor]:
    """Sum of squares and count of inf/NaN of every block of 4096 elements (the last may be shorter).

    Args:
        src: (N,) fp32, bf16 or fp16.
        into: where the results go, as returned; None allocates.
        threads: at most this many CPU threads.

    Returns:
        (ceil(N / 4096),) fp64 sums and (ceil(N / 4096),) int64 counts, on the device of `src`. Sixteen lanes add
        every sixteenth element in order and are folded in order: the bits do not depend on the machine.

    Raises:
        TypeError: dtype, device, length or layout of a tensor is wrong.
    """
    _check("src", src, _FLOATS, src.numel(), src.device)
    sums, nonfinite = _block_sums(src, into)
    if src.numel() == 0:
        return sums, nonfinite
    backend = _backend(src.device)
    if backend is None:
        fallback.block_sumsq(sums, nonfinite, src)
        return sums, nonfinite
    outputs = backend.pointer(sums, "double *"), backend.pointer(nonfinite, "int64_t *")
    backend.call("block_sumsq", *outputs, backend.pointer(src), _DTYPES[src.dtype], src.numel(), threads=threads)
    return sums, nonfinite


def cast_sumsq(
    out: Tensor, src: Tensor, scale: float = 1.0, into: tuple[Tensor, Tensor] | None = None, threads: int = 1
) -> tuple[Tensor, Tensor]:
    """`cast`, and `block_sumsq` of what it stored, in one pass over memory.

    Args:
        out: (N,) fp32, bf16 or fp16; may be `src`.
        src: (N,) fp32, bf16 or fp16.
        scale: fp32 factor.
        into: as for `block_sumsq`.
        threads: at most this many CPU threads.

    Returns:
        As `block_sumsq(out)`.

    Raises:
        TypeError: dtype, device, length or layout of a tensor is wrong.
    """
    _check("src", src, _FLOATS, src.numel(), src.device)
    _check("out", out, _FLOATS, src.numel(), src.device)
    sums, nonfinite = _block_sums(out, into)
    if src.numel() == 0:
        return sums, nonfinite
    backend = _backend(src.device)
    if backend is None:
        fallback.cast_sumsq(out, sums, nonfinite, src, scale)
        return sums, nonfinite
    outputs = backend.pointer(sums, "double *"), backend.pointer(nonfinite, "int64_t *")
    source = backend.pointer(src), _DTYPES[src.dtype]
    backend.call(
        *("cast_sumsq", backend.pointer(out), _DTYPES[out.dtype], *outputs, *source, src.numel(), scale),
        threads=threads,
    )
    return sums, nonfinite


def _block_sums(src: Tensor, into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Where the block sums of `src` go, checked."""
    blocks = -(-src.numel() // BLOCK_NUMEL)
    if into is None:
        return tuple(torch.empty(blocks, dtype=t, device=src.device) for t in (torch.float64, torch.int64))  # type: ignore[return-value]
    _check("sums", into[0], (torch.float64,), blocks, src.device)
    _check("nonfinite", into[1], (torch.int64,), blocks, src.device)
    return into


def crc32c(tensor: Tensor, crc: int = 0) -> int:
    """CRC-32C (Castagnoli) of the bytes of a flat CPU tensor of any dtype, continued from `crc`.

    Raises:
        TypeError: the tensor is not flat, contiguous and on the CPU.
    """
    _check("tensor", tensor, (tensor.dtype,), tensor.numel(), torch.device("cpu"))
    data = tensor.detach().view(torch.uint8)
    backend = _backend(tensor.device)
    if backend is None:
        return fallback.crc32c(data.numpy(), crc)
    return int(backend.native.lib.zn_cpu_crc32c(crc, backend.pointer(data), data.numel()))


def isa() -> str:
    """Instruction set of the CPU kernels: "scalar", "avx2", "avx512", or "torch" for the fallback."""
    backend = _backend(torch.device("cpu"))
    if backend is None:
        return "torch"
    return str(backend.native.ffi.string(backend.native.lib.zn_cpu_isa()).decode())


# ---- which code runs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Backend:
    """One native library, with the calling convention of its device."""

    native: Native
    device: torch.device

    def pointer(self, tensor: Tensor, ctype: str = "void *") -> Any:
        return self.native.ffi.cast(ctype, tensor.data_ptr())

    def call(self, name: str, *arguments: Any, threads: int) -> None:
        lib, ffi = self.native.lib, self.native.ffi
        if self.device.type == "cpu":
            status = getattr(lib, f"zn_cpu_{name}")(*arguments, threads)
        else:
            with torch.cuda.device(self.device):
                stream = ffi.cast("void *", torch.cuda.current_stream(self.device).cuda_stream)
                status = getattr(lib, f"zn_cuda_{name}")(*arguments, stream)
        if status != 0:
            reason = ffi.string(lib.zn_strerror(status)).decode()
            raise NativeError(f"{name} on {self.device} with threads={threads}: status {status} ({reason})")


def _backend(device: torch.device) -> _Backend | None:
    """The native library for `device`, or None where the torch fallback has to do."""
    if device.type not in ("cpu", "cuda"):
        return None
    # The variable is part of the key, so that turning the library off takes effect at the next call.
    return _load(device, os.environ.get("ZERO_NATIVE"))


@functools.cache
def _load(device: torch.device, enabled: str | None) -> _Backend | None:
    del enabled
    try:
        return _Backend(load() if device.type == "cpu" else load_cuda(), device)
    except NativeUnavailable as error:
        warnings.warn(
            f"no native kernels for {device.type}: {error.reason}. Torch operations run instead, with the same "
            "results; an optimizer update takes about twenty times as long",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def _segment_values(segment: Segment) -> dict[str, float | int]:
    names = ("begin", "end", "step_size", "bias2_sqrt", "decay", "l2", "beta1", "beta2", "eps")
    values: dict[str, float | int] = {name: getattr(segment, name) for name in names}
    values["skip"] = int(segment.skip)
    values["one_minus_beta1"], values["one_minus_beta2"] = segment.one_minus_beta1, segment.one_minus_beta2
    return values


def _on_device(ffi: Any, table: Any, device: torch.device) -> Tensor | None:
    """The segment table as bytes on a CUDA device; None on the CPU, where the table itself serves."""
    if device.type == "cpu":
        return None
    # Pinned and not waited for: the stream may have to wait for a whole backward, and the caller must not.
    return torch.frombuffer(bytearray(ffi.buffer(table)), dtype=torch.uint8).pin_memory().to(device, non_blocking=True)


# ---- checks of what C cannot see ------------------------------------------------------------------


def _check(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], numel: int, device: torch.device) -> None:
    if tensor.dtype not in dtypes or tensor.device != device or tensor.numel() != numel:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(
            f"{name}: expected {numel} elements of {wanted} on {device}, "
            f"got {tensor.numel()} of {tensor.dtype} on {tensor.device}"
        )
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise TypeError(
            f"{name}: must be flat and contiguous, got shape {tuple(tensor.shape)}, strides {tensor.stride()}; "
            "pass tensor.contiguous().view(-1)"
        )


def _check_master(weight: Tensor, master: Tensor | None) -> None:
    allowed = {torch.float32: (), torch.bfloat16: (torch.int16, torch.float32), torch.float16: (torch.float32,)}
    dtypes = allowed[weight.dtype]
    if master is None:
        if dtypes:
            raise TypeError(f"master: {weight.dtype} weights need one of {' or '.join(map(str, dtypes))}, got None")
        return
    if not dtypes:
        raise TypeError(f"master: must be None, because {weight.dtype} weights are the master; got {master.dtype}")
    _check("master", master, dtypes, weight.numel(), weight.device)
