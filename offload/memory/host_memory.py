"""Host memory with an owner: exact-size mappings on huge pages.

A mapping lives as long as the last tensor over it. So a tensor that a user kept stays valid after an engine
is closed: closing only drops the engine's own references.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import native
from offload.accelerator import compute_device, is_accelerator, load_native
from offload.errors import BudgetError, NativeError
from offload.sizes import HUGE_PAGE_BYTES, PAGE_BYTES, align_up

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # Parameters of glibc's mallopt (malloc.h).
MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES = 32 << 20, (1 << 31) - 1  # The largest values they take.
MADV_WIPEONFORK = 18


def map_host(nbytes: int, *, prefault: bool = True) -> memoryview:
    """Zeroed private memory of exactly `nbytes` (rounded up to the page), on huge pages.

    Raises BudgetError: the kernel refused the mapping.

    Args:
        nbytes: the minimum length.
        prefault: all pages are faulted in at once; else each page at its first use, and until then it costs nothing.
    """
    nbytes = align_up(max(nbytes, 1), PAGE_BYTES)
    try:
        lib = native.load()
    except native.NativeUnavailable:
        return _map_host_python(nbytes, prefault=prefault)
    out = lib.ffi.new("void **")
    flags = lib.lib.ZN_MEM_HUGE | (lib.lib.ZN_MEM_TOUCH if prefault else 0)
    status = lib.lib.zn_mem_alloc(out, nbytes, flags)
    if status != 0:
        raise BudgetError(
            f"mapping {nbytes:,} bytes of host memory: {_error_text(lib, status)}; lower memory_budget.host"
        )
    return _owning_view(lib, out[0], nbytes)


def map_shared(descriptor: int, nbytes: int, *, prefault: bool) -> memoryview:
    """A shared mapping of the first `nbytes` (rounded up to the page) of a file; on huge pages if possible.

    Raises OSError: the kernel refused.

    Args:
        descriptor: of a file in memory of at least that length; not needed afterwards.
        nbytes: the minimum length.
        prefault: all pages are faulted in at once.
    """
    nbytes = align_up(max(nbytes, 1), PAGE_BYTES)
    try:
        lib = native.load()
    except native.NativeUnavailable:
        if prefault:
            os.posix_fallocate(descriptor, 0, nbytes)
        mapping = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(mapping)
    out = lib.ffi.new("void **")
    flags = lib.lib.ZN_MEM_HUGE | (lib.lib.ZN_MEM_TOUCH if prefault else 0)
    status = lib.lib.zn_mem_share(out, descriptor, nbytes, flags)
    if status != 0:
        raise OSError(-status, _error_text(lib, status))
    return _owning_view(lib, out[0], nbytes)


def fault_in(data: torch.Tensor) -> None:
    """Fault in the pages of `data` (uint8, host, starting on a page); its bytes stay.

    Raises OSError: the kernel has no memory for them.
    """
    if data.numel() == 0:
        return
    try:
        lib = native.load()
    except native.NativeUnavailable:
        data[::PAGE_BYTES].max()  # for shared memory a read is enough, and it does not race with writers
        return
    status = lib.lib.zn_mem_touch(lib.ffi.cast("void *", data.data_ptr()), data.numel())
    if status != 0:
        raise OSError(-status, _error_text(lib, status))


def map_poison(nbytes: int) -> memoryview:
    """`nbytes` of readable memory that holds NaN in every float type.

    Evicted parameters point here: a missed fetch computes NaN instead of crashing the process.
    With the native library the pages share one small block and cost nothing.
    """
    nbytes = align_up(max(nbytes, 1), PAGE_BYTES)
    try:
        lib = native.load()
    except native.NativeUnavailable:
        view = _map_host_python(nbytes)
        torch.frombuffer(view, dtype=torch.uint8).fill_(0xFF)
        return view
    out = lib.ffi.new("void **")
    status = lib.lib.zn_mem_poison(out, nbytes)
    if status != 0:
        raise NativeError(f"mapping {nbytes:,} bytes of poison pages: {_error_text(lib, status)}")
    return _owning_view(lib, out[0], nbytes)


def _map_host_python(nbytes: int, *, prefault: bool = True) -> memoryview:
    try:
        # The kernel aligns to the page only; the part that is cut off is never touched and costs no memory.
        mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetError(
            f"mapping {nbytes:,} bytes of host memory: {error.strerror}; lower memory_budget.host"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    begin = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    view = memoryview(mapping)[begin : begin + nbytes]
    if prefault:
        torch.frombuffer(view, dtype=torch.uint8).zero_()
    return view


def _owning_view(lib: Any, pointer: Any, nbytes: int) -> memoryview:
    """A view of the memory; it is unmapped when the last reference is gone."""
    owner = lib.ffi.gc(pointer, lambda p: lib.lib.zn_mem_free(p, nbytes), nbytes)
    return memoryview(lib.ffi.buffer(owner, nbytes)).cast("B")


def _error_text(lib: Any, status: int) -> str:
    return str(lib.ffi.string(lib.lib.zn_strerror(status)).decode())


def pin(data: torch.Tensor) -> Callable[[], None] | None:
    """Page-lock host memory for the accelerator, so that copies do not stop the stream.

    Returns a function that undoes it; None when there is nothing to undo: no GPU, or the driver refused (one warning).
    """
    device = compute_device()
    if not is_accelerator(device) or data.numel() == 0:
        return None
    try:
        lib = load_native(device)
        pointer = lib.ffi.cast("void *", data.data_ptr())
        status = lib.lib.zn_cuda_host_register(pointer, data.numel())
        why = "" if status == 0 else _error_text(lib, status)
    except native.NativeUnavailable as error:
        status, why = -1, str(error)
    if status != 0:
        warnings.warn(
            f"pinning {data.numel():,} bytes of host memory: {why}; copies to the GPU are slower", stacklevel=2
        )
        return None
    wipe_on_fork(data)

    def undo() -> None:
        status = lib.lib.zn_cuda_host_unregister(pointer)
        if status != 0:
            warnings.warn(f"unpinning {nbytes:,} bytes of host memory: {_error_text(lib, status)}", stacklevel=2)

    nbytes = data.numel()
    return undo


def unfaulted_bytes(data: torch.Tensor) -> int:
    """Bytes of `data` (uint8, host, starting on a page) in pages that the kernel has not provided yet; 0: unknown."""
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    residency = np.empty(-(-data.numel() // PAGE_BYTES), dtype=np.uint8)
    if mincore is None or sys.platform != "linux" or not residency.size:
        return 0
    memory_range = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel())
    if mincore(*memory_range, residency.ctypes.data_as(ctypes.c_void_p)) != 0:
        return 0
    return PAGE_BYTES * int(residency.size - np.count_nonzero(residency & 1))


def wipe_on_fork(data: torch.Tensor) -> None:
    """Let a child of fork see zeros in the pages of `data`.

    The kernel cannot share pages that are pinned for I/O or for a GPU: each fork (of a data loader's workers, for
    example) would copy all of them. Use it only for memory that a child does not need. Without effect where the
    kernel cannot do it.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and sys.platform == "linux" and data.numel() > 0:
        nbytes = align_up(data.numel() * data.element_size(), PAGE_BYTES)
        madvise(ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(nbytes), MADV_WIPEONFORK)


