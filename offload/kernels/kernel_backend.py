"""Which code runs a kernel: the native library of the tensors' device, or torch."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from native import Native, NativeUnavailable
from offload.accelerator import HOST, is_accelerator, load_native, module_of, stream_address
from offload.errors import NativeError
from offload.kernels.moments import MOMENTS_BLOCK_NUMEL, Moments
from offload.kernels.segment import Segment
from offload.kernels.square_sums import row_count

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_KIND_OF_MOMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


@dataclass(frozen=True)
class Backend:
    """One native library, with the calling convention of its device."""

    native: Native
    device: torch.device

    def pointer(self, tensor: Tensor, ctype: str = "void *") -> Any:
        """Address of the first element."""
        return self.native.ffi.cast(ctype, tensor.data_ptr())

    def moments(self, moments: Moments) -> Any:
        """A zn_moments struct; it lives as long as the returned object."""
        scales = moments.exp_avg_scale, moments.exp_avg_sq_scale
        values = {
            "kind": _KIND_OF_MOMENTS[moments.exp_avg.dtype],
            "exp_avg": self.pointer(moments.exp_avg),
            "exp_avg_sq": self.pointer(moments.exp_avg_sq),
            "numel": moments.exp_avg.numel(),
            "origin": moments.origin,
            "step": moments.step,
        }
        for name, scale in zip(("exp_avg_scale", "exp_avg_sq_scale"), scales, strict=True):
            values[name] = self.native.ffi.NULL if scale is None else self.pointer(scale, "float *")
        return self.native.ffi.new("zn_moments *", values)

    @contextlib.contextmanager
    def table(self, segments: Sequence[Segment]) -> Iterator[Any]:
        """A pointer to an array of zn_segment in memory that the device's kernels can read; for one call."""
        table = self.native.ffi.new("zn_segment[]", [_segment_values(segment) for segment in segments])
        if self.device.type == "cpu":
            yield table
            return
        # Pinned, so that the copy is asynchronous: the stream may wait for a whole backward, the caller must not.
        host = torch.frombuffer(bytearray(self.native.ffi.buffer(table)), dtype=torch.uint8).pin_memory()
        on_device = host.to(self.device, non_blocking=True)
        yield self.pointer(on_device, "zn_segment *")

    def masters(self, weight: Tensor, master: Tensor | None) -> tuple[Any, ...]:
        """Four arguments of an update: the weights, their masters or remainders, and the kinds of both."""
        stored = (self.native.ffi.NULL, 0) if master is None else (self.pointer(master), master.dtype == torch.float32)
        return self.pointer(weight), DTYPES[weight.dtype], *stored

    def call(self, name: str, *arguments: Any, threads: int) -> None:
        """Call `name` of the device's library. Raises NativeError: its status is not 0."""
        lib, ffi = self.native.lib, self.native.ffi
        if self.device.type == "cpu":
            status = getattr(lib, f"zn_cpu_{name}")(*arguments, threads)
        else:
            with module_of(self.device).device(self.device):
                stream = ffi.cast("void *", stream_address(self.device))
                status = getattr(lib, f"zn_{self.device.type}_{name}")(*arguments, stream)
        if status != 0:
            reason = ffi.string(lib.zn_strerror(status)).decode()
            raise NativeError(f"{name} on {self.device} with threads={threads}: status {status} ({reason})")


def backend_for(device: torch.device) -> Backend | None:
    """The native library for `device`, or None where the torch fallback is used."""
    if device.type != HOST.type and not is_accelerator(device):
        return None
    # The variable is part of the cache key, so that turning the library off takes effect at the next call.
    return _load(device, os.environ.get("ZERO_NATIVE"))


@functools.cache
def _load(device: torch.device, enabled: str | None) -> Backend | None:
    del enabled
    try:
        backend = Backend(load_native(device), device)
        if device.type != "cpu":
            try_out(backend)
        return backend
    except NativeUnavailable as error:
        warnings.warn(
            f"no native kernels for {device.type}: {error.reason}. Torch operations run instead; results are the "
            "same, except for the last bit in Adagrad, RMSprop, SGD and Lion, and an update takes about twenty times "
            "as long",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def try_out(backend: Backend) -> None:
    """Raise NativeUnavailable if the library does not work with this device or its driver; only a call shows this."""
    numbers = torch.ones(2, device=backend.device, dtype=torch.float32)
    target, source = backend.pointer(numbers[:1]), backend.pointer(numbers[1:])
    try:
        backend.call("cast", target, DTYPES[torch.float32], source, DTYPES[torch.float32], 1, 2.0, threads=1)
    except NativeError as error:
        raise NativeUnavailable(str(error)) from error
    if numbers[0].item() != 2.0:
        raise NativeUnavailable(f"a test of the kernels failed: expected 2, got {numbers[0].item()}")


def _segment_values(segment: Segment) -> dict[str, float | int]:
    names = ("begin", "end", "decay", "l2", "beta1", "beta2")
    values: dict[str, float | int] = {name: getattr(segment, name) for name in names}
    values["skip"], values["step_size"], values["eps"] = int(segment.skip), segment.step_size_hat, segment.eps_hat
    values["flags"] = segment.first | segment.nesterov << 1
    values["one_minus_beta1"], values["one_minus_beta2"] = segment.one_minus_beta1, segment.one_minus_beta2
    return values


# ---- kernel checks -------------------------------------------------------------------------------------------------
# Checks of tensors before their addresses are passed to C, which cannot check dtype, length or device.


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES_OF_MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)


