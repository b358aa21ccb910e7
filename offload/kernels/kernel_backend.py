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
from offload.kernels.moments import Moments
from offload.kernels.segment import Segment

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