def trim_heap() -> None:
    """Hand freed heap memory back to the kernel, where the C library can.

    glibc keeps freed blocks of up to 32 MB, which is just the size of a layer's weights: without this call a model
    that was built and spilled layer by layer would still be resident.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def retain_heap() -> None:
    """Let the C library keep the memory that a step frees for the next step, so that it is not faulted in again.

    glibc returns the free end of its heap once it is twice as long as the largest block that was ever mapped. It maps
    blocks of more than 32 MB (the highest value of that limit) one by one. So activations of a few hundred MB would be
    returned at the end of each step and cost 0.5 s per GB to fault in again. With this call up to 2 GiB of the heap's
    end stay; the step had been using them anyway, so the peak does not change. Blocks of more than 32 MB are still
    mapped and unmapped; to put them on the heap too (M_MMAP_MAX = 0) saves their faults, but was seen to fragment the
    heap and raise the peak by a quarter.

    Applies to the whole process and cannot be undone; `trim_heap` still empties the heap. Idempotent;
    without effect where the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def aligned_copy(data: torch.Tensor) -> torch.Tensor:
    """A copy of uint8 `data` in host memory that starts on a page, as O_DIRECT requires."""
    copy = tensor_over(map_host(data.numel()))[: data.numel()]
    copy.copy_(data)
    return copy


@torch.inference_mode(False)  # whoever writes to it later may be in the normal mode
def tensor_over(view: memoryview, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A flat tensor whose storage is exactly `view`, so that storages of one size can be swapped."""
    if len(view) == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(view, dtype=dtype)