def check(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], numel: int, device: torch.device) -> None:
    """Refuse a tensor that is not flat and contiguous, or has another length, dtype or device. Raises TypeError."""
    if tensor.dtype not in dtypes or tensor.device != device or tensor.numel() != numel:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(
            f"{name}: expected {numel} elements of {expected} on {device}, "
            f"got {tensor.numel()} of {tensor.dtype} on {tensor.device}"
        )
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise TypeError(
            f"{name}: must be flat and contiguous, got shape {tuple(tensor.shape)}, strides {tensor.stride()}; "
            "pass tensor.contiguous().view(-1)"
        )


def check_master(weight: Tensor, master: Tensor | None, rounded: bool) -> None:
    """Refuse a master that does not fit the weights' dtype; `rounded`: bf16 may have none. Raises TypeError."""
    allowed = {torch.float32: (), torch.bfloat16: (torch.int16, torch.float32), torch.float16: (torch.float32,)}
    dtypes = allowed[weight.dtype]
    if master is None:
        if dtypes and not (rounded and weight.dtype == torch.bfloat16):
            raise TypeError(f"master: {weight.dtype} weights need one of {' or '.join(map(str, dtypes))}, got None")
        return
    if not dtypes:
        raise TypeError(f"master: must be None, because {weight.dtype} weights are the master; got {master.dtype}")
    check("master", master, dtypes, weight.numel(), weight.device)


def check_update(
    weight: Tensor, master: Tensor | None, grad: Tensor, segments: Sequence[Segment], *, rounded: bool = False
) -> None:
    """Refuse operands of an update that do not fit each other. Raises TypeError, or ValueError for segments.

    `rounded`: bf16 weights may be their own masters.
    """
    numel = weight.numel()
    check("weight", weight, FLOATS, numel, weight.device)
    check_master(weight, master, rounded)
    check("grad", grad, FLOATS, numel, weight.device)
    position = 0
    for segment in segments:
        if not 0 <= segment.begin <= segment.end <= numel:
            raise ValueError(f"segment [{segment.begin}, {segment.end}) is outside tensors of {numel} elements")
        if segment.begin < position:
            raise ValueError(
                f"segment [{segment.begin}, {segment.end}) begins before {position}, where the previous segment ends"
            )
        position = segment.end


def check_moments(moments: Moments, numel: int, device: torch.device) -> None:
    """Refuse moments that are not stored in one of the three ways. Raises TypeError."""
    check("exp_avg", moments.exp_avg, _DTYPES_OF_MOMENTS, numel, device)
    check("exp_avg_sq", moments.exp_avg_sq, (moments.exp_avg.dtype,), numel, device)
    codes = moments.exp_avg.dtype == torch.uint8
    for name, scale in (("exp_avg_scale", moments.exp_avg_scale), ("exp_avg_sq_scale", moments.exp_avg_sq_scale)):
        if codes != (scale is not None):
            raise TypeError(f"{name}: only allowed with uint8 moments, got moments of {moments.exp_avg.dtype}")
        if scale is not None:
            check(name, scale, (torch.float32,), numel // MOMENTS_BLOCK_NUMEL, device)
    if codes and (numel % MOMENTS_BLOCK_NUMEL or moments.origin % MOMENTS_BLOCK_NUMEL):
        raise TypeError(
            f"moments: expected uint8 codes in whole blocks of {MOMENTS_BLOCK_NUMEL} elements, got {numel} elements "
            f"from coordinate {moments.origin:,} on"
        )


def check_sums(into: Tensor | None, src: Tensor) -> Tensor:
    """The tensor for the block sums of `src`: `into`, or a new one. Raises TypeError."""
    shape = (row_count(src.numel()), 2)
    if into is None:
        return torch.empty(shape, dtype=torch.int64, device=src.device)
    if into.shape != shape or not into.is_contiguous():
        raise TypeError(f"into: expected a contiguous tensor of shape {shape}, got {tuple(into.shape)}")
    check("into", into.view(-1), (torch.int64,), into.numel(), src.device)
    return into


def check_ranks(stored: Tensor, sources: Sequence[Tensor], add: bool) -> None:
    """Refuse operands of `reduce_ranks` that do not fit each other. Raises TypeError or ValueError."""
    if not sources:
        raise ValueError("sources: expected at least one tensor, got none")
    numel, device, dtype = stored.numel(), stored.device, sources[0].dtype
    check("sources[0]", sources[0], FLOATS, numel, device)
    for index, source in enumerate(sources):
        check(f"sources[{index}]", source, (dtype,), numel, device)
        first, second = sorted((source, stored), key=torch.Tensor.data_ptr)
        overlaps = second.data_ptr() < first.data_ptr() + first.nbytes
        if overlaps and (source.data_ptr() != stored.data_ptr() or source.dtype != stored.dtype):
            raise ValueError(f"sources[{index}]: overlaps stored but is not the same memory; reduce into other memory")
    check("stored", stored, (torch.float32,) if add else (torch.float32, dtype), numel, device)
